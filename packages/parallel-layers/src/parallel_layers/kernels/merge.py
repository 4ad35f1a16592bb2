"""Merge the attention over two sets of keys, in one pass over memory.

With output o and log-sum-exp L over one set, and p and M over the other:

    L' = log(e^L + e^M),   o' = e^(L - L') o + e^(M - L') p.

A query without keys in a set has output 0 and log-sum-exp -inf. https://arxiv.org/abs/2205.14135, section 3.1.

Shape legend: T tokens, Q query heads, D head size.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, tl, triton, use_triton

_BLOCK = 4096


@triton.jit
def _merge_kernel(
    out_ptr, part_ptr, lse_ptr, part_lse_ptr, merged_lse_ptr, count, heads, size, lse_stride,
    TOKENS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = token < count
    lse = tl.load(lse_ptr + head * lse_stride + token, mask=in_tokens, other=0.0)
    part_lse = tl.load(part_lse_ptr + head * count + token, mask=in_tokens, other=0.0)
    highest = tl.maximum(lse, part_lse)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight, part_weight = tl.exp(lse - highest), tl.exp(part_lse - highest)
    total = weight + part_weight
    # A separate buffer: several warps load an element of `lse`, and a late warp would load the merged value.
    tl.store(merged_lse_ptr + head * count + token, highest + tl.log(total), mask=in_tokens)
    total = tl.where(total > 0.0, total, 1.0)
    column = tl.arange(0, SIZE)
    address = (token[:, None] * heads + head) * size + column[None, :]
    mask = in_tokens[:, None] & (column[None, :] < size)
    out = tl.load(out_ptr + address, mask=mask, other=0.0) * (weight / total)[:, None]
    out += tl.load(part_ptr + address, mask=mask, other=0.0).to(tl.float32) * (part_weight / total)[:, None]
    tl.store(out_ptr + address, out, mask=mask)


@on_its_device
def launch(out_TQD: Tensor, lse_QT: Tensor, part_TQD: Tensor, part_lse_QT: Tensor) -> None:
    """Launch the kernel; arguments as in `merge_attention`, with `out` and both log-sum-exps in fp32."""
    tokens, heads, size = out_TQD.shape
    part_TQD, part_lse_QT = part_TQD.contiguous(), part_lse_QT.contiguous()
    merged_lse_QT = torch.empty_like(part_lse_QT)
    width = next_power_of_2(size)
    block = max(1, _BLOCK // width)
    if out_TQD.numel():
        _merge_kernel[(cdiv(tokens, block), heads)](
            out_TQD, part_TQD, lse_QT, part_lse_QT, merged_lse_QT, tokens, heads, size, lse_QT.stride(0),
            TOKENS=block, SIZE=width,
        )  # fmt: skip
    lse_QT.copy_(merged_lse_QT)


def merge_attention(out_TQD: Tensor, lse_QT: Tensor, part_TQD: Tensor, part_lse_QT: Tensor) -> None:
    """Merge `part [T, Q, D]` and `part_lse [Q, T]` of further keys into `out` and `lse`, in place. No gradient.

    `out` and both log-sum-exps are fp32 or fp64. `out` is contiguous, `lse` is contiguous along T.
    """
    if use_triton(out_TQD, lse_QT, part_TQD, part_lse_QT):
        launch(out_TQD, lse_QT, part_TQD, part_lse_QT)
        return
    total = torch.logaddexp(lse_QT, part_lse_QT)
    # Queries without keys on both sides give -inf - (-inf) = NaN.
    weight, part_weight = (torch.exp(x - total).nan_to_num_(0.0).T[..., None] for x in (lse_QT, part_lse_QT))
    out_TQD.mul_(weight).add_(part_TQD.to(out_TQD.dtype) * part_weight)
    lse_QT.copy_(total)
