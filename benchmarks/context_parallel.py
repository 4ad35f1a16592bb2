"""Attention over one long sequence with context parallelism: Ulysses and the ring, beside one device.

    torchrun --nproc-per-node CP benchmarks/context_parallel.py [--tokens 32768] [--json FILE] [--tiny]

bf16 random data, 32 query and 8 key-value heads of 128, one causal sequence, forward and backward. The first row is the
same attention on every device by itself, all tokens and all heads: the ideal for cp ranks is its time over cp. Every
round runs each variant once, the slowest rank counts. The errors are the largest absolute ones of this rank's outputs
and gradients beside that first row's, of the worst rank.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import DEVICE, ceilings, join_ranks, machine, side_by_side, table, write_json
from torch import Tensor

from parallel_layers.attention import packed_attention
from parallel_layers.context_parallel import ring_attention, split_sequence, ulysses_attention

Parts = tuple[Tensor, ...]


def gradients(attention: Callable[..., Tensor], parts: list[Tensor], upstream: Tensor) -> Parts:
    out = attention(*parts)
    return (out.detach(), *torch.autograd.grad(out, parts, upstream))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rank, world = join_ranks()
    measured = ceilings()
    tokens, heads, kv_heads, head_dim = (64 * world, 8, 4, 16) if options.tiny else (options.tokens, 32, 8, 128)
    group = dist.group.WORLD if world > 1 else None
    torch.manual_seed(0)
    whole = [
        torch.randn(tokens, count, head_dim, dtype=torch.bfloat16, device=DEVICE)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)

    def shards(layout: str) -> tuple[list[Tensor], Tensor]:
        *inputs, upstream = (split_sequence(x, group, layout=layout).contiguous() for x in whole)
        return [x.requires_grad_() for x in inputs], upstream

    alone = [x.clone().requires_grad_() for x in whole[:3]], whole[3]
    contiguous, zigzag = shards("contiguous"), shards("zigzag")

    def single() -> Parts:
        return gradients(lambda q, k, v: packed_attention(q, k, v, bounds, tokens), *alone)

    def ulysses() -> Parts:
        return gradients(lambda q, k, v: ulysses_attention(q, k, v, bounds, tokens, group=group), *contiguous)

    def ring() -> Parts:
        return gradients(lambda q, k, v: ring_attention(q, k, v, bounds, tokens, group=group), *zigzag)

    calls = {"one device": single, "Ulysses": ulysses, "ring": ring}
    truth = single()
    errors = {"one device": 0.0}
    for name, call, layout in (("Ulysses", ulysses, "contiguous"), ("ring", ring, "zigzag")):
        expected = [split_sequence(x, group, layout=layout) for x in truth]
        found = call()
        differences = [(a.float() - b.float()).abs().max() for a, b in zip(found, expected, strict=True)]
        worst = torch.stack(differences).max()
        if world > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        errors[name] = float(worst)
    timings = side_by_side(calls, rounds=options.rounds)
    flops = 3.5 * 2 * heads * head_dim * tokens**2
    rows: list[list[object]] = []
    for name, timing in timings.items():
        devices = 1 if name == "one device" else world
        share = timings["one device"].median / devices / timing.median
        rows.append([name, devices, timing.median, flops / devices / timing.median * 1e-9, share, errors[name]])
    if rank == 0:
        print(machine(), measured)
        print(table(["attention", "cp", "fwd+bwd ms", "TFLOP/s per GPU", "of the ideal", "largest error"], rows))
        write_json(
            options.json, ceilings=measured, cp=world, tokens=tokens, timings=list(timings.values()), errors=errors
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
