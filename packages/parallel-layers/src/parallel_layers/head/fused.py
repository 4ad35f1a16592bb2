"""The head on CUDA: fused kernels for the logits, plain GEMMs for the gradients of hidden states and weight.

The module has the functions of `chunked`. The forward is one kernel that multiplies and reduces; logits are never
written to memory. The backward walks the vocabulary: one kernel recomputes the logits of a slice and writes their
gradient in bf16, then two GEMMs with fp32 sums compute the gradients. If the forward has kept the exponentials, the
logits' gradient is computed from them without a GEMM, and may overwrite them in one slice.

The kernels that multiply are persistent: one program per multiprocessor walks tiles of the logits, reads both operands
through tensor descriptors (Hopper and newer), and finishes each tile in registers. All arithmetic after the GEMM is
fp32. Exponentials are to base 2, which the hardware computes.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, N tiles of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_layers.head.chunked import LogitTransform, UpstreamGradients
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.kernels.head_groups import GROUP_ENTRIES
from parallel_layers.kernels.head_triton import (
    descriptor,
    kept_gradient_kernel,
    label_logits_kernel,
    merge_kernel,
    product_gradient_kernel,
    product_statistics_kernel,
)
from parallel_layers.kernels.runtime import capability, cdiv, num_multiprocessors, on_its_device, use_triton
from parallel_layers.kernels.sampling_mask import mask_bits_kernel
from parallel_layers.linear.products import add_product_, multiply_into

BLOCK_V = 256
"""Vocabulary entries of a tile."""

# 128 x 256 is the largest accumulator in registers of two warp groups.
_BLOCK_T, _STEP, _KEPT_ROWS = 128, 64, 8
# Prefetched steps of the contraction. A GEMM that also writes its tiles has shared memory for fewer.
_STAGES, _STAGES_OF_WRITERS = 4, 3

_SLICES = 10
_MIN_SLICE, _MAX_ELEMENTS = 2048, 1 << 28
# Bits of a sampling mask that exist at a time, at least; and for each id.
_MASK_BITS, _BITS_OF_ID = 1 << 28, 32
_GRADIENT_TILE = 128 * 256  # of cuBLAS on Hopper


_Numbers = tuple[float, float, float]  # scale, soft-cap, inverse temperature of all tokens
_Rows = tuple[Tensor | None, ...]  # labels, inverse temperatures and upstream gradients, `[T]` each


class SavedTiles(NamedTuple):
    """Tensors that the forward keeps to save a GEMM in the backward."""

    exponentials: Tensor
    """`[T, V]` (V rounded up to 8), rounded to the inputs' dtype."""
    tiles: Tensor
    """`[N, 3, T]` fp32; the first row of each tile holds the maxima that were subtracted before the exponential."""


def supports(hidden_TH: Tensor, weight_VH: Tensor) -> bool:
    """Return whether the kernels take the tensors: non-empty bf16 on Hopper or newer, H a multiple of 8."""
    return (
        use_triton(hidden_TH, weight_VH)
        and hidden_TH.dtype == torch.bfloat16
        and capability(hidden_TH.device) >= (9, 0)
        and hidden_TH.shape[1] % 8 == 0
        and hidden_TH.numel() > 0
        and weight_VH.numel() > 0
    )


def new_kept(hidden_TH: Tensor, num_tokens: int, num_entries: int) -> SavedTiles:
    """Allocate the tensors that the forward keeps."""
    # A tensor descriptor writes rows of whole 16 bytes.
    exponentials = hidden_TH.new_empty(num_tokens, cdiv(num_entries, 8) * 8)
    return SavedTiles(exponentials, hidden_TH.new_empty(cdiv(num_entries, BLOCK_V), 3, num_tokens, dtype=torch.float32))


def slice_entries(num_tokens: int, num_entries: int, hidden_size: int, multiprocessors: int) -> int:
    """Return the vocabulary entries of a slice: whole tiles, about a tenth of the vocabulary.

    Small slices read and write the fp32 gradient of the hidden states more often; large slices take memory. Of the
    sizes near a tenth, the function takes the size whose GEMMs for the weight's gradient need the fewest waves of SMs.
    """
    largest = max(_MAX_ELEMENTS // num_tokens, _MIN_SLICE) // BLOCK_V * BLOCK_V
    share = cdiv(max(num_entries // _SLICES, _MIN_SLICE), BLOCK_V)
    sizes = [n * BLOCK_V for n in range(round(0.9 * share), round(1.05 * share) + 1)]

    def waves(entries: int) -> int:
        return cdiv(entries * hidden_size, _GRADIENT_TILE * multiprocessors)

    def cost(entries: int) -> tuple[int, int]:
        slices, remainder = divmod(num_entries, entries)
        return slices * waves(entries) + waves(remainder), slices

    return min(sorted({min(size, largest) for size in sizes}, reverse=True), key=cost)


@on_its_device
def head_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    mask: SamplingMask | None = None,
    saved: SavedTiles | None = None,
) -> Tensor:
    """Compute `chunked.head_statistics` by a kernel, and fill `saved`; with a mask in slices of the vocabulary."""
    hidden, weight = readable(hidden_TH), readable(weight_VH)
    num_tokens, num_entries = len(hidden), len(weight)
    statistics = torch.empty(4, num_tokens, dtype=torch.float32, device=hidden.device)
    tiles = statistics.new_empty(cdiv(num_entries, BLOCK_V), 3, num_tokens) if saved is None else saved.tiles
    for entries in mask_slices(mask, num_tokens, num_entries):
        bits = mask_bits(mask, entries)
        if not hidden.is_meta:  # a plan of memory: all is allocated
            exponentials = None if saved is None else saved.exponentials[:, entries]
            launch_statistics(hidden, weight[entries], transform, bits, tiles[entries.start // BLOCK_V :], exponentials)
    if hidden.is_meta:
        return statistics
    merge_kernel[(cdiv(num_tokens, 32),)](tiles, statistics, len(tiles), num_tokens, BT=32, BN=64)
    launch_label_logits(hidden, weight, labels_T, transform, statistics[3])
    return statistics


def launch_statistics(
    hidden: Tensor,
    weight: Tensor,
    transform: LogitTransform,
    bits: Tensor | None,
    tiles: Tensor,
    exponentials: Tensor | None = None,
    ranking: Sequence[Tensor | None] = (None, None, None, None),
) -> None:
    """Write the statistics of some entries to the first of `tiles`, and what `fused_ranking.Ranking` asks for."""
    numbers, inverse_temperatures = kernel_numbers(transform)
    tiling = _tiling(hidden, weight, _STAGES if exponentials is None else _STAGES_OF_WRITERS)
    product_statistics_kernel[(tiling["PROGRAMS"],)](
        descriptor(hidden, (_BLOCK_T, _STEP)),
        descriptor(weight, (BLOCK_V, _STEP)),
        None if exponentials is None else descriptor(exponentials, (_BLOCK_T, BLOCK_V)),
        bits,
        inverse_temperatures,
        tiles,
        *ranking,
        len(hidden),
        len(weight),
        hidden.shape[1],
        *numbers,
        SOFTCAP=transform.softcap != 0.0,
        KEEP=exponentials is not None,
        BG=GROUP_ENTRIES,
        **tiling,
    )


def launch_label_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    out: Tensor,
    log2_out: Tensor | None = None,
) -> None:
    """Write each label's logit, and the logit times log2 e, 0 for labels outside this rank's entries."""
    numbers, inverse_temperatures = kernel_numbers(transform)
    label_logits_kernel[(len(hidden),)](
        hidden,
        weight,
        labels,
        inverse_temperatures,
        out,
        log2_out,
        len(weight),
        hidden.shape[1],
        *numbers,
        SOFTCAP=transform.softcap != 0.0,
        BH=1024,
    )


def mask_slices(mask: SamplingMask | None, num_tokens: int, num_entries: int) -> Iterator[slice]:
    """Cut the vocabulary so that the bits of a part take 32 MiB, or the memory of the mask's ids."""
    step = num_entries
    if mask is not None:
        step = max(max(_MASK_BITS, _BITS_OF_ID * len(mask.ids)) // num_tokens, _MIN_SLICE) // BLOCK_V * BLOCK_V
    for begin in range(0, num_entries, step):
        yield slice(begin, min(begin + step, num_entries))


@on_its_device
def head_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    upstream: UpstreamGradients,
    mask: SamplingMask | None = None,
    *,
    grad_hidden_TH: Tensor | None,
    grad_weight_VH: Tensor | None,
    add_to_weight: bool = False,
    hidden_done: Callable[[], None] = lambda: None,
    saved: SavedTiles | None = None,
    overwrite: bool = False,
) -> None:
    """Compute `chunked.head_gradients` by kernels; with `saved`, without a GEMM for the logits.

    With `overwrite` the gradient of all logits overwrites the kept exponentials.
    """
    hidden, weight_VH = readable(hidden_TH), readable(weight_VH)
    num_tokens, num_entries = len(hidden), len(weight_VH)
    if saved is not None and overwrite:
        step, buffer = num_entries, saved.exponentials
    else:
        step = slice_entries(num_tokens, num_entries, hidden.shape[1], num_multiprocessors(hidden.device))
        buffer = hidden.new_empty(num_tokens, min(step, cdiv(num_entries, BLOCK_V) * BLOCK_V))
    if hidden.is_meta:  # a plan of memory: all is allocated
        mask_bits(mask, slice(0, min(step, num_entries)))
        hidden_done()
        return
    numbers, inverse_temperatures = kernel_numbers(transform)
    rows = (labels_T, inverse_temperatures, *(None if x is None else x.contiguous() for x in upstream))
    for begin in range(0, num_entries, step):
        weight = weight_VH[begin : begin + step]
        gradient = buffer[:, : len(weight)]
        if saved is None:
            tiling = _tiling(hidden, weight, _STAGES_OF_WRITERS)
            product_gradient_kernel[(tiling["PROGRAMS"],)](
                descriptor(hidden, (_BLOCK_T, _STEP)),
                descriptor(weight, (BLOCK_V, _STEP)),
                descriptor(gradient, (_BLOCK_T, BLOCK_V)),
                mask_bits(mask, slice(begin, begin + len(weight))),
                *rows,
                *gradient.shape,
                hidden.shape[1],
                begin,
                *numbers,
                SOFTCAP=numbers[1] != 0.0,
                **tiling,
            )
        else:
            saved_gradient(saved, gradient, rows, numbers, begin)
        if grad_hidden_TH is not None:
            add_product_(grad_hidden_TH, gradient, weight.T)
        if begin + step >= num_entries:
            hidden_done()
        if grad_weight_VH is None:
            continue
        if add_to_weight:
            add_product_(grad_weight_VH[begin : begin + step], gradient.T, hidden.T)
        else:
            multiply_into(grad_weight_VH[begin : begin + step], gradient.T, hidden.T, None)


def saved_gradient(saved: SavedTiles, gradient_TV: Tensor, rows: _Rows, numbers: _Numbers, first_entry: int) -> None:
    """Write the gradient of the raw dot products from kept exponentials; `first_entry` is a multiple of `BLOCK_V`."""
    num_tokens, num_entries = gradient_TV.shape
    kept_gradient_kernel[(cdiv(num_entries, BLOCK_V) * cdiv(num_tokens, _KEPT_ROWS),)](
        *saved,
        gradient_TV,
        *rows,
        num_tokens,
        num_entries,
        saved.exponentials.stride(0),
        gradient_TV.stride(0),
        first_entry,
        *numbers,
        SOFTCAP=numbers[1] != 0.0,
        BT=_KEPT_ROWS,
        BV=BLOCK_V,
        num_warps=4,
    )


def mask_bits(mask: SamplingMask | None, entries: slice) -> Tensor | None:
    """Return the bits `[N, 8, T]` int32 of some entries, see `mask_bits_kernel`; None without a mask."""
    if mask is None:
        return None
    num_entries = entries.stop - entries.start
    bits = mask.ids.new_zeros(cdiv(num_entries, BLOCK_V), 8, len(mask))
    if not bits.is_meta:
        numbers = len(mask), entries.start, num_entries
        rows = mask.ids.contiguous(), mask.offsets.contiguous()
        mask_bits_kernel[(len(mask),)](*rows, bits, *numbers, BV=BLOCK_V, BLOCK=512)
    return bits


def kernel_numbers(transform: LogitTransform) -> tuple[_Numbers, Tensor | None]:
    """Return the transform as the kernels take it: one inverse temperature, or one for each token."""
    scale, softcap, temperature = transform
    if isinstance(temperature, Tensor):
        return (scale, softcap, 1.0), temperature.float().reciprocal()
    return (scale, softcap, 1.0 / temperature), None


def _tiling(hidden_TH: Tensor, weight_VH: Tensor, stages: int) -> dict[str, Any]:
    """Return the keyword arguments of a kernel that multiplies."""
    tiles = cdiv(len(hidden_TH), _BLOCK_T) * cdiv(len(weight_VH), BLOCK_V)
    return {
        "BT": _BLOCK_T,
        "BV": BLOCK_V,
        "BH": _STEP,
        "GROUP": 8,  # rows of tiles walked side by side, so that programs share operands in the L2 cache
        "PROGRAMS": min(num_multiprocessors(hidden_TH.device), tiles),
        "num_stages": stages,
        "num_warps": 8,
    }


def readable(x: Tensor) -> Tensor:
    """Return `x` as a tensor descriptor reads it: contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
