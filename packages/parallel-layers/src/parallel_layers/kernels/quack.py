"""GEMMs of quack on Hopper GPUs (the package quack-kernels, which the extra `flash-attn-4` brings).

quack's own functions keep a plan of the launch for every shape that they see, without end. A plan does not depend on
sizes: its kernel takes any size. So this module keeps the plans itself, one for each layout, dtype and tile. Nothing is
compiled for a new number of tokens. A kernel takes seconds to compile; quack keeps it on disk for later processes.

Each element of a result is summed in one order over the contraction, at every number of rows. In all comparisons
large GEMMs had the same bits as cuBLAS's. Under a step's load, at the GPU's power limit, quack takes less time.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel_layers.kernels.runtime import capability, on_its_device


class Tile(NamedTuple):
    """The part of an output that one multiprocessor computes at a time.

    Attributes:
        rows, columns: Size of the tile.
        by_turns: Two groups of warps have a tile each and take turns at multiplying and at writing ("ping-pong");
            otherwise they share one tile.
        cluster: Neighbouring tiles, down and across, that load shared operands once.
        dynamic: Multiprocessors fetch the next tile when they are done with one, for tiles of unequal work.
    """

    rows: int
    columns: int
    by_turns: bool = False
    cluster: tuple[int, int] = (1, 1)
    dynamic: bool = False


LARGE = Tile(256, 192, cluster=(1, 2), dynamic=True)
"""The tile of dense GEMMs. Smaller tiles read shared memory more often, which takes power."""

MIN_SIZE, MIN_WORK = 1024, 1 << 38
"""A dense GEMM is large if M, N and K reach the first number, and M * N * K the second."""


@functools.cache
def has_quack() -> bool:
    """Return whether quack loads, in a version whose plans are known here."""
    try:
        if not version("quack-kernels").startswith("0.6."):
            return False
        from quack import gemm  # noqa: F401  # an optional extra
    except (PackageNotFoundError, ImportError, OSError):  # not installed, or libraries of versions that do not match
        return False
    return True


def is_hopper(device: torch.device) -> bool:
    """Return whether quack's kernels for Hopper run on `device`."""
    return capability(device)[0] == 9


def takes(a: Tensor, b: Tensor) -> bool:
    """Return whether quack multiplies `a [M, K]` by `b [N, K]`: large bf16 matrices on Hopper, where it is installed.

    Each matrix is contiguous along its rows or its columns. These, and the output's rows, start at multiples of 16
    bytes. Under torch.compile the GEMMs are torch's.
    """
    return (
        not torch.compiler.is_compiling()
        and _is_readable(a)
        and _is_readable(b)
        and len(b) % 8 == 0
        and min(*a.shape, len(b)) >= MIN_SIZE
        and a.numel() * len(b) >= MIN_WORK
        and (a.is_meta or has_quack())
    )


def _is_readable(x: Tensor) -> bool:
    if type(x) not in (Tensor, nn.Parameter) or x.dtype != torch.bfloat16 or x.dim() != 2 or not is_hopper(x.device):
        return False
    down, across = x.stride()
    return x.data_ptr() % 16 == 0 and ((across == 1 and down % 8 == 0) or (down == 1 and across % 8 == 0))


_plans: dict[tuple[Any, ...], Any] = {}


@on_its_device
def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
    add: bool = False,
) -> None:
    """Write `a b^T` to `out`, in bf16 or fp32, summed in fp32 and rounded once: `[M, K]`, `[N, K]` -> `[M, N]`.

    With `add` the result is added to `out`.

    Bounds of e groups, `[e + 1]` int32 on the device, divide rows or the contraction: each group of `rows` has its own
    b, `[e, N, K]`, and each group of `inner` its own output `[e, M, N]`. Groups may be empty.

    With `rows`, a's and out's rows are contiguous; with `inner`, the columns of a and b, which are transposed views.
    On the meta device nothing happens.
    """
    if a.is_meta:
        return
    from quack import gemm as kernels  # an optional extra

    a, b, out = a.detach(), b.detach(), out.detach()
    counter = torch.zeros(1, dtype=torch.int32, device=a.device) if tile.dynamic else None
    key = a.device, *(x.stride(-1) == 1 for x in (a, b, out)), out.dtype, rows is not None, inner is not None, add, tile
    call = {"tile_count_semaphore": counter, "cu_seqlens_m": rows, "cu_seqlens_k": inner}
    if key in _plans:
        kernels.run_gemm_plan(_plans[key], a, b, out, None, **call)
        return
    _plans[key] = kernels.gemm(
        a, b, out, None, tile_M=tile.rows, tile_N=tile.columns, cluster_M=tile.cluster[0], cluster_N=tile.cluster[1],
        pingpong=tile.by_turns, is_dynamic_persistent=tile.dynamic, add_to_output=add, **call,
    )  # fmt: skip
