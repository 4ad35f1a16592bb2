"""The most tokens that one GPU learns from at once: by each option that saves memory, and by Megatron-Core.

    python benchmarks/longest.py [--only NAME ...] [--layers N] [--lora RANK] [--sequence N] [--one] [--json FILE]
        [--tiny]

Eight layers of Llama 3 8B with its vocabulary (or --layers), bf16, random weights. A step is forward, backward and
AdamW with fp32 masters, on one pack of sequences of 16 384 tokens; both sides have this optimizer. Peak memory depends
on the number of tokens, not on the length of the sequences. --one then learns from one sequence of as many tokens. With
--lora the weights are frozen, and adapters of this rank on every projection learn; Megatron-Core has none.

Each variant runs in a process of its own, whose allocator has expandable segments. The peaks of two small packs predict
the number of tokens that fills 99 % of the free memory, which is tried; so is the next prediction, until it is less
than 1.5 % larger. After an out-of-memory error a new process tries 3 % less. Beside the peak stands what `rl-train
plan` counts for this step, and the most tokens that the plan lets fit. The head keeps no probabilities.

Megatron-Core has Transformer Engine's layers and fused cross-entropy; its variants recompute all layers one by one, and
offload activations.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, DEVICE, machine, synchronize, table, write_json
from megatron_model import has_megatron, megatron_losses, megatron_model
from step import LLAMA_3_8B, TINY, randomise
from torch import nn

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.linear.low_rank import LowRank
from parallel_layers.lora import LoraOptions, add_lora_
from parallel_layers.model import ModelConfig
from rl_models.engines.optimizers.interface import OptimizerOptions
from rl_models.engines.optimizers.masters import ShardOptimizer
from rl_models.models.language_models import CausalLM
from rl_train.planner.fitting import fitting
from rl_train.planner.memory import GIB, MemoryOptions
from rl_train.planner.models import savings_text
from rl_train.planner.plan import plan_memory

FULL: dict[str, Any] = {"recompute": "full"}
TILED, OFFLOAD = {"tiled_mlp": 8}, {"offload_activations": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute selective": {"recompute": "selective"},
    "recompute full": FULL,
    "recompute full, offload": FULL | OFFLOAD,
    "recompute full, tiled_mlp 8": FULL | TILED,
    "recompute full, offload, tiled_mlp 8": FULL | OFFLOAD | TILED,
}
MEGATRON: dict[str, dict[str, Any]] = {
    "megatron": {},
    "megatron, recompute full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "megatron, offload": {"cpu_offloading": True, "cpu_offloading_activations": True, "cpu_offloading_weights": False},
}
RATE = 1e-6
# The packs that predict the others, in tokens; multiples of ROUND are tried.
SMALL, ROUND = (16384, 49152), 1024
# Seconds of one process.
LIMIT = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *MEGATRON], help="these variants alone")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    parser.add_argument("--sequence", type=int, default=16384, help="tokens of a sequence of the pack")
    parser.add_argument("--one", action="store_true", help="also learn from one sequence of as many tokens")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--below", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hf = dict(TINY) if options.tiny else LLAMA_3_8B | {"num_hidden_layers": options.layers}
    hf["max_position_embeddings"] = 1 << 20
    if options.child:
        learn(hf, options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a stopped parent ends its child
    names = options.only or [*VARIANTS, *([] if options.lora or not has_megatron() else MEGATRON)]
    rows, found, limit = [], {}, GIB
    for name in names:
        runs, note = longest(name)
        found[name] = {"runs": runs, "note": note}
        limit = max([run["limit"] for run in runs], default=limit) if CUDA else GIB
        rows.append(row_of(name, hf, options, runs, limit, note))
        print(rows[-1], f"limit {limit / GIB:.1f} GiB", flush=True)
    print(machine(), f"{hf['num_hidden_layers']} layers", f"adapters of rank {options.lora}" * bool(options.lora))
    heads = [
        "",
        "tokens",
        "s a step",
        "peak GiB",
        "planned",
        "peak / planned",
        "most by plan",
        "one sequence, s",
        "note",
    ]
    print(table(heads, rows))
    if not options.tiny:
        tokens, savings = by_plan(hf, options.lora, limit)
        print(f"rl-train plan --gpu-gib {limit / GIB:.1f}: at most {tokens} tokens in one pack, with {savings}")
    write_json(options.json, layers=hf["num_hidden_layers"], lora=options.lora, limit=limit, variants=found)


def longest(name: str) -> tuple[list[dict[str, Any]], str]:
    """Return the runs of a variant that fit, the longest last, and an error; each process has one error at most."""
    below, fit = 0, []
    while True:
        command = [sys.executable, *sys.argv, "--child", "--only", name, "--below", str(below)]
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        try:
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
            output, errors = child.stdout, child.stderr.strip().splitlines()[-1:] if child.returncode else []
        except subprocess.TimeoutExpired as error:
            output, errors = (error.stdout or b"").decode(), [f"stopped after {LIMIT} s"]
        runs = [json.loads(line) for line in output.splitlines() if line.startswith('{"tokens"')]
        fit += [run for run in runs if run["fits"]]
        failed = min((run["tokens"] for run in runs if not run["fits"]), default=0)
        if errors or not failed or failed <= SMALL[0] or (fit and fit[-1]["tokens"] >= 0.97 * failed):
            return sorted(fit, key=lambda run: (run["one"], run["tokens"])), " ".join(errors)
        below = int(0.97 * failed) // ROUND * ROUND


def learn(hf: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the runs of one variant, until memory ends, or the next one would be no longer."""
    (name,) = options.only
    limit = torch.cuda.mem_get_info()[0] if CUDA else 0
    build = by_megatron if name in MEGATRON else ours
    update = build(hf, (MEGATRON | VARIANTS)[name], options.lora)
    every = options.sequence if not options.tiny else 32
    peaks: list[tuple[int, int]] = []

    def run(tokens: int, *, one: bool = False) -> bool:
        gc.collect()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned memory of another size
        lengths = [tokens] if one else [every] * (tokens // every) + [tokens % every] * (tokens % every > 0)
        ids = [torch.randint(hf["vocab_size"], (length,), device=DEVICE) for length in lengths]
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        fits = True
        try:
            update(PackedSequence.from_sequences(ids))
            synchronize()
        except torch.OutOfMemoryError:
            fits = False
        peak = torch.cuda.max_memory_allocated() if CUDA else 0
        seconds = time.monotonic() - began
        found = {"tokens": tokens, "fits": fits, "one": one, "peak": peak, "seconds": seconds, "limit": limit}
        print(json.dumps(found), flush=True)
        peaks.append((tokens, peak))
        return fits

    packs = [64, 128] if options.tiny else [SMALL[0], options.below] if options.below else list(SMALL)
    fits = all(run(tokens) for tokens in packs)
    while fits and CUDA and not options.below and (tokens := predicted(peaks, limit)) > 1.015 * peaks[-1][0]:
        fits = run(tokens)
    if fits and options.one:
        run(peaks[-1][0], one=True)


def predicted(peaks: list[tuple[int, int]], limit: int) -> int:
    """Return the tokens that fill 99 % of `limit` bytes, by the last two peaks."""
    (before, low), (last, high) = peaks[-2:]
    # Two packs that the optimizer's step outweighs have one peak, and predict nothing.
    tokens = last + (0.99 * limit - high) * (last - before) / max(high - low, 1)
    return int(min(tokens, 2.5 * last)) // ROUND * ROUND


def ours(hf: dict[str, Any], savings: dict[str, Any], lora: int) -> Callable[[PackedSequence], None]:
    """Return an update of the native model on a pack."""
    model = CausalLM(ModelConfig.from_hf(hf), dtype=torch.bfloat16, device="meta", **savings)
    if lora:
        add_lora_(model, LoraOptions(lora, 2 * lora))
    model.to_empty(device=DEVICE)
    randomise(model)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.reset_parameters()
    return with_optimizer(model, lambda packed: -model.log_probs(packed, entropy=False).log_probs.sum())


def by_megatron(hf: dict[str, Any], config: dict[str, Any], lora: int) -> Callable[[PackedSequence], None]:
    """Return an update of Megatron-Core's model on a pack."""
    offloaded = {"cpu_offloading_num_layers": hf["num_hidden_layers"] - 1} if "cpu_offloading" in config else {}
    model = megatron_model(hf, **config, **offloaded)
    randomise(model)
    return with_optimizer(model, lambda packed: megatron_losses(model, packed)(packed.input_ids).sum())


def with_optimizer(
    model: nn.Module, loss: Callable[[PackedSequence], torch.Tensor]
) -> Callable[[PackedSequence], None]:
    optimizer = ShardOptimizer(model, OptimizerOptions(learning_rate=RATE))

    def update(packed: PackedSequence) -> None:
        (loss(packed) / packed.num_tokens).backward()
        optimizer.step(RATE)

    return update


def memory_options(tokens: int, savings: dict[str, Any], lora: int) -> MemoryOptions:
    adapters = LoraOptions(lora, 2 * lora) if lora else None
    return MemoryOptions(
        ParallelDims(), tokens, dtype=torch.bfloat16, micro_batches=1, device=DEVICE.type, lora=adapters, **savings
    )


def row_of(
    name: str, hf: dict[str, Any], options: argparse.Namespace, runs: list[dict[str, Any]], limit: int, note: str
) -> list[object]:
    """Return a row of the table: the longest pack that fits, and its plan."""
    none = float("nan")
    packs = [run for run in runs if not run["one"]]
    if not packs:
        return [name, "-", none, none, none, none, "-", none, note]
    last = packs[-1]
    alone = next((run["seconds"] for run in runs if run["one"]), none)
    planned, most = none, "-"
    if name in VARIANTS:

        def total(tokens: int) -> int:
            memory = memory_options(tokens, VARIANTS[name], options.lora)
            return plan_memory(hf, memory, role="causal_lm", trained=True)[0].total

        planned, most = total(last["tokens"]) / GIB, str(largest(lambda tokens: total(tokens) <= limit))
    peak = last["peak"] / GIB
    return [name, last["tokens"], last["seconds"], peak, planned, peak / planned, most, alone, note]


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of ROUND below 2^24 for which `fits` holds, or 0."""
    low, high = 0, (1 << 24) // ROUND
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * ROUND) else (low, middle - 1)
    return low * ROUND


def by_plan(hf: dict[str, Any], lora: int, limit: int) -> tuple[int, str]:
    """Return the most tokens for which `rl-train plan` finds options on one GPU, and these options."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf | {"dtype": "bfloat16"}))
        found: dict[int, str] = {}

        def fits(tokens: int) -> bool:
            memory = memory_options(tokens, {}, lora)
            for planned in fitting(Path(folder), memory, limit, ranks=1, critic=False, reference=False)[:1]:
                found[tokens] = savings_text(planned.options)
            return tokens in found

        tokens = largest(fits)
        return tokens, found.get(tokens, "nothing")


if __name__ == "__main__":
    main()
