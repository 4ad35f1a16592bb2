"""vLLM as the rollout engine of an actor: weight sync, sleep and wake, and tokens per second.

    python benchmarks/weight_sync.py                       # 1B shape; the engine in this process, then in another one
    python benchmarks/weight_sync.py --places in-process   # one of them
    python benchmarks/weight_sync.py --tiny                # to see that it works, on a CPU too

The actor and vLLM share the device. The weight sync gives all weights by `stream_weights`; its rate is in GB/s of whole
tensors, beside a copy of as many bytes on the device. Times are medians after one round that is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, DEVICE, machine, synchronize, table, write_json
from rollouts import SHAPE, TINY
from transformers import LlamaConfig, LlamaForCausalLM

PLACES = {"in-process": None, "another process": ["0" if CUDA else ""]}


def seconds(call: Callable[[], Any]) -> float:
    """Time one call."""
    synchronize()
    begun = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begun


def measure(
    folder: Path, devices: list[str] | None, rounds: int, sequences: int, tokens: int, **options: Any
) -> dict[str, Any]:
    """Return the medians of one place of the engine: this process, or another one on this device."""
    from parallel_models import SamplingOptions
    from rl_models import Actor
    from rl_train.engines import VllmEngine

    actor = Actor.from_pretrained(folder, device=DEVICE)
    found: dict[str, list[float]] = {}
    begun = time.perf_counter()
    engine = VllmEngine(actor, folder, devices=devices, **options)
    ready = time.perf_counter() - begun
    prompts = torch.randint(1, 500, (64, 128 if CUDA else 8)).tolist()
    sampling = SamplingOptions(tokens, n=max(1, sequences // 64))
    steps = {
        "weight sync s": lambda: engine.update_weights(actor, engine.version + 1),
        "generate s": lambda: engine.generate(prompts, sampling),
        "sleep s": engine.sleep,
        "wake s": engine.wake,
    }
    for _ in range(1 + rounds):
        for name, call in steps.items():
            found.setdefault(name, []).append(seconds(call))
            if name == "sleep s" and CUDA:
                found.setdefault("GiB in use asleep", []).append(_used())
    if CUDA:
        found["GiB in use awake"] = [_used()] * 2
    engine.close()
    return {"ready s": ready, **{name: statistics.median(values[1:]) for name, values in found.items()}}


def _used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--rounds", type=int, default=3, help="Rounds that are counted.")
    parser.add_argument("--eager", action="store_true", help="Start vLLM without compiled code and CUDA graphs.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    shape = {**SHAPE, **TINY, "head_dim": 64} if args.tiny else SHAPE
    options = {"max_model_len": 1024, "max_num_seqs": 256} | ({"enforce_eager": True} if args.eager or not CUDA else {})
    report = {}
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
        model.save_pretrained(name)
        size = sum(parameter.nbytes for parameter in model.parameters())
        source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        copy = statistics.median(seconds(source.clone) for _ in range(5))
        del model, source
        if CUDA:
            torch.cuda.empty_cache()
        for place in args.places:
            found = measure(
                Path(name), PLACES[place], args.rounds, 64 if args.tiny else 256, 256 if CUDA else 8, **options
            )
            report[place] = found | {"GB/s": size / found["weight sync s"] / 1e9}
            print(place, report[place], flush=True)
    print(machine(), f"{size / 1e9:.2f} GB; a copy on the device: {size / copy / 1e9:.0f} GB/s")
    names = list(dict.fromkeys(name for found in report.values() for name in found))
    rows = [(place, *(found.get(name, float("nan")) for name in names)) for place, found in report.items()]
    print(table(("engine", *names), rows))
    write_json(args.json, bytes=size, copy_seconds=copy, places=report)


if __name__ == "__main__":
    main()
