"""Attention over one long sequence with context parallelism: Ulysses and the ring, beside one device and the peers.

    torchrun --nproc-per-node CP benchmarks/context_parallel.py [--tokens 32768] [--json FILE] [--tiny]
    python benchmarks/context_parallel.py --alone CP [...]

bf16 random data, 32 query and 8 key-value heads of 128, one causal sequence, forward and backward. The first row is the
same attention on every device by itself, all tokens and all heads: the ideal for cp ranks is its time over cp. Every
round runs each variant once, the slowest rank counts. The errors are the largest absolute ones of this rank's outputs
and gradients beside that first row's, of the worst rank.

The peers, on several GPUs: torch's own `context_parallel`, and Transformer Engine's attention where it is installed, by
each of its ways to communicate over one group, without flash-attn-4 (`step.py` says why). One that raises is left out
and says why.

The second form measures on one device the work of each of CP ranks by itself: what a rank sends goes nowhere, and what
it receives is whatever was in that memory, so there are no errors to show. The time is that of the slowest rank: the
least that CP devices can take, with all that is sent hidden, not what they do take.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from measure import CUDA, DEVICE, Timing, ceilings, join_ranks, machine, side_by_side, table, write_json
from torch import Tensor
from torch.nn import functional as F

from parallel_layers import packed_attention
from parallel_layers.attention import ring_attention, split_sequence, ulysses_attention

ONE_DEVICE = "one device"
Parts = tuple[Tensor, ...]
# From (q, k, v) and the gradient of what comes out to what comes out and their gradients.
Run = Callable[[list[Tensor], Tensor], Parts]


def gradients(attention: Callable[..., Tensor], parts: list[Tensor], upstream: Tensor) -> Parts:
    out = attention(*parts)
    return (out.detach(), *torch.autograd.grad(out, parts, upstream))


def by_torch(parts: list[Tensor], upstream: Tensor) -> Parts:
    """Torch's ring over zigzag shards, of which its backward runs within its context, too."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    def attention(*heads_last: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in heads_last)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    mesh = DeviceMesh.from_group(dist.group.WORLD, DEVICE.type)
    # It divides its buffers and asks for one; the parts are divided already.
    with context_parallel(mesh, buffers=[torch.zeros(2 * mesh.size(), device=DEVICE)], buffer_seq_dims=[0]):
        return gradients(attention, parts, upstream)


@functools.cache
def transformer_engine(communication: str, heads: int, kv_heads: int, head_dim: int) -> Callable[..., Tensor]:
    """Transformer Engine's attention over all ranks and zigzag shards, by the kernels that it prefers."""
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(heads, head_dim, num_gqa_groups=kv_heads, qkv_format="bshd", attn_mask_type="causal")
    ranks = list(range(dist.get_world_size()))
    module.set_context_parallel_group(dist.group.WORLD, ranks, torch.cuda.Stream(), communication)
    return lambda q, k, v: module(q[None], k[None], v[None]).view(q.shape)


def by_transformer_engine(communication: str, parts: list[Tensor], upstream: Tensor) -> Parts:
    (_, heads, head_dim), (_, kv_heads, _) = parts[0].shape, parts[1].shape
    return gradients(transformer_engine(communication, heads, kv_heads, head_dim), parts, upstream)


def peers() -> dict[str, Run]:
    """Return those that are installed."""
    found: dict[str, Run] = {"torch": by_torch}
    if importlib.util.find_spec("transformer_engine"):
        os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
        # Before torch has loaded its cuDNN, beside which another that a system has cannot be loaded.
        with contextlib.suppress(ImportError, OSError):  # which its first call says
            importlib.import_module("transformer_engine.pytorch")
        for communication in ("p2p", "a2a", "all_gather"):
            name = f"Transformer Engine, {communication}"
            found[name] = functools.partial(by_transformer_engine, communication)
    return found


def refusal(call: Callable[[], Parts]) -> str:
    """Why a call raises, the same on every rank: the first rank's reason that has one; "" where it runs."""
    reason = ""
    try:
        call()
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    if dist.get_backend() == "fake":
        return reason
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process as one of `world` ranks of which the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        transformer_engine.cache_clear()  # its modules keep the group
        dist.destroy_process_group()


def measure(whole: list[Tensor], rounds: int) -> tuple[dict[str, Timing], dict[str, float]]:
    """Times, and the largest errors, of every attention on this rank's part of q, k, v and the output's gradient."""
    group = dist.group.WORLD if dist.is_initialized() else None
    alone_here = group is not None and dist.get_backend() == "fake"
    tokens = len(whole[0])
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)

    def shards(layout: str) -> tuple[list[Tensor], Tensor]:
        *inputs, upstream = (split_sequence(x, group, layout=layout).contiguous() for x in whole)
        return [x.requires_grad_() for x in inputs], upstream

    def one_device() -> Parts:
        return gradients(lambda q, k, v: packed_attention(q, k, v, bounds, tokens), *undivided)

    undivided = [x.clone().requires_grad_() for x in whole[:3]], whole[3]
    divided = {layout: shards(layout) for layout in ("contiguous", "zigzag")}
    ulysses = functools.partial(ulysses_attention, cu_seqlens=bounds, max_seqlen=tokens, group=group)
    ring = functools.partial(ring_attention, cu_seqlens=bounds, max_seqlen=tokens, group=group)
    variants: dict[str, tuple[str, Run]] = {
        "Ulysses": ("contiguous", functools.partial(gradients, ulysses)),
        "ring": ("zigzag", functools.partial(gradients, ring)),
    }
    for name, run in peers().items() if CUDA and group is not None else ():
        reason = refusal(functools.partial(run, *divided["zigzag"]))
        if not reason:
            variants[name] = ("zigzag", run)
        elif dist.get_rank() == 0:
            print(f"{name} is left out: {reason}", file=sys.stderr)

    truth = one_device()
    calls: dict[str, Callable[[], Parts]] = {ONE_DEVICE: one_device}
    errors = {ONE_DEVICE: 0.0}
    for name, (layout, run) in variants.items():
        calls[name] = functools.partial(run, *divided[layout])
        expected = [split_sequence(x, group, layout=layout) for x in truth]
        differences = [(a.float() - b.float()).abs().max() for a, b in zip(calls[name](), expected, strict=True)]
        worst = torch.stack(differences).max()
        if group is not None:
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        errors[name] = float("nan") if alone_here else float(worst)
    return side_by_side(calls, rounds=rounds), errors


def measure_alone(whole: list[Tensor], world: int, rounds: int) -> tuple[dict[str, Timing], dict[str, float]]:
    """`measure` on each of `world` ranks by itself: the times of each attention's slowest rank."""
    slowest: dict[str, Timing] = {}
    for rank in range(world):
        with as_rank(rank, world):
            timings, errors = measure(whole, rounds)
        for name, timing in timings.items():
            slowest[name] = max(timing, slowest.get(name, timing), key=lambda one: one.median)
    return slowest, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--alone", type=int, metavar="CP", help="the work of each of so many ranks, on this device")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rank, world = join_ranks()
    if options.alone and world > 1:
        parser.error("--alone is for one process: start it without torchrun")
    measured = ceilings()
    world = options.alone or world
    tokens, heads, kv_heads, head_dim = (64 * world, 8, 4, 16) if options.tiny else (options.tokens, 32, 8, 128)
    torch.manual_seed(0)
    whole = [
        torch.randn(tokens, count, head_dim, dtype=torch.bfloat16, device=DEVICE)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    if options.alone:
        timings, errors = measure_alone(whole, world, options.rounds)
    else:
        timings, errors = measure(whole, options.rounds)
    flops = 3.5 * 2 * heads * head_dim * tokens**2
    rows: list[list[object]] = []
    for name, timing in timings.items():
        devices = 1 if name == ONE_DEVICE else world
        share = timings[ONE_DEVICE].median / devices / timing.median
        rows.append([name, devices, timing.median, flops / devices / timing.median * 1e-9, share, errors[name]])
    if rank == 0:
        print(machine(), measured, "each rank's own work alone" if options.alone else "")
        print(table(["attention", "cp", "fwd+bwd ms", "TFLOP/s per GPU", "of the ideal", "largest error"], rows))
        write_json(
            options.json,
            ceilings=measured,
            cp=world,
            alone=bool(options.alone),
            tokens=tokens,
            timings=list(timings.values()),
            errors=errors,
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
