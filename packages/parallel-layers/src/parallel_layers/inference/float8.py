"""`float8_attributes`: projections and experts of a decoding view in FP8, which halves the bytes that a step reads.

Every row of a weight, one output, has a scale of its own (`kernels.float8`): rounding changes a weight by at most 1/16
of its value, where it is not far below the largest of its row. Tokens of a linear layer are rounded in the same way
before its GEMM, on a GPU those of experts, too. Sums are in fp32.

Shape suffixes: T tokens, I input features, O output features.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers.device.gpus import on_gpu
from parallel_layers.distributed import async_collectives
from parallel_layers.kernels.float8 import quantize_rows, scale_, suits_gemm
from parallel_layers.linear.layers import ColumnLinear, RowParallelLinear
from parallel_layers.linear.products import Product
from parallel_layers.moe.decoding import RoundedExperts, can_round
from parallel_layers.moe.experts import GroupedExperts

# From this number of outputs on torch's GEMM with scales of rows takes less time than one without and `scale_`: on an
# H200, 128 tokens, [4096, 14336] takes 38 us with scales of rows, 22 without and 2 for `scale_`; [28672, 4096] 36 both.
_WIDE = 8192


class RowScaled(Product):
    """Multiply by a copy of a weight whose rows are in FP8; a CPU multiplies the same values. No gradient."""

    serial: ClassVar[bool] = True
    frozen: ClassVar[bool] = True

    def __init__(self, weight_OI: Tensor) -> None:
        self.weight, self.scales = quantize_rows(weight_OI)
        self._one = self.scales.new_ones(1)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x W^T + b` with the copy; `Product.__call__` has the arguments."""
        rows, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
        if on_gpu(x):
            y = self._multiply(rows, scales)
        else:
            y = F.linear(
                rows.to(x.dtype) * scales[:, None].to(x.dtype), dequantize_rows(self.weight, self.scales, x.dtype)
            )
        y = async_collectives.cast(y.view(*x.shape[:-1], len(self.weight)), dtype or x.dtype)
        return y if bias is None else y + bias

    def _multiply(self, x: Tensor, scales: Tensor) -> Tensor:
        """Return the product with rows in FP8 `[T, I]` with scales `[T]`: `[T, O]` bf16."""
        if len(self.weight) >= _WIDE:
            return _product(x, self.weight, scales[:, None], self.scales[None], F.ScalingType.RowWise)
        y = _product(x, self.weight, self._one, self._one, F.ScalingType.TensorWise)
        return scale_(y, scales, self.scales)  # by powers of two, so that nothing is rounded again


def _product(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, kind: Any) -> Tensor:
    return F.scaled_mm(x, weight.t(), x_scales, kind, scales, kind, output_dtype=torch.bfloat16, use_fast_accum=True)


def dequantize_rows(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `[..., K]` from numbers in FP8 and scales `[...]`, powers of two: exact in bf16 and fp32."""
    return weight.to(dtype) * scales[..., None].to(dtype)


def float8_attributes(view: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module of a decoding view has in FP8; none for what stays in its dtype.

    Heads, embeddings, routers and layers without tensor parallelism (`ReplicatedLinear`) stay, and so do weights whose
    sizes are no multiples of 16, or that are frozen in FP8 already. On a GPU weights in fp32 and fp16 stay, and experts
    that `moe.decoding` does not compute by its kernels, such as experts with adapters.
    """
    if isinstance(view, ColumnLinear | RowParallelLinear):
        able = suits_gemm(view.weight) and view.weight_scale_inv is None and not view.keeps_dtype
        return {"execution": replace(view.execution, product=RowScaled(view.weight))} if able else {}
    if isinstance(view, GroupedExperts):
        return _of_experts(view)
    return {}


def _of_experts(view: GroupedExperts) -> dict[str, Any]:
    if not can_round(view):  # also where experts are gathered in FP8
        return {}
    if on_gpu((rounded := RoundedExperts.of_layer(view)).down):
        return {"rounded": rounded}
    return {
        name: dense.transpose(1, 2) if view.input_major else dense
        for name, (rows, scales) in zip(view.projections, rounded.pairs(), strict=True)
        for dense in [dequantize_rows(rows, scales, view.down_proj.dtype)]
    }
