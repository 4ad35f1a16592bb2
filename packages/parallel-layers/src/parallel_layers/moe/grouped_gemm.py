"""`grouped_gemm`: the experts' GEMMs by quack on Hopper GPUs, forward, dx and dW.

Shape suffixes: as in `experts`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parallel_layers.autocast import without_autocast
from parallel_layers.kernels.quack import Tile, has_quack, is_hopper, multiply
from parallel_layers.kernels.runtime import cdiv

WIDE = Tile(128, 256)
NARROW = Tile(128, 192, by_turns=True)
BY_EXPERT = Tile(128, 192, by_turns=True, cluster=(2, 1), dynamic=True)


def is_faster(weight_eNK: Tensor) -> bool:
    """Return whether `grouped_gemm` with this weight runs here, and faster than `torch.nn.functional.grouped_mm`.

    The rule reads sizes of the weight alone: one kernel computes any number of rows, and so do old and new log-probs.
    `benchmarks/moe.py` on one H200: the layer of Qwen3-30B-A3B takes 6.6 ms instead of 7.3, with skewed routing 6.8
    instead of 7.8.
    Matrices beyond 2^25 elements (Mixtral 8x7B) reach 92 % of a dense GEMM's rate with `grouped_mm`.
    """
    outputs, inputs = weight_eNK.shape[1:]
    right_size = min(outputs, inputs) >= 512 and outputs * inputs <= 2**25 and outputs % 8 == inputs % 8 == 0
    return right_size and weight_eNK.dtype == torch.bfloat16 and is_hopper(weight_eNK.device) and has_quack()


def grouped_gemm(x_MK: Tensor, weight_eNK: Tensor, counts_e: Tensor) -> Tensor:
    """Return `experts.grouped_linear` of bf16 operands with at least one row, without host synchronisation.

    Results have the same bits in every call, and a row's bits do not depend on the other rows. The first call in a
    process compiles kernels, for some seconds each.
    """
    bounds = F.pad(counts_e.cumsum(0, dtype=torch.int32), (1, 0))
    out: Tensor = _GroupedGemm.apply(x_MK, weight_eNK, bounds)
    return out


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, bounds)
        return _by_rows(x, weight, bounds)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, bounds = ctx.saved_tensors
        dx = _by_rows(dy, weight.transpose(1, 2), bounds) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        by_input = not weight.is_contiguous()  # stored as [e, K, N]
        dw = _by_experts(x, dy, bounds) if by_input else _by_experts(dy, x, bounds)
        return dx, dw.transpose(1, 2) if by_input else dw, None


# Operators, because torch.compile cannot trace quack.
@torch.library.custom_op("parallel_layers::grouped_gemm", mutates_args=())
def _by_rows(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """Multiply each run of rows by the transposed weight of its expert: `[M, K]`, `[e, N, K]` -> `[M, N]`."""
    columns = weight.shape[1]
    y = x.new_empty(x.shape[0], columns)
    multiply(x.contiguous(), weight, y, WIDE if columns % NARROW.columns else NARROW, rows=bounds)
    return y


@_by_rows.register_fake
def _(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("parallel_layers::grouped_gemm_dw", mutates_args=())
def _by_experts(a: Tensor, b: Tensor, bounds: Tensor) -> Tensor:
    """Return `a^T b` of each expert's rows, `[M, A]`, `[M, B]` -> `[e, A, B]`; zeros for an expert without rows."""
    out = _empty_experts(a, b, bounds)
    a, b = a.contiguous().t(), b.contiguous().t()
    if _area(b, a) < _area(a, b):
        multiply(b, a, out.transpose(1, 2), BY_EXPERT, inner=bounds)
    else:
        multiply(a, b, out, BY_EXPERT, inner=bounds)
    return out


@_by_experts.register_fake
def _empty_experts(a: Tensor, b: Tensor, bounds: Tensor) -> Tensor:
    return a.new_empty(bounds.shape[0] - 1, a.shape[1], b.shape[1])


def _area(a: Tensor, b: Tensor) -> int:
    """Return the elements of the tiles that an output of a's rows and b's rows takes."""
    return cdiv(len(a), BY_EXPERT.rows) * BY_EXPERT.rows * cdiv(len(b), BY_EXPERT.columns) * BY_EXPERT.columns
