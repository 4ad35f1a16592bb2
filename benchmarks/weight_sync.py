"""vLLM as the rollout engine of an actor: weight sync, sleep and wake, and tokens per second.

    python benchmarks/weight_sync.py                       # 1B shape; every place of the engine that this machine has
    python benchmarks/weight_sync.py --places colocated    # one of them
    python benchmarks/weight_sync.py --tiny                # to see that it works, on a CPU too

A colocated engine belongs to the actor's rank, shares its device, and sleeps between calls; the others run apart, on
the devices of the table. "GiB in use" are those of the first GPU between calls. The weight sync sends all weights; its
rate is in GB/s of whole tensors, beside a copy of as many bytes on the device. "log-prob difference" is the mean one
between what vLLM reports of its drawn tokens and the actor's log-probs, after weight syncs; "with R3" the actor takes
the experts that vLLM's router chose. Times are medians after one round that is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, DEVICE, machine, synchronize, table, write_json
from rollouts import LARGE, SHAPE, TINY, write_model

from parallel_layers import ParallelDims

GPUS = max(1, torch.cuda.device_count())
# The GPUs of an engine apart; at tp 2 they share out a mixture's experts. vLLM's R3 wants pp 1.
PLACES = {"colocated": (), "same device": (0,), "another GPU": (1,), "tp 2": (0, 1), "pp 2": (0, 1)}


def seconds(call: Callable[[], Any]) -> float:
    """Time one call."""
    synchronize()
    begun = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begun


def measure(folder: Path, rounds: int, sequences: int, tokens: int, **options: Any) -> dict[str, Any]:
    """Return the medians of one place of the engine."""
    from parallel_models import SamplingOptions
    from rl_models import Actor
    from rl_train.engines import VllmEngine

    actor = Actor.from_pretrained(folder, device=DEVICE)
    found: dict[str, list[float]] = {}
    begun = time.perf_counter()
    engine = VllmEngine(actor, folder, **options)
    ready = time.perf_counter() - begun
    prompts = torch.randint(1, 500, (64, 128 if CUDA else 8)).tolist()
    sampling = SamplingOptions(tokens, n=max(1, sequences // 64))
    steps = {
        "weight sync s": lambda: engine.update_weights(actor, engine.version + 1),
        "generate s": lambda: engine.generate(prompts, sampling),
    }
    for _ in range(1 + rounds):
        for name, call in steps.items():
            found.setdefault(name, []).append(seconds(call))
    if CUDA:
        found["GiB in use"] = [_used()] * 2
    batch = engine.generate(prompts, SamplingOptions(tokens))
    engine.close()
    without = replace(batch, fields={name: field for name, field in batch.fields.items() if name != "routing"})
    batches = {"log-prob difference": without} | ({"with R3": batch} if "routing" in batch.fields else {})
    for title, drawn in batches.items():
        differences = (actor.log_probs(drawn).log_probs.cpu() - batch["log_probs"]).abs()[batch.mask]
        found |= {title: [differences.mean().item()] * 2, f"{title}, largest": [differences.max().item()] * 2}
    return {"ready s": ready, **{name: statistics.median(values[1:]) for name, values in found.items()}}


def _used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", choices=PLACES, help="Where vLLM runs (default: all that can be here).")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds that are counted.")
    parser.add_argument("--mixture", action="store_true", help="Four layers of Qwen3-30B-A3B, with R3.")
    parser.add_argument("--eager", action="store_true", help="Start vLLM without compiled code and CUDA graphs.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    shape = LARGE["30b-a3b"] | {"num_hidden_layers": 4} if args.mixture else SHAPE
    if args.tiny:
        shape = shape | TINY | {"head_dim": 64} | ({"num_experts": 4, "num_experts_per_tok": 2} if args.mixture else {})
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 256, "routing": args.mixture}
    if args.eager or not CUDA:
        options["enforce_eager"] = True
    report = {}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), shape, weights=True)
        size = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
        source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        copy = statistics.median(seconds(source.clone) for _ in range(5))
        del source
        if CUDA:
            torch.cuda.empty_cache()
        for place in args.places or [name for name, gpus in PLACES.items() if max(gpus, default=0) < GPUS]:
            where: dict[str, Any] = {}
            if gpus := PLACES[place]:
                where["devices"] = [str(gpu) if CUDA else "" for gpu in gpus]
                if place == "pp 2":
                    where |= {"dims": ParallelDims(pp=2), "routing": False}
                else:
                    where["dims"] = ParallelDims(tp=len(gpus), ep=len(gpus) if args.mixture else 1)
            sizes = (args.rounds, 64 if args.tiny else 256, 256 if CUDA else 8)
            found = measure(Path(name), *sizes, **(options | where))
            report[place] = found | {"GB/s": size / found["weight sync s"] / 1e9}
            print(place, report[place], flush=True)
    print(machine(), f"{size / 1e9:.2f} GB; a copy on the device: {size / copy / 1e9:.0f} GB/s")
    names = list(dict.fromkeys(name for found in report.values() for name in found))
    rows = [(place, *(found.get(name, float("nan")) for name in names)) for place, found in report.items()]
    print(table(("engine", *names), rows))
    write_json(args.json, bytes=size, copy_seconds=copy, places=report)


if __name__ == "__main__":
    main()
