"""Hand a live model's weights over: the rate of `ckpt.stream_hf`, to the host and on the device, beside plain copies.

    python benchmarks/stream.py                 # a model of about 8 GB on one GPU
    torchrun --nproc-per-node 2 benchmarks/stream.py --gb 8 --json stream.json

Each rank holds its tensor-parallel shards in bfloat16 and receives every whole tensor. Rates are GB/s of whole tensors
on a rank, medians of alternating rounds after one round that is not counted: it allocates the pinned memory.
"""

import argparse
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from checkpoint import config_of
from measure import CUDA, DEVICE, join_ranks, side_by_side, table, write_json
from torch import Tensor

from ckpt import Place, layout_for, stream_hf

# Large enough for the full rate of a copy.
COPY_BYTES = 1 << 30


def consume(stream: Iterable[tuple[str, Tensor]]) -> None:
    """Take every tensor and drop it, as an engine does that has copied it."""
    for _ in stream:
        pass


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0 if CUDA else 0.2, help="Size of the model in GB.")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds that are counted.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    rank, world = join_ranks()
    group = dist.group.WORLD if world > 1 else None

    layout, place = layout_for(config_of(args.gb)), Place(tp=(rank, world))
    tensors = {
        name: torch.randn(block.shape, dtype=torch.bfloat16, device=DEVICE) for name, block in layout.at(place).items()
    }
    streamed = sum(2 * math.prod(entry.shape) for entry in layout.canonical.values())
    source = torch.empty(COPY_BYTES if CUDA else COPY_BYTES >> 4, dtype=torch.uint8, device=DEVICE)
    pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=CUDA)
    pageable = torch.empty(source.shape, dtype=torch.uint8)
    calls = {
        "a pinned copy": (source.nbytes, lambda: pinned.copy_(source)),
        "a pageable copy": (source.nbytes, lambda: pageable.copy_(source)),
        "stream_hf(device='cpu')": (streamed, lambda: consume(stream_hf(tensors, layout, group, place, device="cpu"))),
        "stream_hf()": (streamed, lambda: consume(stream_hf(tensors, layout, group, place))),
    }
    timings = side_by_side({name: call for name, (_, call) in calls.items()}, rounds=args.rounds, warm_up=1)
    rates = {name: calls[name][0] / timing.median / 1e6 for name, timing in timings.items()}
    if rank == 0:
        print(f"{streamed / 1e9:.2f} GB on {world} rank(s)")
        rows = [(name, f"{rate:.1f}", f"{rate / rates['a pinned copy']:.2f}") for name, rate in rates.items()]
        print(table(("", "GB/s", "of a pinned copy"), rows))
        write_json(args.json, bytes=streamed, ranks=world, gb_per_second=rates)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
