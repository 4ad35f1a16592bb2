"""The most tokens that one GPU learns from at once: by each option that saves memory, and by Megatron-Core.

    python benchmarks/longest.py [--only NAME ...] [--layers N] [--lora RANK] [--offload-optimizer] [--sequence N]
        [--seconds N] [--one] [--json FILE] [--tiny]

Eight layers of Llama 3 8B with its vocabulary (or --layers), bf16, random weights. A step is forward, backward and
AdamW with fp32 masters, on one pack of sequences of 16 384 tokens; both sides have this optimizer. Peak memory depends
on the number of tokens, not on the length of the sequences. --one then learns from one sequence of as many tokens. With
--lora the weights are frozen, and adapters of this rank on every projection learn; Megatron-Core has none.

--offload-optimizer keeps ours in host memory, 12 bytes a weight. Megatron-Core's HybridDeviceOptimizer steps on the
CPU; with its copies of the gradients it needs 17 bytes a weight there, so it offloads three quarters of the weights:
with all of them the 128 GiB of a usual host do not suffice for 8 billion.

Each variant runs in a process of its own, whose allocator has expandable segments, for --seconds at most. It learns
from two small packs, then from the pack that fills the free memory: by the plan for ours, by the peaks of the last two
packs for Megatron-Core; then from larger packs as the peaks predict, while they are 1.5 % larger. After an
out-of-memory error it tries 4 % less, twice at most. A pack that would not end in time is left out. Beside the peak
stands what `rl-train plan` counts for this step, and the most tokens that the plan lets fit. The head keeps no
probabilities.

Megatron-Core has Transformer Engine's layers and fused cross-entropy; its variants recompute all layers one by one, and
offload activations.
"""

import argparse
import gc
import json
import os
import resource
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

from ckpt import Checkpoint
from parallel_layers import ModelConfig, PackedSequence, ParallelDims, clip_grad_norm_
from parallel_layers.linear import LowRank
from parallel_layers.model import LoraOptions, add_lora_
from parallel_models.optimizers import ShardOptimizer
from rl_models import CausalLM, OptimizerOptions
from rl_train.planner import GIB, MemoryOptions, fitting, plan_memory, savings_text

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
# The share of the weights that Megatron-Core's optimizer offloads.
OFFLOADED = 0.75
# The share of the memory that is aimed at, tries after an out-of-memory error, and the share of tokens of each.
FILLED, RETRIES, LESS = 0.99, 2, 0.96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *MEGATRON], help="these variants alone")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    parser.add_argument("--offload-optimizer", action="store_true", help="keep the optimizer's state in host memory")
    parser.add_argument("--seconds", type=float, default=150, help="the longest time of a variant")
    parser.add_argument("--sequence", type=int, default=16384, help="tokens of a sequence of the pack")
    parser.add_argument("--one", action="store_true", help="also learn from one sequence of as many tokens")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--child-until", type=float, help=argparse.SUPPRESS)  # of `time.monotonic`
    options = parser.parse_args()
    hf = dict(TINY) if options.tiny else LLAMA_3_8B | {"num_hidden_layers": options.layers}
    hf["max_position_embeddings"] = 1 << 20
    if options.child_until is not None:
        learn(hf, options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a stopped parent ends its child
    names = options.only or [*VARIANTS, *([] if options.lora or not has_megatron() else MEGATRON)]
    rows, found, limit = [], {}, GIB
    for name in names:
        runs, note = longest(name, options.seconds)
        found[name] = {"runs": runs, "note": note}
        limit = max([run["limit"] for run in runs], default=limit) if CUDA else GIB
        rows.append(row_of(name, hf, options, runs, limit, note))
        print(rows[-1], f"limit {limit / GIB:.1f} GiB", flush=True)
    print(machine(), f"{hf['num_hidden_layers']} layers", f"adapters of rank {options.lora}" * bool(options.lora))
    print("the optimizer's state is in host memory" * options.offload_optimizer)
    heads = [
        "",
        "tokens",
        "s a step",
        "peak GiB",
        "planned",
        "peak / planned",
        "most by plan",
        "one sequence, s",
        "host GiB",
        "note",
    ]
    print(table(heads, rows))
    if not options.tiny:
        tokens, savings = by_plan(hf, options, limit)
        print(f"rl-train plan --gpu-gib {limit / GIB:.1f}: at most {tokens} tokens in one pack, with {savings}")
    write_json(options.json, layers=hf["num_hidden_layers"], lora=options.lora, limit=limit, variants=found)


def longest(name: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Return the runs of a variant that fit, the longest last, and why its process failed."""
    command = [sys.executable, *sys.argv, "--child-until", str(time.monotonic() + seconds), "--only", name]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        output, errors = child.stdout, child.stderr.strip().splitlines()[-1:] if child.returncode else []
    except subprocess.TimeoutExpired as error:  # its process is killed
        output, errors = (error.stdout or b"").decode(), [f"stopped after {seconds:.0f} s"]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    errors += [line["note"] for line in lines if "note" in line]
    runs = [line for line in lines if line.get("fits")]
    return sorted(runs, key=lambda run: (run["one"], run["tokens"])), "; ".join(errors)


def learn(hf: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the runs of one variant, until memory or time ends, or the next one would be no longer."""
    (name,) = options.only
    limit = torch.cuda.mem_get_info()[0] if CUDA else 0
    build = by_megatron if name in MEGATRON else ours
    update = build(hf, (MEGATRON | VARIANTS)[name], options)
    every = options.sequence if not options.tiny else 32
    runs: list[dict[str, Any]] = []

    def run(tokens: int, *, one: bool = False) -> bool:
        gc.collect()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned memory of another size
        lengths = [tokens] if one else [every] * (tokens // every) + [tokens % every] * (tokens % every > 0)
        ids = [torch.randint(hf["vocab_size"], (length,), device=DEVICE) for length in lengths]
        before = 0
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.monotonic()
        fits = True
        try:
            update(PackedSequence.from_sequences(ids))
            synchronize()
        except torch.OutOfMemoryError:
            fits = False
        peak = torch.cuda.max_memory_allocated() if CUDA else 0
        found = {
            "tokens": tokens, "fits": fits, "one": one, "peak": peak, "seconds": time.monotonic() - start,
            "limit": limit, "before": before, "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        print(json.dumps(found), flush=True)
        runs.append(found)
        return fits

    def in_time(tokens: int) -> bool:
        """Return whether a longer pack would end before the time does, by the longest pack so far."""
        last = next(run for run in reversed(runs) if run["fits"])
        left = options.child_until - time.monotonic()
        if 1.1 * last["seconds"] * tokens / last["tokens"] < left:
            return True
        print(json.dumps({"note": f"{tokens} tokens were left out: {left:.0f} s were left"}), flush=True)
        return False

    fits = all(run(tokens) for tokens in ([64, 128] if options.tiny else SMALL))
    failures = 0 if fits else RETRIES
    tokens = 0 if not CUDA else predicted(runs, limit) if name in MEGATRON else planned_most(name, hf, options, limit)
    while fits and tokens > 1.015 * runs[-1]["tokens"] and in_time(tokens):
        fits = run(tokens)
        while not fits and failures < RETRIES and in_time(smaller := int(LESS * tokens) // ROUND * ROUND):
            failures, tokens = failures + 1, smaller
            fits = run(tokens)
        tokens = predicted(runs, limit) if fits and not failures else 0
    if fits and options.one:
        run(runs[-1]["tokens"], one=True)


def planned_most(name: str, hf: dict[str, Any], options: argparse.Namespace, limit: int) -> int:
    """Return the most tokens that the plan lets fit into the share of the memory that is aimed at."""
    return largest(lambda tokens: planned_bytes(name, hf, options, tokens) <= FILLED * limit)


def planned_bytes(name: str, hf: dict[str, Any], options: argparse.Namespace, tokens: int) -> int:
    memory = memory_options(tokens, VARIANTS[name], options)
    return plan_memory(hf, memory, role="causal_lm", trained=True)[0].total


def predicted(runs: list[dict[str, Any]], limit: int) -> int:
    """Return the tokens that fill the share of `limit` bytes that is aimed at, by the last two peaks."""
    (before, low), (last, high) = ((run["tokens"], run["peak"]) for run in runs[-2:])
    # Two packs that the optimizer's step outweighs have one peak, and predict nothing.
    tokens = last + (FILLED * limit - high) * (last - before) / max(high - low, 1)
    return int(min(tokens, 2.5 * last)) // ROUND * ROUND


def ours(hf: dict[str, Any], savings: dict[str, Any], options: argparse.Namespace) -> Callable[[PackedSequence], None]:
    """Return an update of the native model on a pack."""
    model = CausalLM(ModelConfig.from_hf(hf), dtype=torch.bfloat16, device="meta", **savings)
    if options.lora:
        add_lora_(model, LoraOptions(options.lora, 2 * options.lora))
    model.to_empty(device=DEVICE)
    randomise(model)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.reset_parameters()
    optimizer = ShardOptimizer(model, optimizer_options(options))
    return with_optimizer(model, optimizer.step, lambda packed: -model.log_probs(packed, entropy=False).log_probs.sum())


def by_megatron(
    hf: dict[str, Any], config: dict[str, Any], options: argparse.Namespace
) -> Callable[[PackedSequence], None]:
    """Return an update of Megatron-Core's model on a pack."""
    offloaded = {"cpu_offloading_num_layers": hf["num_hidden_layers"] - 1} if "cpu_offloading" in config else {}
    model = megatron_model(hf, **config, **offloaded)
    randomise(model)
    step = hybrid_step(model) if options.offload_optimizer else ShardOptimizer(model, optimizer_options(options)).step
    return with_optimizer(model, step, lambda packed: megatron_losses(model, packed)(packed.input_ids).sum())


def hybrid_step(model: nn.Module) -> Callable[[float], object]:
    """Return a step of Megatron-Core's optimizer, of whose weights the CPU steps a share; gradients are fp32."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    optimizer = HybridDeviceOptimizer(
        [{"params": parameters, "lr": RATE, "weight_decay": 0.0}],
        offload_fraction=OFFLOADED,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        fused=True,
    )

    def step(rate: float) -> None:
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for parameter in optimizer.param_to_fp32_param.values():
            if parameter.is_cuda:
                parameter.grad = None

    return step


def with_optimizer(
    model: nn.Module, step: Callable[[float], object], loss: Callable[[PackedSequence], torch.Tensor]
) -> Callable[[PackedSequence], None]:
    def update(packed: PackedSequence) -> None:
        model.zero_grad(set_to_none=True)  # an out-of-memory error leaves some gradients
        (loss(packed) / packed.num_tokens).backward()
        step(RATE)

    return update


def optimizer_options(options: argparse.Namespace) -> OptimizerOptions:
    return OptimizerOptions(learning_rate=RATE, offload=options.offload_optimizer)


def memory_options(tokens: int, savings: dict[str, Any], options: argparse.Namespace) -> MemoryOptions:
    adapters = LoraOptions(options.lora, 2 * options.lora) if options.lora else None
    return MemoryOptions(
        dims=ParallelDims(), tokens=tokens, dtype=torch.bfloat16, micro_batches=1, device=DEVICE.type, lora=adapters,
        optimizer=optimizer_options(options), **savings,
    )  # fmt: skip


def row_of(
    name: str, hf: dict[str, Any], options: argparse.Namespace, runs: list[dict[str, Any]], limit: int, note: str
) -> list[object]:
    """Return a row of the table: the longest pack that fits, and its plan."""
    none = float("nan")
    packs = [run for run in runs if not run["one"]]
    if not packs:
        return [name, "-", none, none, none, none, "-", none, none, note]
    last = packs[-1]
    alone = next((run["seconds"] for run in runs if run["one"]), none)
    planned, most = none, "-"
    if name in VARIANTS:
        planned = planned_bytes(name, hf, options, last["tokens"]) / GIB
        most = str(largest(lambda tokens: planned_bytes(name, hf, options, tokens) <= limit))
    peak, host = last["peak"] / GIB, last["host"] / GIB
    return [name, last["tokens"], last["seconds"], peak, planned, peak / planned, most, alone, host, note]


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest multiple of ROUND below 2^24 for which `fits` holds, or 0."""
    low, high = 0, (1 << 24) // ROUND
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * ROUND) else (low, middle - 1)
    return low * ROUND


def by_plan(hf: dict[str, Any], options: argparse.Namespace, limit: int) -> tuple[int, str]:
    """Return the most tokens for which `rl-train plan` finds options on one GPU, and these options."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf | {"dtype": "bfloat16"}))
        found: dict[int, str] = {}

        def fits(tokens: int) -> bool:
            memory = memory_options(tokens, {}, options)
            for planned in fitting(Checkpoint(folder), memory, limit, ranks=1, critic=False, reference=False)[:1]:
                found[tokens] = savings_text(planned.options)
            return tokens in found

        tokens = largest(fits)
        return tokens, found.get(tokens, "nothing")


if __name__ == "__main__":
    main()
