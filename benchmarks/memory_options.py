"""The options of an `Actor` that save memory or time: milliseconds and peak GiB of an update, beside the plain one.

    python benchmarks/memory_options.py [--backends parallel transformers megatron] [--only NAME ...] [--rounds N]
        [--tokens N] [--json FILE] [--tiny]

A model of Llama 3.2 1B's shape with random bf16 weights, AdamW with fp32 masters, one micro-batch: four responses to
one prompt, which has half of the tokens of each sequence. Each variant is loaded alone, checked and timed: its
log-probs and the norm of its first gradient must be those of the backend's plain model, within the rounding of bf16, or
of FP8. Peak memory counts weights, optimizer and gradients; beside it stands the peak that `rl-train plan` counts, and
measured / planned. A variant that a machine cannot run says why. The first two backends take about three minutes on an
H200. megatron takes Megatron-Core's local layers, and rows with TE those of Transformer Engine; it has no plan.
"""

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import CUDA, DEVICE, machine, milliseconds, synchronize, table, write_json
from transformers import LlamaConfig, LlamaForCausalLM

from parallel_layers import ModelConfig, ParallelDims
from parallel_layers.model import LoraOptions
from rl_models import Actor, Batch, LossInputs, MegatronOptions, OptimizerOptions
from rl_models.losses import LossTerms
from rl_train.planner import MemoryOptions, plan_memory

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = SHAPE | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 515,
}  # fmt: skip
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
TILED, OFFLOAD = {"tiled_mlp": 8}, {"offload_activations": True}
SHARED, FLOAT8 = {"share_prefixes": True}, {"float8": "current"}
TE = {"megatron": MegatronOptions(layers="transformer_engine")}
# Half of each of the four sequences is the prompt, which three of them repeat.
REPEATED = 3 / 8
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "parallel": {
        "plain": {}, "recompute full": FULL, "recompute selective": SELECTIVE, "tiled_mlp 8": TILED,
        "offload": OFFLOAD, "offload, recompute full": OFFLOAD | FULL, "float8 current": FLOAT8,
        "float8 block": {"float8": "block"}, "share_prefixes": SHARED, "share_prefixes, recompute full": SHARED | FULL,
        "half of the layers again": {"recompute": "half"},
        "keep_probabilities": {"keep_probabilities": True}, "lora 16": {"lora": LoraOptions(16)},
        "lora 16, recompute full": {"lora": LoraOptions(16)} | FULL,
        "bf16 moments": {"optimizer": {"moments": "bfloat16"}}, "int8 moments": {"optimizer": {"moments": "int8"}},
        "muon": {"optimizer": {"algorithm": "muon"}}, "plain again": {},
    },
    "transformers": {
        "plain": {}, "recompute full": FULL, "recompute selective": SELECTIVE, "tiled_mlp 8": TILED,
        "offload": OFFLOAD, "offload, recompute full": OFFLOAD | FULL, "share_prefixes": SHARED,
        "share_prefixes, recompute full": SHARED | FULL,
    },
    "megatron": {
        "plain": {}, "recompute full": FULL, "recompute selective": SELECTIVE, "tiled_mlp 8": TILED,
        "offload": OFFLOAD, "offload, recompute full": OFFLOAD | FULL, "TE": TE, "TE, tiled_mlp 8": TE | TILED,
        "TE, offload": TE | OFFLOAD, "TE, recompute full": TE | FULL, "TE, float8 current": TE | FLOAT8,
        "TE, float8 current, recompute full": TE | FLOAT8 | FULL,
        "TE, float8 current, offload": TE | FLOAT8 | OFFLOAD, "TE, float8 block": TE | {"float8": "block"},
    },
}  # fmt: skip
# Mean difference of a log-prob, and relative difference of the gradient's norm, that are rounding.
ROUNDING, OF_FLOAT8 = (0.02, 0.02), (0.4, 0.05)


class Found(NamedTuple):
    """One variant: the times of an update and of scoring, the peak, and how far its numbers are from the plain ones."""

    backend: str
    name: str
    update_ms: float
    log_probs_ms: float
    peak_gib: float
    planned_gib: float
    measured_over_planned: float
    log_prob_error: float
    gradient_error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", choices=list(VARIANTS), default=["parallel", "transformers"])
    parser.add_argument("--only", nargs="*", help="variants beside the plain one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384, help="of the batch")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape, tokens = (TINY, 256) if options.tiny else (SHAPE, options.tokens)
    found, wrong = [], []
    with tempfile.TemporaryDirectory() as folder, process_group("megatron" in options.backends):
        path = save(shape, Path(folder))
        batch = make_batch(tokens, shape["vocab_size"])
        for backend in options.backends:
            plain: tuple[torch.Tensor, float] | None = None
            for name, extra in VARIANTS[backend].items():
                if options.only and not name.startswith("plain") and name not in options.only:
                    continue
                try:
                    result, plain = measure(path, backend, name, extra, batch, options.rounds, plain)
                except (ValueError, ImportError, RuntimeError, torch.OutOfMemoryError) as error:
                    print(f"{backend}, {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                found.append(result)
                limits = OF_FLOAT8 if "float8" in extra else ROUNDING
                # Adapters are 0 at first, and have other gradients than the weights.
                limits = (limits[0], float("inf")) if "lora" in extra else limits
                if not (result.log_prob_error <= limits[0] and result.gradient_error <= limits[1]):
                    wrong.append(f"{backend}, {name}: {result}")
    print(machine(), f"{tokens} tokens")
    print(table([field.replace("_", " ") for field in Found._fields], found))
    write_json(options.json, tokens=tokens, variants=[each._asdict() for each in found])
    if wrong:
        sys.exit("numbers that are not the plain model's:\n" + "\n".join(wrong))


@contextlib.contextmanager
def process_group(needed: bool) -> Iterator[None]:
    """Megatron-Core wants a process group, and on a CPU its stand-in."""
    if not needed:
        yield
        return
    from megatron_utils.testing import cpu_stand_in

    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with contextlib.nullcontext() if CUDA else cpu_stand_in():
            yield
    finally:
        dist.destroy_process_group()


def save(shape: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    with DEVICE:
        model = LlamaForCausalLM(LlamaConfig(**shape, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_batch(tokens: int, vocab_size: int) -> Batch:
    """Four responses to one prompt."""
    generator = torch.Generator().manual_seed(0)
    each = tokens // 4
    prompt = torch.randint(vocab_size, (each // 2,), generator=generator)
    rows = [
        torch.cat([prompt, torch.randint(vocab_size, (each - len(prompt),), generator=generator)]) for _ in range(4)
    ]
    return Batch.from_sequences(rows, response_lengths=[each - len(prompt)] * 4, device=DEVICE)


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def measure(
    path: Path,
    backend: str,
    name: str,
    options: dict[str, Any],
    batch: Batch,
    rounds: int,
    plain: tuple[torch.Tensor, float] | None,
) -> tuple[Found, tuple[torch.Tensor, float]]:
    """Return what a variant takes, and the plain model's log-probs and norm of the first gradient."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    # The free memory of the GPU would decide otherwise.
    options = {"keep_probabilities": False} | options
    optimizer = OptimizerOptions(learning_rate=1e-6, **options.pop("optimizer", {}))
    if options.get("recompute") == "half":
        options["recompute"] = tuple(range(ModelConfig.from_hf(path).num_layers // 2))
    actor = Actor.from_pretrained(
        path, backend=backend, device=DEVICE, max_tokens_per_micro_batch=batch.num_tokens,
        optimizer=optimizer, **options,
    )  # fmt: skip

    def score() -> torch.Tensor:
        return actor.log_probs(batch).log_probs

    def update() -> float:
        return actor.update(batch, loss)["grad_norm"]

    log_probs, norm = score(), update()
    of_plain, norm_of_plain = plain = plain or (log_probs, norm)
    difference = (log_probs - of_plain)[batch.mask].abs().mean().item()
    update_ms, score_ms = (median(call, rounds) for call in (update, score))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    update()
    synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    planned = float("nan") if backend == "megatron" else plan(path, batch.num_tokens, options, optimizer)
    gradient = abs(norm / norm_of_plain - 1)
    return Found(backend, name, update_ms, score_ms, peak, planned, peak / planned, difference, gradient), plain


def plan(path: Path, tokens: int, options: dict[str, Any], optimizer: OptimizerOptions) -> float:
    """Return the planned GiB of an update of one micro-batch."""
    given = {name: value for name, value in options.items() if name != "share_prefixes"}
    given |= {"repeated": REPEATED} if "share_prefixes" in options else {}
    memory = MemoryOptions(
        dims=ParallelDims(), tokens=tokens, optimizer=optimizer, micro_batches=1, device=DEVICE.type, **given
    )
    (planned,) = plan_memory(path, memory, role="causal_lm", trained=True)
    return planned.total / 2**30


def median(call: Callable[[], object], rounds: int) -> float:
    call()
    synchronize()
    return statistics.median(milliseconds(call) for _ in range(rounds))


if __name__ == "__main__":
    main()
