"""Frozen weights in FP8 with a scale for each block; every GEMM dequantises them again.

The form is DeepSeek-V3's (https://arxiv.org/abs/2412.19437, section 3.3): numbers in float8_e4m3fn,
and an fp32 scale for each block of 128 x 128; a value is number times scale. A rank's part of a weight may cut blocks,
so here a block has any sides that divide the weight's. With adapters this is the training of QLoRA
(https://arxiv.org/abs/2305.14314), in FP8.

Shape suffixes: N rows and K columns of a weight, n x k blocks, e experts of this rank, M rows at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel_layers.linear.products import PLAIN, Product
from parallel_layers.module.sharding import first_row, is_dtensor

SCALES = "_scale_inv"
"""The end of the name of a weight's scales, as in checkpoints."""


def hold_in_float8_(model: nn.Module, sides: Mapping[str, tuple[int, int]]) -> None:
    """Replace frozen weights of linear layers and experts by FP8 numbers and scales, in place.

    The weight `X` `[..., N, K]` becomes float8_e4m3fn, and its layer gets `X_scale_inv` `[..., n, k]` in fp32. Both are
    frozen, and their values are arbitrary until they are loaded (`ckpt.load_hf` fills them). Each forward
    and each `dx` dequantises the weight again, so no dense copy stays. Call this after `add_lora_`, before
    `fully_shard`.

    Args:
        model: A model of this package's layers.
        sides: The name of each weight, and the rows and columns of its blocks.

    Raises:
        ValueError: A weight is trained, belongs to neither a linear layer nor experts, or blocks do not divide it.
    """
    for path, (rows, columns) in sides.items():
        parent, _, name = path.rpartition(".")
        owner, weight = model.get_submodule(parent), model.get_parameter(path)
        scales = f"{name}{SCALES}"
        if scales not in owner._parameters:
            raise ValueError(f"{path} of {type(owner).__name__} is no weight of a linear or of experts; leave it out")
        if weight.requires_grad:
            raise ValueError(f"{path} is trained, and only frozen weights stay in FP8; call add_lora_ first")
        *stack, N, K = weight.shape
        if N % rows or K % columns:
            raise ValueError(f"blocks of {rows} x {columns} do not divide {path} of {N} x {K}; use divisors of both")
        owner.__dict__["dense_dtype"] = weight.dtype
        of_scales = *stack, N // rows, K // columns
        for key, shape, dtype in ((name, weight.shape, torch.float8_e4m3fn), (scales, of_scales, torch.float32)):
            empty = torch.empty(shape, dtype=dtype, device=weight.device)
            owner.register_parameter(key, nn.Parameter(empty, requires_grad=False))


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[..., N, K]` in `dtype` from FP8 numbers and scales `[..., n, k]`, each value rounded once."""
    *stack, N, K = weight.shape
    n, k = scales.shape[-2:]
    values = weight.to(dtype)
    values.view(*stack, n, N // max(n, 1), k, K // max(k, 1)).mul_(scales[..., :, None, :, None])
    return values


def dense_weight(owner: nn.Module, name: str) -> Tensor:
    """Return a layer's weight in its dense dtype, sharded by FSDP2 as before; a weight that is not in FP8 is unchanged.

    Communication: an all-gather of the scales of a sharded weight.
    """
    weight: Tensor = getattr(owner, name)
    scales, dtype = getattr(owner, f"{name}{SCALES}", None), getattr(owner, "dense_dtype", None)
    if scales is None or dtype is None:
        return weight
    if not is_dtensor(weight):
        return dequantize(weight, scales, dtype)
    from torch.distributed.tensor import DTensor

    local, full, rows = weight.to_local(), scales.full_tensor(), len(weight) // max(len(scales), 1)
    shard = full.repeat_interleave(rows, 0).narrow(0, first_row(weight), len(local)) if len(weight) else full
    dense = dequantize(local, shard, dtype)
    return DTensor.from_local(
        dense, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


class BlockScaled(Product):
    """Multiply by a frozen weight in FP8, dequantised for each call."""

    frozen: ClassVar[bool] = True
    serial: ClassVar[bool] = True

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x W^T + b`; `Product.__call__` has the arguments."""
        return PLAIN(x, dequantize(weight, self.scales, x.dtype), bias, dtype)

    def transposed(self) -> Product:
        """See `Product`."""
        return BlockScaled(self.scales.t())


class GroupedBlockScaled(torch.autograd.Function):
    """`grouped_linear` with frozen stacked weights in FP8 `[e, N, K]`; the backward dequantises them again for dx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, counts: Tensor, multiply: Any) -> Tensor:
        """Return `multiply(x, weight, counts)` with the dense weight."""
        ctx.save_for_backward(weight, scales, counts)
        ctx.multiply = multiply
        return multiply(x, dequantize(weight, scales, x.dtype), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx."""
        weight, scales, counts = ctx.saved_tensors
        dx = ctx.multiply(dy, dequantize(weight, scales, dy.dtype).transpose(1, 2), counts)
        return dx, None, None, None, None
