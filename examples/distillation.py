"""On-policy distillation: a policy on tp 2 learns from a wider teacher on dp 2, on the same two ranks.

    torchrun --nproc-per-node 2 examples/distillation.py [STUDENT TEACHER]

Both are checkpoint folders of the native backend with one vocabulary (default: two new small models). The policy draws
responses, and learns from the divergence of its distribution from the teacher's at every token, over the whole
vocabulary.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_layers import ParallelDims
from rl_models import Actor, LossInputs, OptimizerOptions
from rl_models.api import WholeBatches
from rl_models.calls import Divergence
from rl_models.losses import LossTerms

STEPS = 12


def make_models(folder: Path) -> tuple[Path, Path]:
    """Save a small student, and a wider teacher that is sure of its tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    paths = []
    for name, hidden_size, scale in (("student", 32, 1.0), ("teacher", 64, 8.0)):
        torch.manual_seed(hidden_size)
        config = LlamaConfig(
            vocab_size=32, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        model.lm_head.weight.data *= scale
        model.save_pretrained(folder / name)
        paths.append(folder / name)
    return paths[0], paths[1]


# --8<-- [start:loss]
def divergence_of_teacher(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs["divergence"])


# --8<-- [end:loss]


def main(student: Path, teacher_folder: Path) -> None:
    first = dist.get_rank() == 0
    # --8<-- [start:models]
    optimizer = OptimizerOptions(learning_rate=1e-2)
    actor = WholeBatches(Actor.from_pretrained(student, dims=ParallelDims(tp=2), optimizer=optimizer))
    teacher = WholeBatches(Actor.from_pretrained(teacher_folder, dims=ParallelDims(dp=2)))
    actor.load_teacher_head(teacher_folder)  # this rank's rows, divided as the actor's own
    # --8<-- [end:models]
    # --8<-- [start:step]
    for step in range(STEPS):
        batch = actor.generate([[1, 4 + i] for i in range(16)], n=4, max_new_tokens=8, seed=step)
        batch = batch.with_fields(teacher_states=teacher.states(batch))  # [T, hidden size of the teacher]
        metrics = actor.update(batch, divergence_of_teacher, divergence=Divergence("reverse_kl"))
        # --8<-- [end:step]
        if first:
            print(f"step {step}: reverse KL {metrics['loss']:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="STUDENT TEACHER")
    folders = parser.parse_args().folders
    cuda = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    with tempfile.TemporaryDirectory() as folder:
        if not folders:
            paths = [make_models(Path(folder)) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(paths)
            folders = paths[0]
        main(*folders)
        dist.barrier()
    dist.destroy_process_group()
