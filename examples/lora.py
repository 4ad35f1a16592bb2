"""GRPO with low-rank adapters (LoRA) on two tensor-parallel ranks; PEFT reads the adapter, and vLLM can draw with it.

    torchrun --nproc-per-node 2 examples/lora.py [--checkpoint FOLDER] [--out FOLDER] [--vllm [DEVICES]]

The checkpoint may be of any family of the native backend (default: a new small random model). The task: generate the
token 7.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import ParallelDims
from parallel_models import SamplingOptions
from rl_models import Actor, Batch, LoraOptions, LossInputs, OptimizerOptions, losses
from rl_models.api import WholeBatches
from rl_train.engines import NativeEngine, RolloutEngine, VllmEngine

GROUPS, SAMPLES, LENGTH, STEPS = 8, 8, 8, 12
DIMS = ParallelDims(tp=2)
# --8<-- [start:options]
LORA = LoraOptions(rank=8, alpha=16, targets="all-linear")
# --8<-- [end:options]


def make_model(path: Path) -> None:
    """Save a Llama with heads of 32 numbers, the smallest that vLLM's attention on a CPU takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


# --8<-- [start:loss]
def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    kl = losses.kl_penalty(inputs.log_probs, inputs["reference"])
    surrogate = losses.ppo_clip(inputs.log_probs, inputs["log_probs"], inputs["advantages"])
    return surrogate + losses.LossTerms(0.01 * kl, {"kl": kl})


# --8<-- [end:loss]


# --8<-- [start:engine]
def make_engine(actor: WholeBatches, checkpoint: Path, vllm: str | None) -> RolloutEngine:
    if vllm is None:
        return NativeEngine(actor)
    # vLLM holds the base, and takes the adapter alone after each step.
    return VllmEngine(actor, checkpoint, devices=vllm.split(","), lora=LORA, max_model_len=64, enforce_eager=True)


# --8<-- [end:engine]


# --8<-- [start:step]
def learn(actor: WholeBatches, engine: RolloutEngine, step: int) -> str:
    prompts = [[1, 4 + i] for i in range(GROUPS)]
    batch = engine.generate(prompts, SamplingOptions(LENGTH, n=SAMPLES, seed=step))
    scores = torch.stack([(response == 7).float().mean() for response in batch.responses()])
    advantages = losses.grpo_advantages(scores, torch.arange(GROUPS).repeat_interleave(SAMPLES))
    batch = batch.with_fields(
        advantages=torch.where(batch.mask, advantages[batch.sequence_ids], 0),
        reference=actor.log_probs(batch, adapters=False).log_probs,  # the frozen base
    )
    for _ in range(2):
        metrics = actor.update(batch, policy_loss)
    engine.update_weights(actor, step + 1)
    return f"step {step}: reward {scores.mean():.3f}, kl {metrics['kl']:.3f}"


# --8<-- [end:step]


# --8<-- [start:peft]
def difference_from_peft(checkpoint: Path, adapter: Path, batch: Batch, log_probs: Tensor) -> float:
    """Return how far the actor's log-probs are from those of PEFT on transformers' own model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False), adapter
    )
    with torch.no_grad():
        logits = torch.cat([model(input_ids=tokens[None]).logits[0, :-1] for tokens in batch.split()])
    expected = logits.log_softmax(-1).gather(1, batch.tokens[~batch.first][:, None])[:, 0]
    return (expected - log_probs[~batch.first]).abs().max().item()


# --8<-- [end:peft]


def main(checkpoint: Path, out: Path, vllm: str | None) -> None:
    first = dist.get_rank() == 0
    # --8<-- [start:actor]
    optimizer = OptimizerOptions(learning_rate=5e-3)
    actor = WholeBatches(Actor.from_pretrained(checkpoint, dims=DIMS, lora=LORA, optimizer=optimizer))
    # --8<-- [end:actor]
    engine = make_engine(actor, checkpoint, vllm)
    for step in range(STEPS):
        line = learn(actor, engine, step)
        if first:
            print(line, flush=True)
    engine.close()
    # --8<-- [start:save]
    actor.save_adapter(out / "adapter")
    actor.save_pretrained(out / "merged")
    again = WholeBatches(Actor.from_pretrained(checkpoint, dims=DIMS, lora=out / "adapter"))
    # --8<-- [end:save]
    batch = Batch.from_sequences([[1, 4, 7, 7, 9], [1, 5, 7]])
    before, after = (model.log_probs(batch).log_probs for model in (actor, again))
    assert torch.equal(before, after)
    if first:
        files = out / "adapter" / "adapter_model.safetensors", out / "merged" / "model.safetensors"
        adapter, merged = (file.stat().st_size / 1e3 for file in files)
        print(f"the adapter has {adapter:.0f} KB, the merged model {merged:.0f} KB")
        print(f"largest difference from PEFT: {difference_from_peft(checkpoint, out / 'adapter', batch, after):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="folder of a model (default: made in OUT/start)")
    parser.add_argument("--out", type=Path, default=Path("lora"), help="folder for the adapter and the merged model")
    parser.add_argument(
        "--vllm",
        nargs="?",
        const="",
        metavar="DEVICES",
        help="let vLLM draw, on devices such as 2,3 (default: the CPU)",
    )
    given = parser.parse_args()
    cuda = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank())
    if given.checkpoint is None and dist.get_rank() == 0:
        make_model(given.out / "start")
    dist.barrier()
    main(given.checkpoint or given.out / "start", given.out, given.vllm)
    dist.destroy_process_group()
