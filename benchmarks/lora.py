"""A training step with low-rank adapters: the native model beside full training, and beside PEFT on transformers.

    python benchmarks/lora.py [--layers N] [--ranks N ...] [--lengths N ...] [--json FILE] [--trace FILE] [--rounds N]
        [--tiny]

Sixteen layers of Llama 3 8B with its vocabulary (full training of all 32 does not fit one GPU), 8192 tokens as
2 x 4096, bf16, random weights, no recomputation. A step is forward, backward and AdamW; adapters are on every
projection ("all-linear"). "base in FP8" keeps the frozen projections in FP8, with a scale for each block of 128 x 128.
The native model keeps fp32 master weights of bf16 parameters; PEFT keeps its adapters in fp32, which is its default, or
with the base in bf16 ("bf16"). Attention is that which each side chooses: transformers takes flash-attn 2 where it is
installed, else sdpa. Memory is all that a step holds, weights and optimizer included.

Models are made one after another, and then once more in the opposite order. The variants of PEFT are left out where
peft is not installed.
"""

import argparse
import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from huggingface import HAS_FLASH, chosen
from kernel_times import kernel_times
from measure import CUDA, DEVICE, Timing, ceilings, machine, side_by_side, table, write_json
from step import LLAMA_3_8B, TINY, Step, randomise

from parallel_layers import ModelConfig, PackedSequence
from parallel_layers.linear import LowRank
from parallel_layers.model import LoraOptions, add_lora_, hold_in_float8_
from parallel_models.optimizers import ShardOptimizer
from rl_models import CausalLM, OptimizerOptions

RATE = 1e-5


def native(hf: dict[str, Any], rows: list[torch.Tensor], rank: int, *, fp8: bool = False) -> Step:
    """Return a step of the native model; rank 0: of all weights; `fp8`: the frozen projections are in FP8 by blocks."""
    model = CausalLM(ModelConfig.from_hf(hf), dtype=torch.bfloat16, device="meta")
    if rank:
        add_lora_(model, LoraOptions(rank, 2 * rank))
    if fp8:
        frozen = ((name, p) for name, p in model.named_parameters() if "_proj" in name and not p.requires_grad)
        hold_in_float8_(model, {name: (gcd(128, p.shape[0]), gcd(128, p.shape[1])) for name, p in frozen})
    model.to_empty(device=DEVICE)
    randomise(model)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.reset_parameters()
    optimizer = ShardOptimizer(model, OptimizerOptions(learning_rate=RATE))
    packed = PackedSequence.from_sequences(rows)

    def step() -> None:
        (-model.log_probs(packed, entropy=False).log_probs.sum() / packed.num_tokens).backward()
        optimizer.step(RATE)

    return step


def by_peft(hf: dict[str, Any], rows: list[torch.Tensor], rank: int, *, wide: bool) -> Step:
    """Return a step of PEFT; `wide`: its adapters are fp32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    attention = "flash_attention_2" if HAS_FLASH else "sdpa"
    config = LlamaConfig(**hf, attn_implementation=attention, use_cache=False)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        base = LlamaForCausalLM(config)
    torch.set_default_dtype(dtype)
    options = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, options, autocast_adapter_dtype=wide)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, fused=CUDA)
    ids = torch.stack(rows)

    def step() -> None:
        logits = model(input_ids=ids).logits[:, :-1]
        (-chosen(logits, ids[:, 1:]).mean()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(build: Callable[[], Step], name: str, rounds: int, trace: bool) -> tuple[Timing, float, str]:
    """Make a model, and return its times, its GiB and its kernels; the model is dropped."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = build()
        timing = side_by_side({name: step}, rounds=rounds, warm_up=2)[name]
        gib = torch.cuda.max_memory_allocated() / 2**30 if CUDA else float("nan")
        return timing, gib, f"## {name}\n\n{kernel_times(step)}\n" if trace else ""
    except torch.cuda.OutOfMemoryError:
        return Timing(name, failed="does not fit"), float("nan"), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of so many layers")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], help="ranks of the adapters")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 4096], help="the sequences, of one length")
    parser.add_argument("--trace", help="write each model's kernels, by time and stream, to this file")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=5, help="of each model, twice")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    if len(set(options.lengths)) > 1:
        parser.error(f"--lengths {options.lengths}: transformers takes sequences of one length without padding")
    measured = ceilings()
    hf = dict(TINY if options.tiny else LLAMA_3_8B | {"num_hidden_layers": options.layers})
    lengths = [max(2, length // 64) for length in options.lengths] if options.tiny else options.lengths
    rows = [torch.randint(hf["vocab_size"], (length,), device=DEVICE) for length in lengths]
    variants: dict[str, Callable[[], Step]] = {"full training": partial(native, hf, rows, 0)}
    variants |= {f"rank {rank}": partial(native, hf, rows, rank) for rank in options.ranks}
    variants |= {f"rank {rank}, base in FP8": partial(native, hf, rows, rank, fp8=True) for rank in options.ranks}
    if importlib.util.find_spec("peft"):
        for rank in options.ranks:
            variants[f"PEFT, rank {rank}"] = partial(by_peft, hf, rows, rank, wide=True)
            variants[f"PEFT, rank {rank}, bf16"] = partial(by_peft, hf, rows, rank, wide=False)
    found = {name: measure(build, name, options.rounds, bool(options.trace)) for name, build in variants.items()}
    for name, build in reversed(variants.items()):
        if not found[name][0].failed:
            found[name][0].times += measure(build, name, options.rounds, False)[0].times
    full, gib_of_full = found["full training"][0].median, found["full training"][1]
    table_rows: list[list[object]] = []
    for name, (timing, gib, _) in found.items():
        ms = timing.median
        table_rows.append([name, ms, sum(lengths) / ms * 1e3, gib, ms / full, gib / gib_of_full, timing.failed])
    print(machine(), measured)
    print(f"{len(lengths)} x {lengths[0]} tokens, {hf['num_hidden_layers']} layers")
    print(table(["", "ms", "tokens/s", "peak GiB", "ms / full", "GiB / full", "note"], table_rows))
    if options.trace:
        Path(options.trace).write_text("\n".join(kernels for _, _, kernels in found.values()))
    write_json(options.json, ceilings=measured, lengths=lengths, rows=table_rows)


if __name__ == "__main__":
    main()
