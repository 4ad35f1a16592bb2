"""Weight syncs from an actor to native engines in processes of their own: seconds, GB/s and where the time goes.

    python benchmarks/handover.py --shape 8b                     # engines on another GPU and on the actor's own GPU
    python benchmarks/handover.py --shape 8b --bucket-mib 64 128 256 512
    python benchmarks/handover.py --shape 8b --places "another GPU" --changed 0.01    # and of changed values alone
    python benchmarks/handover.py --tiny                         # on CPUs, by gloo over TCP

The weights are random and made on the device; the checkpoint's files are holes. The first weight sync makes process
groups and the plan, and stands apart; later ones are medians. Boxes of shards go to an engine on another GPU, in as
many copies as the table says; whole tensors go to an engine on the actor's GPU. The stages of whole tensors are
cumulative: the actor's stream alone, the stream packed in buckets, and the whole way to an engine that drops what
arrives. The ceilings move as many bytes: a plain copy in one piece, and NCCL's broadcast in 1 GiB.
"""

import argparse
import gc
import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, DEVICE, machine, table, write_json
from rollouts import LARGE, SHAPE, TINY, write_model
from step import randomise

import ckpt
from parallel_models import SamplingOptions
from rl_models import Actor
from rl_train.engines import EngineOnRanks, EnginePool, SeparateEngine, processes
from rl_train.weight_sync import in_buckets

SHAPES = {"1b": SHAPE, **LARGE}
PROMPT = [1, 5, 9, 13]


class Dropping:
    """A `LocalEngine` that drops what arrives."""

    def load(self, named_tensors: Iterable[Any]) -> None:
        """Take all tensors, and nothing else."""
        exhaust(named_tensors)

    def close(self) -> None:
        """End the engine."""


def write_holes(folder: Path, shape: dict[str, Any]) -> int:
    """Write a checkpoint whose weights are zeros that take no room on the disk, and return their bytes."""
    write_model(folder, shape, weights=False)
    layout = ckpt.layout_for(json.loads((folder / "config.json").read_text()))
    header: dict[str, Any] = {}
    end = 0
    for name, entry in layout.canonical.items():
        if entry.copy_of is None and not entry.optional:
            begin, end = end, end + 2 * prod(entry.shape)
            header[name] = {"dtype": "BF16", "shape": list(entry.shape), "data_offsets": [begin, end]}
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)
    return end


def exhaust(values: Iterable[Any]) -> None:
    """Iterate to the end, and keep nothing."""
    for _ in values:
        pass


def seconds(call: Callable[[], Any]) -> float:
    """Time one call, to the end of its work on all GPUs."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    call()
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def median(call: Callable[[], Any], rounds: int) -> float:
    """Return the median of the calls after the first one."""
    return statistics.median([seconds(call) for _ in range(1 + rounds)][1:])


def ceilings(size: int, rounds: int) -> dict[str, float]:
    """Return the GB/s of plain copies of as many bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    found = {"a copy on the device": size / median(source.clone, rounds) / 1e9}
    if torch.cuda.device_count() > 1:
        target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        found["a peer copy"] = size / median(lambda: target.copy_(source), rounds) / 1e9
        parts = list(zip(source.split(1 << 30), target.split(1 << 30), strict=True))
        found["NCCL's broadcast"] = size / median(lambda: exhaust(map(torch.cuda.nccl.broadcast, parts)), rounds) / 1e9
    return found


def place_of(index: int) -> str:
    """Return the id of a GPU of this process, as in `CUDA_VISIBLE_DEVICES`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index] if visible else str(index)


def change(actor: Actor, share: float) -> None:
    """Change a share of the actor's values."""
    for parameter in actor.engine.module.parameters():
        values = parameter.data.view(-1)
        values[torch.randint(len(values), (int(share * len(values)),), device=values.device)] *= 1.5


def measure(actor: Actor, engine: EngineOnRanks, rounds: int, share: float = 0.0) -> dict[str, Any]:
    """Return the seconds of the first and of later weight syncs; of a native engine, whether it draws as the actor."""
    times = []
    try:
        for version in range(1, 2 + rounds):
            change(actor, share)
            times.append(seconds(lambda to=version: engine.update_weights(actor, to)))
        found = {"first s": times[0], "later s": statistics.median(times[1:]), "least s": min(times[1:])}
        if isinstance(engine, SeparateEngine):
            sender, greedy = engine.shards, SamplingOptions(16, temperature=0.0)
            found["way"] = "in place" if sender is None else sender.backend
            found["GB"] = 0 if sender is None else sender.sent_bytes / 1e9
            found["copies"] = 0 if sender is None else sum(map(len, sender.plan.rounds))
            drawn = engine.generate([PROMPT], greedy), actor.generate([PROMPT], **vars(greedy))
            found["weights"] = "right" if torch.equal(*(batch.tokens.cpu() for batch in drawn)) else "WRONG"
    finally:
        engine.close()
    return found


def stages(actor: Actor, bucket_bytes: int, rounds: int) -> dict[str, float]:
    """Return the seconds of what goes before boxes are sent, and of the stream of whole tensors, alone and packed."""

    def stream() -> Iterable[Any]:
        return actor.stream_weights(to=[0])

    return {
        "hold s": median(actor.held_weights, rounds),
        "stream s": median(lambda: exhaust(stream()), rounds),
        "and pack s": median(lambda: exhaust(in_buckets(stream(), bucket_bytes, check=False)), rounds),
    }


def report_of(
    folder: Path,
    size: int,
    buckets: Sequence[int],
    rounds: int,
    check: bool,
    wanted: Sequence[str] | None,
    changed: float,
) -> list[dict[str, Any]]:
    """Return a row for each place of the engine and each size of buckets."""
    import handover  # the engine's process imports its class from this module

    actor = Actor.from_pretrained(folder, device=DEVICE)
    randomise(actor.engine.module)
    gpus = torch.cuda.device_count()
    places = {"another GPU": place_of(1)} if gpus > 1 else {}
    places |= {"the same GPU": place_of(0)} if CUDA else {"another process": ""}
    places = {place: device for place, device in places.items() if place in (wanted or places)}
    rows = []
    for mib in buckets:
        bucket_bytes = mib << 20
        before = stages(actor, bucket_bytes, rounds)
        for place, device in places.items():
            pool = EnginePool(
                processes(handover.Dropping, [device], silence=120.0), bucket_bytes=bucket_bytes, check=check
            )
            dropping = measure(actor, EngineOnRanks(actor, folder, lambda pool=pool: pool, ranks=[0]), rounds)
            native = SeparateEngine(actor, folder, devices=[device], bucket_bytes=bucket_bytes, check=check)
            found = measure(actor, native, rounds)
            row = {"engine": place, "bucket MiB": mib, "GB/s": size / found["later s"] / 1e9}
            row |= found | before | {"and send s": dropping["later s"]}
            if changed:
                native = SeparateEngine(
                    actor, folder, devices=[device], bucket_bytes=bucket_bytes, check=check, changed_only=True
                )
                found = measure(actor, native, rounds, changed)
                row |= {f"changed {name}": found[name] for name in ("first s", "later s", "GB", "weights")}
            rows.append(row)
            print(row, flush=True)
    del actor
    gc.collect()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="The model.")
    parser.add_argument("--layers", type=int, help="Layers of the model (default: all).")
    parser.add_argument("--places", nargs="+", help="Where engines run, such as 'another GPU' (default: all places).")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[256 if CUDA else 64], help="Sizes of buckets.")
    parser.add_argument("--check", action="store_true", help="Compare a checksum of each tensor.")
    parser.add_argument("--changed", type=float, default=0.0, help="Share of changed values, which are sent alone.")
    parser.add_argument("--rounds", type=int, default=5, help="Weight syncs that are counted.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model, in small buckets.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    shape = SHAPES[args.shape] | (TINY if args.tiny else {})
    if args.layers:
        shape = {**shape, "num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as name:
        size = write_holes(Path(name), shape)
        rows = report_of(Path(name), size, args.bucket_mib, args.rounds, args.check, args.places, args.changed)
    if CUDA:
        torch.cuda.empty_cache()
    limits = ceilings(size, args.rounds)
    print(json.dumps(machine()), f"{size / 1e9:.3g} GB")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(table(("ceiling", "GB/s"), limits.items()))
    write_json(args.json, bytes=size, rows=rows, ceilings=limits)


if __name__ == "__main__":
    main()
