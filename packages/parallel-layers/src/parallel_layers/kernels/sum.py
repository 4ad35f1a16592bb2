"""Sum of a few consecutive tensors in at least fp32, in one pass over memory."""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, on_its_device, tl, triton, use_triton
from parallel_layers.module.autocast import wide

_BLOCK = 4096


@triton.jit
def _sum_kernel(parts_ptr, y_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(parts_ptr + at, mask=mask, other=0.0).to(tl.float32)
        parts_ptr += count
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


@on_its_device
def sum_parts(parts: Tensor) -> Tensor:
    """Sum over dim 0 in at least fp32 and round once: `[n, ...]` -> `[...]`. A GPU adds in order. No gradient."""
    if not use_triton(parts) or not parts.is_contiguous():
        return parts.sum(0, dtype=wide(parts.dtype)).to(parts.dtype)
    y = torch.empty_like(parts[0])
    if y.numel():
        _sum_kernel[(cdiv(y.numel(), _BLOCK),)](parts, y, y.numel(), PARTS=len(parts), BLOCK=_BLOCK, num_warps=8)
    return y
