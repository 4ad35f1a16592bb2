"""Long sequences: the memory that each option saves at the size of Qwen3-8B, and a proof that none changes the result.

    torchrun --nproc-per-node 4 examples/long_context.py [TOKENS]

The memory is planned for sequences of TOKENS tokens (default: 131072) on 8 GPUs, from the config alone. Four
ranks then take one step with the same options on a small random model, on sequences of 512 tokens.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, LossInputs, OptimizerOptions, losses
from rl_models.api import WholeBatches
from rl_train.planner import GIB, MemoryOptions, plan_memory

# --8<-- [start:variants]
# The grid of 8 GPUs, the grid of 4 ranks of the proof, and the options of the model.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("dp=8", "dp=4", {}),
    ("cp=8", "cp=4", {}),
    ("cp=8", "cp=4", {"context_parallel": "ring"}),
    ("cp=8", "cp=4", {"recompute": "selective"}),
    ("cp=8", "cp=4", {"recompute": "full"}),
    ("tp=8", "tp=4", {}),
    ("tp=8", "tp=4", {"recompute": "full"}),
    ("tp=4,cp=2", "tp=2,cp=2", {"recompute": "full"}),
    ("tp=4,cp=2", "tp=2,cp=2", {"recompute": "full", "tiled_mlp": 8}),
]
# --8<-- [end:variants]
QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
LENGTH = 512


def make_model(path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=LENGTH, initializer_range=0.1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)


# --8<-- [start:plan]
def planned(dims: str, options: dict[str, Any], tokens: int) -> float:
    """Return the peak GiB of a GPU that learns Qwen3-8B from one sequence of `tokens` tokens in a forward pass."""
    savings = {name: value for name, value in options.items() if name != "context_parallel"}  # needs the same memory
    step = MemoryOptions(dims=ParallelDims.parse(dims), tokens=tokens, **savings)
    (memory,) = plan_memory(QWEN3_8B, step, role="causal_lm", trained=True)
    return memory.total / GIB


# --8<-- [end:plan]


def loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.LossTerms(-inputs.log_probs)


# --8<-- [start:step]
def step(checkpoint: Path, dims: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one step on four sequences, one in each forward pass."""
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_sequences([torch.randint(64, (LENGTH,), generator=generator) for _ in range(4)])
    actor = Actor.from_pretrained(
        checkpoint,
        dims=ParallelDims.parse(dims),
        optimizer=OptimizerOptions(1e-4),
        max_tokens_per_micro_batch=LENGTH,  # at least the longest sequence
        **options,
    )
    metrics: dict[str, float] = WholeBatches(actor).update(batch, loss)
    return metrics


# --8<-- [end:step]


def main(checkpoint: Path, tokens: int) -> None:
    if dist.get_rank() == 0:
        print(f"{'options':49}GiB at 8B   loss     gradient norm")
    for dims, small, options in VARIANTS:
        found = step(checkpoint, small, options)
        if dist.get_rank() == 0:
            named = " ".join([f"{dims:10}", *(f"{name}={value}" for name, value in options.items())])
            numbers = f"{found['loss']:8.5f}  {found['grad_norm']:8.5f}"
            print(f"{named:49}{planned(dims, options, tokens):8.1f}  {numbers}", flush=True)


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= 4
    with tempfile.TemporaryDirectory() as folder:
        # Every rank makes the same small model: in a process group transformers would save on rank 0 alone.
        make_model(Path(folder))
        dist.init_process_group("nccl" if cuda else "gloo")
        if cuda:
            torch.cuda.set_device(dist.get_rank())
        main(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 131072)
        dist.destroy_process_group()
