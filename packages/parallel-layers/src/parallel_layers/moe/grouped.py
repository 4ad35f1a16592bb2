"""Grouped GEMMs: each run of rows times the weight of its own expert.

Shape suffixes: M rows in order of expert, K input and N output features, e experts of this rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.autocast import as_operand


def grouped_linear(x_MK: Tensor, weight_eNK: Tensor, counts_e: Tensor) -> Tensor:
    """Multiply each run of rows by the transposed weight of its expert: `[M, K]`, `[e, N, K]` -> `[M, N]`.

    Rows are ordered by expert, and `counts_e` has the rows of each. The result is in x's dtype, or under torch.autocast
    in its dtype. The weight gradient of an expert without rows is zero. bf16 on CUDA is one kernel without host
    synchronisation; otherwise a loop over the experts copies the counts to the host.
    """
    x_MK, weight_eNK = as_operand(x_MK), as_operand(weight_eNK)
    whole_vectors = x_MK.shape[1] % 8 == 0 and weight_eNK.shape[1] % 8 == 0  # the kernel reads 16 bytes at a time
    if x_MK.is_cuda and x_MK.dtype == torch.bfloat16 and whole_vectors and len(x_MK):
        return F.grouped_mm(x_MK, weight_eNK.transpose(1, 2), offs=counts_e.cumsum(0, dtype=torch.int32))
    return _loop(x_MK, weight_eNK, counts_e)


def grouped_bias(bias_eN: Tensor, counts_e: Tensor, weights_M: Tensor) -> Tensor:
    """Return each row's weight times the bias of its expert: `[M, N]` in the bias's dtype.

    This is a GEMM with an `[M, e]` matrix, so gradients are summed in fp32 and in a fixed order. The backward of a
    gather would use atomics in the bias's dtype.
    """
    row, ends = torch.arange(len(weights_M), device=weights_M.device)[:, None], counts_e.cumsum(0)
    own = (row >= ends - counts_e) & (row < ends)
    return (own * weights_M[:, None]).to(bias_eN.dtype) @ bias_eN


# An operator, because torch.compile cannot trace a loop with data-dependent bounds.
@torch.library.custom_op("parallel_layers::grouped_linear", mutates_args=())
def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for rows, out, one in zip(*_runs(counts, x, y), weight, strict=True):
        torch.mm(rows, one.T, out=out)
    return y


@_loop.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("parallel_layers::grouped_linear_backward", mutates_args=())
def _loop_backward(d_y: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx = dy W and dW = dyᵀ x, computed expert by expert."""
    d_x, d_weight = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
    for d_rows, rows, out, one, d_one in zip(*_runs(counts, d_y, x, d_x), weight, d_weight, strict=True):
        torch.mm(d_rows, one, out=out)
        torch.mm(d_rows.T, rows, out=d_one)
    return d_x, d_weight


@_loop_backward.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _runs(counts: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split each tensor's rows into the experts' runs."""
    sizes = counts.tolist()
    return [x.split(sizes) for x in tensors]


def _backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_loop_backward(d_y, *ctx.saved_tensors), None


_loop.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
