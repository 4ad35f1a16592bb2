"""`grouped_gemm`: the experts' GEMMs by quack on Hopper GPUs, forward, dx and dW.

Shape suffixes: as in `experts`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parallel_layers.kernels.quack import Tile, has_quack, is_hopper, multiply
from parallel_layers.kernels.runtime import cdiv
from parallel_layers.module.autocast import without_autocast
from parallel_layers.training.weight_gradients import Destination

WIDE = Tile(128, 256)
NARROW = Tile(128, 192, by_turns=True)
BY_EXPERT = Tile(128, 192, by_turns=True, cluster=(2, 1), dynamic=True)
LARGE = Tile(128, 256, cluster=(2, 1), dynamic=True)
"""The tile of all GEMMs with large weights, which bring the GPU to its power limit."""

LARGE_SIZE = 1 << 23
"""The elements from which an expert's weight is large."""


def is_faster(weight_eNK: Tensor) -> bool:
    """Return whether `grouped_gemm` with this weight runs here, and faster than `torch.nn.functional.grouped_mm`.

    The rule reads sizes of the weight alone: one kernel computes any number of rows, and so do old and new log-probs.
    On one H200 the layer of Qwen3-30B-A3B takes 6.7 ms instead of 7.5, the layer of Mixtral 8x7B 53.6 instead of 56.1
    (`benchmarks/RESULTS.md`).
    """
    outputs, inputs = weight_eNK.shape[1:]
    right_size = min(outputs, inputs) >= 512 and outputs % 8 == inputs % 8 == 0
    return (
        right_size
        and weight_eNK.dtype == torch.bfloat16
        and is_hopper(weight_eNK.device)
        and (weight_eNK.is_meta or has_quack())
    )


def grouped_gemm(x_MK: Tensor, weight: Tensor, counts_e: Tensor, *, input_major: bool = False) -> Tensor:
    """Return `experts.grouped_linear` of bf16 operands with at least one row, without host synchronisation.

    Results have the same bits in every call, and a row's bits do not depend on the other rows. The first call in a
    process compiles kernels, for some seconds each.
    """
    bounds = F.pad(counts_e.cumsum(0, dtype=torch.int32), (1, 0))
    out: Tensor = _GroupedGemm.apply(x_MK, weight, bounds, input_major)
    return out


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor, input_major: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, bounds)
        ctx.input_major, ctx.destination = input_major, Destination.of(weight)
        return _by_rows(x, weight.transpose(1, 2) if input_major else weight, bounds)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bounds = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _by_rows(dy, weight if ctx.input_major else weight.transpose(1, 2), bounds)
        if ctx.needs_input_grad[1]:
            a, b = (x, dy) if ctx.input_major else (dy, x)
            if (total := ctx.destination.sum) is None:
                dw = _by_experts(a, b, bounds, ctx.destination.dtype)
            else:
                _multiply_by_experts(a, b, bounds, total, add=True)
        return dx, dw, None, None


# Operators, because torch.compile cannot trace quack.
@torch.library.custom_op("parallel_layers::grouped_gemm", mutates_args=())
def _by_rows(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """Multiply each run of rows by the transposed weight of its expert: `[M, K]`, `[e, N, K]` -> `[M, N]`."""
    columns = weight.shape[1]
    y = x.new_empty(x.shape[0], columns)
    small = WIDE if columns % NARROW.columns else NARROW
    multiply(x.contiguous(), weight, y, LARGE if _is_large(*weight.shape[1:]) else small, rows=bounds)
    return y


@_by_rows.register_fake
def _(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("parallel_layers::grouped_gemm_dw", mutates_args=())
def _by_experts(a: Tensor, b: Tensor, bounds: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `a^T b` of each expert's rows, `[M, A]`, `[M, B]` -> `[e, A, B]`; zeros for an expert without rows."""
    out = _empty_experts(a, b, bounds, dtype)
    _multiply_by_experts(a, b, bounds, out)
    return out


@_by_experts.register_fake
def _empty_experts(a: Tensor, b: Tensor, bounds: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(bounds.shape[0] - 1, a.shape[1], b.shape[1], dtype=dtype)


def _multiply_by_experts(a: Tensor, b: Tensor, bounds: Tensor, out: Tensor, *, add: bool = False) -> None:
    a, b = a.contiguous().t(), b.contiguous().t()
    tile = LARGE if _is_large(len(a), len(b)) else BY_EXPERT
    if _area(b, a, tile) < _area(a, b, tile):
        multiply(b, a, out.transpose(1, 2), tile, inner=bounds, add=add)
    else:
        multiply(a, b, out, tile, inner=bounds, add=add)


def _area(a: Tensor, b: Tensor, tile: Tile) -> int:
    """Return the elements of the tiles that an output of a's rows and b's rows takes."""
    return cdiv(len(a), tile.rows) * tile.rows * cdiv(len(b), tile.columns) * tile.columns


def _is_large(outputs: int, inputs: int) -> bool:
    """Return whether an expert's weight is large and does not fill tiles of 192."""
    return outputs * inputs >= LARGE_SIZE and outputs % NARROW.columns != 0 and inputs % NARROW.columns != 0
