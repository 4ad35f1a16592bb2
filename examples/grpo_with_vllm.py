"""GRPO with vLLM: it draws the responses, and takes the actor's weights after every step.

    torchrun --nproc-per-node 2 examples/grpo_with_vllm.py [CHECKPOINT]

CHECKPOINT is a folder of a family that both vLLM and the native backend have (default: a new small random model).
Tensor parallelism shards the actor over the ranks. The first rank starts vLLM in a process of its own, on the devices
of `ROLLOUT_DEVICES`, such as 2,3 (default: the CPU). The task: generate the token 7.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_layers import ParallelDims
from parallel_models import SamplingOptions
from rl_models import Actor, LossInputs, OptimizerOptions, losses
from rl_models.api import WholeBatches
from rl_train.engines import VllmEngine

GROUPS, SAMPLES, LENGTH, STEPS = 8, 8, 8, 12


def make_model(path: Path) -> None:
    """A Llama with heads of 32 numbers, the smallest that vLLM's attention on a CPU takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["log_probs"], inputs["advantages"])


def main(checkpoint: Path) -> None:
    optimizer = OptimizerOptions(learning_rate=5e-3)
    # --8<-- [start:engine]
    dims = ParallelDims(tp=dist.get_world_size())
    actor = WholeBatches(Actor.from_pretrained(checkpoint, dims=dims, optimizer=optimizer))
    devices = os.environ.get("ROLLOUT_DEVICES", "").split(",")
    engine = VllmEngine(actor, checkpoint, devices=devices, max_model_len=64, enforce_eager=True, check=True)
    # --8<-- [end:engine]
    prompts = [[1, 4 + i] for i in range(GROUPS)]
    # --8<-- [start:step]
    for step in range(STEPS):
        batch = engine.generate(prompts, SamplingOptions(LENGTH, n=SAMPLES, seed=step))
        difference = (actor.log_probs(batch).log_probs - batch["log_probs"])[batch.mask].abs().max()
        scores = torch.stack([(response == 7).float().mean() for response in batch.responses()])
        groups = torch.arange(GROUPS).repeat_interleave(SAMPLES)
        advantages = losses.grpo_advantages(scores, groups)
        batch = batch.with_fields(advantages=torch.where(batch.mask, advantages[batch.sequence_ids], 0))
        for _ in range(2):
            actor.update(batch, policy_loss)
        engine.update_weights(actor, step + 1)
        # --8<-- [end:step]
        if dist.get_rank() == 0:
            print(f"step {step}: reward {scores.mean():.3f}, log-probs differ by {difference:.1e}", flush=True)
    engine.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) < 2:
            # Every rank makes the same small model: in a process group transformers would save on rank 0 alone.
            make_model(Path(folder))
        dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
        main(Path(sys.argv[1] if len(sys.argv) > 1 else folder))
        dist.barrier()
        dist.destroy_process_group()
