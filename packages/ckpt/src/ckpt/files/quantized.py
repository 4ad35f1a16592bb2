"""Tensors that files hold in few bits, with a scale for each block of elements: which they are, and their values.

By the `quant_method` of config.json:

- "fp8" (DeepSeek-V3, arXiv:2412.19437, section 3.3): `X.weight` in float8_e4m3fn, `X.weight_scale_inv` for each block
  of `weight_block_size`, or one for the tensor. A value is the product in fp32.
- "compressed-tensors": `X.weight` in float8_e4m3fn, and `X.weight_scale` for the tensor, each row, group or block. A
  value is the product in the scale's dtype.
- "mxfp4" (OCP Microscaling Formats 1.0, as in gpt-oss): `X_blocks` `[E, N, K/32, 16]` with two E2M1 numbers a byte, the
  low half first, and `X_scales` `[E, N, K/32]` with exponents plus 127. They store `X` `[E, K, N]`.

Readers see the values alone, under the plain name and of the config's dtype: `ckpt.files.boxio.read_box` reads a box of
stored elements with the scales that cover the box.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.files.dtypes import config_dtype
from ckpt.files.header import TensorInfo
from ckpt.layout.config import quantization_of, text_config
from ckpt.layout.pieces import Box, Shape, exchanged, split_box

Tensors = dict[str, tuple[Path, TensorInfo]]
# The ends of the names of scales, and of the scales of activations, which weights do not need.
_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = re.compile(r"\.(activation_scale|input_scale|output_scale|[kqv]_scale)$")
# An E2M1 number: a sign, two bits of exponent and one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MX_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Quantized(TensorInfo):
    """A tensor of FP8 numbers with scales; `dtype` and `shape` describe its values.

    Attributes:
        method: The `quant_method`.
        stored: The stored numbers.
        scale_file: The file of the scales.
        scale: The scales, one for each block.
        block: The sides of a block.
        product: The dtype to which a product is rounded first.
    """

    method: str
    stored: TensorInfo
    scale_file: Path
    scale: TensorInfo
    block: Shape
    product: torch.dtype = torch.float32

    def stored_boxes(self, box: Box) -> tuple[Box, Box]:
        """Return the box of the stored numbers that holds a box of values, and the box of the scales that cover it."""
        return box, self._scales_of(box)

    def _scales_of(self, box: Box) -> Box:
        return tuple((start // side, -(-stop // side)) for (start, stop), side in zip(box, self.block, strict=True))

    def values(self, stored: Tensor, scale: Tensor, box: Box) -> Tensor:
        """Return the values of a box from its stored numbers and its scales (the boxes of `stored_boxes`)."""
        wide = stored.to(torch.float32)
        return wide.mul_(self._expanded(scale.to(torch.float32), box)).to(self.product)

    def _expanded(self, scale: Tensor, box: Box) -> Tensor:
        """Return the scale of each element of a box; a dimension with one scale for all elements keeps length 1."""
        for dim, ((start, stop), side) in enumerate(zip(box, self.block, strict=True)):
            if scale.shape[dim] > 1:
                index = torch.arange(start, stop, device=scale.device) // side - start // side
                scale = scale.index_select(dim, index)
        return scale


@dataclass(frozen=True, slots=True)
class Microscaled(Quantized):
    """A stack of MXFP4 matrices, stored transposed; `block` follows the stored order."""

    def parts(self, box: Box, limit: int) -> Iterator[Box]:
        """Cut a box along the stored order into boxes of at most `limit` elements."""
        return map(exchanged, split_box(exchanged(box), limit))

    def stored_boxes(self, box: Box) -> tuple[Box, Box]:
        """See `Quantized`."""
        expert, rows, (start, stop) = stored = exchanged(box)
        return (expert, rows, (start // 2, -(-stop // 2))), self._scales_of(stored)

    def values(self, stored: Tensor, scale: Tensor, box: Box) -> Tensor:
        """See `Quantized`."""
        codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)
        _, _, (start, stop) = order = exchanged(box)
        numbers = torch.tensor(_E2M1, device=stored.device)[codes.narrow(-1, start % 2, stop - start).int()]
        exponent = self._expanded(scale.to(torch.int32) - 127, order)
        return torch.ldexp(numbers, exponent).transpose(1, 2)


def dequantized(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Replace stored numbers and scales, in a checkpoint's tensors, by the tensors whose values they are.

    Raises:
        ValueError: The method is not read, or a tensor lacks its scales or has scales of a shape that do not cover the
            tensor; names the tensor.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return tensors
    text = text_config(dict(config))
    dtype = config_dtype({"dtype": text.get("dtype") or text.get("torch_dtype") or "bfloat16"})
    method = str(quantization["quant_method"])
    build = _microscaled if method == "mxfp4" else _scaled
    plain = {**tensors}
    ends: tuple[str, ...]
    for name, (file, stored) in tensors.items():
        if build is _microscaled and name.endswith("_blocks"):
            base, ends = name.removesuffix("_blocks"), ("_scales",)
        elif build is _scaled and stored.dtype == torch.float8_e4m3fn:
            base, ends = name, _SCALES
        else:
            if _OF_ACTIVATIONS.search(name):
                del plain[name]
            continue
        scale_name = next((base + end for end in ends if base + end in tensors), None)
        if scale_name is None:
            raise ValueError(f"{name} in {file} has no {base + ends[0]}, its scales; download all files again")
        scale_file, scale = tensors[scale_name]
        try:
            plain[base] = file, build(dtype, method, stored, scale_file, scale, quantization)
        except ValueError as error:
            raise ValueError(f"{file}: {name} and {scale_name}: {error}") from None
        for used in {name, scale_name} - {base}:
            plain.pop(used, None)
    return plain


def _scaled(
    dtype: torch.dtype, method: str, stored: TensorInfo, scale_file: Path, scale: TensorInfo, scheme: Mapping[str, Any]
) -> Quantized:
    """Return FP8 numbers with a scale for the tensor, or for each row, group or block."""
    if not scale.dtype.is_floating_point or scale.dtype.itemsize < 2:
        raise ValueError(f"the scales are of type {scale.dtype}, and must be floating-point numbers of 16 bits or more")
    shape, dims = stored.shape, len(stored.shape)
    grid = scale.shape + (1,) * (dims - len(scale.shape))
    if scale.nbytes == scale.dtype.itemsize:
        grid = (1,) * dims
    for block in (shape, *_blocks(scheme, dims)):
        # A dimension of one scale, or of a scale for each element, needs no side from the config.
        sides = tuple(
            size if count == 1 else 1 if count == size else side
            for size, count, side in zip(shape, grid, block, strict=False)
        )
        if len(grid) == dims and tuple(-(-size // side) for size, side in zip(shape, sides, strict=True)) == grid:
            product = scale.dtype if method == "compressed-tensors" else torch.float32
            whole = replace(scale, shape=grid)
            return Quantized(dtype, shape, stored.offset, method, stored, scale_file, whole, sides, product)
    raise ValueError(
        f"scales of shape {scale.shape} do not cover {shape}, with blocks of {_blocks(scheme, dims) or 'no given size'}"
    )


def _blocks(scheme: Mapping[str, Any], dims: int) -> list[Shape]:
    """Return the sides of blocks that a quantization_config names, for a tensor of `dims` dimensions."""
    groups = scheme.get("config_groups")
    of_groups = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    named = [scheme.get("weight_block_size"), *(group_weights.get("block_structure") for group_weights in of_groups)]
    named += [[1, group_weights["group_size"]] for group_weights in of_groups if group_weights.get("group_size")]
    return [
        (1,) * (dims - 2) + tuple(block)
        for block in named
        if isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(side, int) and side > 0 for side in block)
    ]


def _microscaled(
    dtype: torch.dtype, method: str, stored: TensorInfo, scale_file: Path, scale: TensorInfo, scheme: Mapping[str, Any]
) -> Microscaled:
    """Return a stack of MXFP4 matrices."""
    if len(stored.shape) != 4 or stored.shape[3] * 2 != _MX_BLOCK or stored.shape[:3] != scale.shape:
        raise ValueError(f"shapes {stored.shape} and {scale.shape} must be [E, N, K/32, 16] and [E, N, K/32]")
    if {stored.dtype, scale.dtype} != {torch.uint8}:
        raise ValueError(f"types {stored.dtype} and {scale.dtype} must be torch.uint8")
    experts, rows, blocks, half = stored.shape
    packed = replace(stored, shape=(experts, rows, blocks * half))
    shape = (experts, blocks * _MX_BLOCK, rows)
    return Microscaled(dtype, shape, stored.offset, method, packed, scale_file, scale, (1, 1, _MX_BLOCK))
