"""Quantize weights to FP8 by blocks of 128 x 128, as engines load them (`quant_method="fp8"`).

The recipe is DeepSeek-V3's (arXiv:2412.19437, section 3.3): the scale of a block is its largest magnitude over
448, in fp32 and named `X.weight_scale_inv`; the numbers are the weights over the scale, in float8_e4m3fn. The last
block of a dimension may be smaller. Projections of the decoder's layers are quantized; embedding, head, norms, biases,
routers, a vision tower and the input projection of a multi-token-prediction layer stay as they are. So do experts that
files stack in one tensor (gpt-oss, GraniteMoE, Qwen3-VL-MoE): vLLM reads no block scales for such a stack.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ckpt.layout.pieces import Box, Shape

BLOCK = 128
SCALE = "_scale_inv"
_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_NEVER = r"vis|\.eh_proj\."
_PROJECTION = re.compile(rf"^(?!.*({_NEVER})).*\blayers\.\d+\..*(_proj|_proj_with_mqa|experts\.\d+\.w[123])\.weight$")


def is_quantized(name: str, shape: Shape) -> bool:
    """Return whether a canonical tensor is a projection, which is quantized."""
    return len(shape) == 2 and _PROJECTION.search(name) is not None


def stacked_experts(shapes: Mapping[str, Shape]) -> list[str]:
    """Return the names of stacked experts, which stay as they are; `*` stands for the numbers of the layers."""
    return sorted({re.sub(r"\.\d+\.", ".*.", n) for n, s in shapes.items() if len(s) == 3 and ".layers." in n})


def scales_shape(shape: Shape) -> Shape:
    """Return the shape of a weight's scales, one for each block."""
    return tuple(-(-size // BLOCK) for size in shape)


def block_rows(shape: Shape, limit: int) -> Iterator[tuple[Box, Box]]:
    """Yield boxes of whole rows of blocks that together are a weight, with the boxes of their scales.

    A box has at most `limit` elements, and at least one row of blocks.
    """
    rows, columns = shape
    step = max(1, limit // (BLOCK * columns)) * BLOCK
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield ((start, stop), (0, columns)), ((start // BLOCK, -(-stop // BLOCK)), (0, -(-columns // BLOCK)))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight `[N, K]` in FP8, and the scales of its blocks `[ceil(N / 128), ceil(K / 128)]` in fp32."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax(dim=(1, 3))
    # Blocks of zeros, and blocks whose scale would vanish in fp32, get a scale other than 0, for the division.
    scales = torch.where(largest > 0, (largest / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    numbers = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(_E4M3)
    return numbers.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales


def in_fp8(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, each projection in FP8 and followed by its scales."""
    for name, tensor in tensors:
        if is_quantized(name, tuple(tensor.shape)):
            numbers, scales = quantize(tensor)
            yield name, numbers
            yield name + SCALE, scales
        else:
            yield name, tensor


def quantization_config(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the `quantization_config` of a model with these canonical tensors.

    `modules_to_not_convert` lists every other module with a matrix: transformers and vLLM would look for its scales.
    """
    kept = [name for name, shape in shapes.items() if len(shape) > 1 and not is_quantized(name, shape)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name.removesuffix(".weight") for name in kept],
    }
