"""The parts of a decoding step over ranks: exchanges of few tokens beside NCCL's, and experts on few tokens.

    torchrun --nproc-per-node 2 benchmarks/few_tokens.py        # all-reduce, with a norm, reduce-scatter, all-gather
    python benchmarks/few_tokens.py                             # experts of Qwen3-30B-A3B's layer
    python benchmarks/few_tokens.py --tiny                      # to see that it works, on a CPU too

Exchanges are times of one in a CUDA graph of 64, in microseconds; on a CPU both are gloo's. The last column has an
all-reduce with the residual addition and the norm behind it, as one kernel and as two of ours. Experts are the ordinary
layer and the layer of a decoding step, with the time that reading its weights takes at the rate of a copy.
"""

import argparse
import json
import statistics
from functools import partial

import torch
import torch.distributed as dist
from measure import (
    CUDA,
    DEVICE,
    Call,
    ceilings,
    join_ranks,
    machine,
    milliseconds,
    side_by_side,
    synchronize,
    table,
    write_json,
)  # fmt: skip

from parallel_layers import RMSNorm
from parallel_layers.inference import decoding_attributes
from parallel_layers.linear import exchange_few, sum_and_norm
from parallel_layers.module import view_of
from parallel_layers.moe import MoE, MoEConfig

SHAPES = [(32, 4096), (64, 4096), (128, 2048), (128, 4096), (256, 4096)]
IN_GRAPH = 64


def in_graph(call: Call, rounds: int) -> float:
    """Return the median microseconds of one call in a CUDA graph of many; on a CPU of one call."""
    call()
    synchronize()
    if not CUDA:
        return 1e3 * milliseconds(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    times = []
    for _ in range(1 + rounds):
        synchronize()
        times.append(1e3 * milliseconds(graph.replay) / IN_GRAPH)
    return statistics.median(times[1:])


def exchanges(shapes: list[tuple[int, int]], rounds: int) -> list[list[object]]:
    """Return the rows of a table of the exchanges of bf16 tensors, ours beside the group's own."""
    group = dist.group.WORLD
    assert group is not None
    rows: list[list[object]] = []
    for shape in shapes:
        x = torch.randn(shape, device=DEVICE).bfloat16()
        part, whole = x[: len(x) // group.size()].clone(), x.repeat(group.size(), 1)
        own = {
            "all-reduce": partial(dist.all_reduce, x.clone()),
            "reduce-scatter": partial(dist.reduce_scatter_tensor, part, x),
            "all-gather": partial(dist.all_gather_into_tensor, whole, x),
        }
        cells = [
            f"{in_graph(partial(exchange_few, x, group, kind), rounds):.1f} / {in_graph(own[kind], rounds):.1f}"
            for kind in own
        ]
        residual, norm = torch.randn_like(x), RMSNorm(shape[1], dtype=x.dtype, device=DEVICE)
        with torch.no_grad():
            fused = in_graph(partial(sum_and_norm, x, residual, norm, group), rounds)
            apart = in_graph(lambda: norm.add_and_norm(exchange_few(x, group, "all-reduce"), residual), rounds)  # noqa: B023
        rows.append([list(shape), *cells, f"{fused:.1f} / {apart:.1f}"])
    return rows


def experts(tokens: int, hidden: int, config: MoEConfig, rounds: int) -> list[list[object]]:
    """Return the rows of a table of a layer's times, and of the bytes of its experts' weights."""
    layer = MoE(hidden, config, dtype=torch.bfloat16, device=DEVICE)
    view = view_of(layer, lambda _, copy: copy.__dict__.update(decoding_attributes(copy)))
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    with torch.no_grad():
        times = side_by_side({"ordinary": lambda: layer(x), "decoding": lambda: view(x)}, rounds=rounds)
    rate = ceilings().get("copy_tb_per_s", 0.01) * 1e12
    weights = sum(weight.nbytes for weight in layer.experts.parameters())
    rows: list[list[object]] = [[name, 1e3 * timing.median] for name, timing in times.items()]
    return [*rows, ["experts' weights at the rate of a copy", 1e6 * weights / rate]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="Tokens of the layer of experts.")
    parser.add_argument("--rounds", type=int, default=15, help="Times of each call, of which the median counts.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    rank, world = join_ranks()
    config = MoEConfig(num_experts=128, top_k=8, intermediate_size=768)
    hidden, shapes = 2048, SHAPES
    if args.tiny:
        config, hidden, shapes = MoEConfig(num_experts=8, top_k=2, intermediate_size=32), 64, [(8, 64)]
    heads = (
        ["ours / the group's", "all-reduce", "reduce-scatter", "all-gather", "all-reduce, addition, norm"]
        if world > 1
        else ["layer", "us"]
    )
    rows = exchanges(shapes, args.rounds) if world > 1 else experts(args.tokens, hidden, config, args.rounds)
    if rank == 0:
        print(json.dumps(machine()))
        print(table(heads, rows))
        write_json(args.json, rows=rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
