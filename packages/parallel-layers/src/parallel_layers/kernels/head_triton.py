"""The Triton kernels of the language-model head, which `parallel_layers.head.fused` launches.

With the logits z of a tile and their maximum m in a row,

- `product_statistics_kernel` reduces the tile to m, s = sum e^(z - m) and u = sum (z - m) e^(z - m), and can keep
  e^(z - m) in the inputs' dtype;
- `product_gradient_kernel` writes `dz_j = g_lp (1[j = label] - p_j) - g_H p_j (log p_j + H)` in the inputs' dtype;
- `kept_gradient_kernel` computes dz from kept exponentials without a GEMM: log p = log e^(z - m) + m - logsumexp;
- `mask_bits_kernel` writes a sampling mask as bits, by which the first two drop entries of a tile.

Arguments named `*_ptr` are tensors, or None if optional. `hidden`, `weight`, `exponentials` and `gradient` are tensor
descriptors. A tile is `[BT, BV]`, BT tokens by BV vocabulary entries, contracted in steps of BH.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

from torch import Tensor

from parallel_layers.kernels.runtime import HAS_TRITON, tl, triton

if HAS_TRITON:
    from triton.language.extra import libdevice
    from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
# The logit of entries outside the vocabulary: finite, so that its product with a probability of 0 is 0.
_OUTSIDE = tl.constexpr(-1e30)


def descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    """Return a tensor descriptor, through which kernels read and write blocks of a matrix."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@triton.jit
def _tile_of(index, tiles_t, tiles_v, GROUP: tl.constexpr):
    """Return the tile of an index. GROUP rows of tiles are walked together and share operands in the L2 cache."""
    group = index // (GROUP * tiles_v)
    first_row = group * GROUP
    height = tl.minimum(tiles_t - first_row, GROUP)
    offset = index % (GROUP * tiles_v)
    return first_row + offset % height, offset // height


@triton.jit
def _row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature):
    factor = tl.full(rows.shape, inverse_temperature, tl.float32)
    if inverse_temperatures_ptr is not None:
        factor *= tl.load(inverse_temperatures_ptr + rows, mask=rows < num_tokens, other=1.0)
    return factor


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _fast_log2(x):
    """Return the hardware's logarithm. tl.log2 takes several times the instructions, for more digits than bf16 has."""
    return libdevice.fast_log2f(x)


@triton.jit
def _product(hidden, weight, tile_t, tile_v, hidden_size, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr):
    product = tl.zeros((BT, BV), dtype=tl.float32)
    for step in range(tl.cdiv(hidden_size, BH)):
        x = hidden.load([tile_t * BT, step * BH])
        w = weight.load([tile_v * BV, step * BH])
        product = tl.dot(x, w.T, product)
    return product


@triton.jit
def mask_bits_kernel(
    ids_ptr, offsets_ptr, bits_ptr, num_tokens, first_entry, num_entries, BV: tl.constexpr, BLOCK: tl.constexpr
):
    """Set the bits `[N, 8, T]` int32 of the kept entries of a row: bit j of word i of a tile is its column 8 j + i.

    A thread of the kernels below holds all columns 8 j + i of a row for one or two i, and so reads few words.
    """
    row = tl.program_id(0)
    end = tl.load(offsets_ptr + row + 1)
    for begin in range(tl.load(offsets_ptr + row), end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        entries = tl.load(ids_ptr + at, mask=at < end, other=-1) - first_entry
        inside = (at < end) & (entries >= 0) & (entries < num_entries)
        columns = entries % BV
        words = (entries // BV * 8 + columns % 8).to(tl.int64) * num_tokens + row
        tl.atomic_or(bits_ptr + words, 1 << (columns // 8), mask=inside, sem="relaxed")


@triton.jit
def _kept(bits_ptr, tile_v, rows, num_tokens, BT: tl.constexpr, BV: tl.constexpr):
    """Return which entries of a tile `[BT, BV]` the sampling mask keeps."""
    columns = tl.arange(0, BV)
    inside = rows < num_tokens
    words = tl.zeros((BT, BV), tl.int32)
    for number in tl.static_range(8):
        of_rows = tl.load(bits_ptr + (tile_v * 8 + number).to(tl.int64) * num_tokens + rows, mask=inside, other=0)
        words = tl.where((columns % 8 == number)[None, :], of_rows[:, None], words)
    return ((words >> (columns // 8)[None, :]) & 1) != 0


@triton.jit
def product_statistics_kernel(
    hidden,
    weight,
    exponentials,
    bits_ptr,
    inverse_temperatures_ptr,
    parts_ptr,
    num_tokens,
    num_entries,
    hidden_size,
    scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    KEEP: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Statistics m, s, u of every tile of the logits, `[N, 3, T]`; with KEEP, e^(z - m) as well."""
    tiles_t = tl.cdiv(num_tokens, BT)
    tiles_v = tl.cdiv(num_entries, BV)
    for index in tl.range(tl.program_id(0), tiles_t * tiles_v, PROGRAMS, flatten=True):
        tile_t, tile_v = _tile_of(index, tiles_t, tiles_v, GROUP)
        z = _product(hidden, weight, tile_t, tile_v, hidden_size, BT, BV, BH)
        rows = tile_t * BT + tl.arange(0, BT)
        factor = _row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature) * _LOG2_E
        # Scaling before the reduction measured faster than folding the factor into z - m: it frees the accumulator.
        if SOFTCAP:
            z = _tanh(z * (scale / softcap)) * (softcap * factor)[:, None]
        else:
            z = z * (scale * factor)[:, None]
        if bits_ptr is not None:  # no bit is set beyond the entries
            z = tl.where(_kept(bits_ptr, tile_v, rows, num_tokens, BT, BV), z, _OUTSIDE)
        elif (tile_v + 1) * BV > num_entries:
            columns = tile_v * BV + tl.arange(0, BV)
            z = tl.where((columns < num_entries)[None, :], z, _OUTSIDE)
        maximum = tl.max(z, 1)
        z = z - maximum[:, None]
        exponential = tl.exp2(z)
        inside = rows < num_tokens
        statistics_ptr = parts_ptr + tile_v.to(tl.int64) * 3 * num_tokens + rows
        tl.store(statistics_ptr, maximum * _LN_2, mask=inside)
        tl.store(statistics_ptr + num_tokens, tl.sum(exponential, 1), mask=inside)
        tl.store(statistics_ptr + 2 * num_tokens, tl.sum(exponential * z, 1) * _LN_2, mask=inside)
        if KEEP:
            exponentials.store([tile_t * BT, tile_v * BV], exponential.to(exponentials.dtype))


@triton.jit
def merge_kernel(parts_ptr, statistics_ptr, num_parts, num_tokens, BT: tl.constexpr, BN: tl.constexpr):
    """Merge the statistics of all tiles of a token, `[N, 3, T]`, into three rows `[3, T]`."""
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    maximum = tl.full((BT,), _OUTSIDE, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    moment = tl.zeros((BT,), tl.float32)
    for begin in range(0, num_parts, BN):
        part_numbers = begin + tl.arange(0, BN)
        mask = (part_numbers < num_parts)[:, None] & (rows < num_tokens)[None, :]
        address = parts_ptr + part_numbers.to(tl.int64)[:, None] * 3 * num_tokens + rows[None, :]
        maxima = tl.load(address, mask=mask, other=_OUTSIDE)
        totals = tl.load(address + num_tokens, mask=mask, other=0.0)
        moments = tl.load(address + 2 * num_tokens, mask=mask, other=0.0)
        merged = tl.maximum(maximum, tl.max(maxima, 0))
        shift = maximum - merged
        shifts = maxima - merged[None, :]
        weights = tl.exp(shifts)
        moment = (moment + shift * total) * tl.exp(shift) + tl.sum((moments + shifts * totals) * weights, 0)
        total = total * tl.exp(shift) + tl.sum(totals * weights, 0)
        maximum = merged
    inside = rows < num_tokens
    tl.store(statistics_ptr + rows, maximum, mask=inside)
    tl.store(statistics_ptr + num_tokens + rows, total, mask=inside)
    tl.store(statistics_ptr + 2 * num_tokens + rows, moment, mask=inside)


@triton.jit
def label_logits_kernel(
    hidden_ptr,
    weight_ptr,
    labels_ptr,
    inverse_temperatures_ptr,
    label_logits_ptr,
    num_entries,
    hidden_size,
    scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    BH: tl.constexpr,
):
    """Write the logit of each token's label, 0 for a label outside this rank's entries."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < num_entries)
    weight_ptr += tl.where(inside, label, 0) * hidden_size
    hidden_ptr += row * hidden_size
    products = tl.zeros((BH,), tl.float32)
    for begin in range(0, hidden_size, BH):
        columns = begin + tl.arange(0, BH)
        x = tl.load(hidden_ptr + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)
        products += x * w
    z = tl.sum(products, 0) * scale
    if SOFTCAP:
        z = softcap * _tanh(z / softcap)
    z *= inverse_temperature
    if inverse_temperatures_ptr is not None:
        z *= tl.load(inverse_temperatures_ptr + row)
    tl.store(label_logits_ptr + row, tl.where(inside, z, 0.0))


@triton.jit
def _gradient_of_logits(
    log2_probs,
    probs,
    columns,
    rows,
    row_scale,
    first_entry,
    labels_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    entropies_ptr,
    num_tokens,
):
    """Return dz of a tile `[BT, BV]` times `row_scale [BT]`, from probabilities and their base-2 logarithms."""
    inside = rows < num_tokens
    grad_log_prob = tl.load(grad_log_prob_ptr + rows, mask=inside, other=0.0) * row_scale
    if grad_entropy_ptr is not None:
        grad_entropy = tl.load(grad_entropy_ptr + rows, mask=inside, other=0.0) * row_scale
        constant = -grad_log_prob - grad_entropy * tl.load(entropies_ptr + rows, mask=inside, other=0.0)
        gradient = probs * (constant[:, None] + (grad_entropy * -_LN_2)[:, None] * log2_probs)
    else:
        gradient = probs * -grad_log_prob[:, None]
    label = (tl.load(labels_ptr + rows, mask=inside, other=-1) - first_entry).to(tl.int32)
    return tl.where(columns[None, :] == label[:, None], gradient + grad_log_prob[:, None], gradient)


@triton.jit
def product_gradient_kernel(
    hidden,
    weight,
    gradient,
    bits_ptr,
    labels_ptr,
    inverse_temperatures_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    logsumexps_ptr,
    entropies_ptr,
    num_tokens,
    num_entries,
    hidden_size,
    first_entry,
    scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Write the gradient of the raw dot products; recompute the GEMM."""
    tiles_t = tl.cdiv(num_tokens, BT)
    tiles_v = tl.cdiv(num_entries, BV)
    for index in tl.range(tl.program_id(0), tiles_t * tiles_v, PROGRAMS, flatten=True):
        tile_t, tile_v = _tile_of(index, tiles_t, tiles_v, GROUP)
        z = _product(hidden, weight, tile_t, tile_v, hidden_size, BT, BV, BH)
        rows = tile_t * BT + tl.arange(0, BT)
        inside = rows < num_tokens
        factor = _row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature)
        logsumexp = tl.load(logsumexps_ptr + rows, mask=inside, other=0.0) * _LOG2_E
        if SOFTCAP:
            tanh = _tanh(z * (scale / softcap))
            log2_probs = tanh * (factor * (softcap * _LOG2_E))[:, None] - logsumexp[:, None]
        else:
            log2_probs = z * (factor * (scale * _LOG2_E))[:, None] - logsumexp[:, None]
        dz = _gradient_of_logits(
            log2_probs,
            tl.exp2(log2_probs),
            tile_v * BV + tl.arange(0, BV),
            rows,
            scale * factor,
            first_entry,
            labels_ptr,
            grad_log_prob_ptr,
            grad_entropy_ptr,
            entropies_ptr,
            num_tokens,
        )
        if SOFTCAP:
            dz *= 1.0 - tanh * tanh
        if bits_ptr is not None:
            dz = tl.where(_kept(bits_ptr, tile_v, rows, num_tokens, BT, BV), dz, 0.0)
        gradient.store([tile_t * BT, tile_v * BV], dz.to(gradient.dtype))


@triton.jit
def kept_gradient_kernel(
    exponentials_ptr,
    parts_ptr,
    gradient_ptr,
    labels_ptr,
    inverse_temperatures_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    logsumexps_ptr,
    entropies_ptr,
    num_tokens,
    num_entries,
    exponentials_stride,
    gradient_stride,
    first_entry,
    scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Write the gradient of the raw dot products from kept exponentials."""
    # A one-dim grid: the other dims end at 65535. Neighbouring programs take neighbouring columns of the same rows.
    tiles_v = tl.cdiv(num_entries, BV)
    tile_v = tl.program_id(0) % tiles_v
    rows = (tl.program_id(0) // tiles_v) * BT + tl.arange(0, BT)
    columns = tile_v * BV + tl.arange(0, BV)
    inside = rows < num_tokens
    mask = inside[:, None] & (columns < num_entries)[None, :]
    at = exponentials_ptr + rows.to(tl.int64)[:, None] * exponentials_stride + first_entry + columns[None, :]
    exponential = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tile = (first_entry // BV + tile_v).to(tl.int64)
    maximum = tl.load(parts_ptr + tile * 3 * num_tokens + rows, mask=inside, other=0.0)
    shift = (maximum - tl.load(logsumexps_ptr + rows, mask=inside, other=0.0)) * _LOG2_E
    # If the exponential underflowed, the probability is 0 and any finite logarithm will do.
    log2_exponential = _fast_log2(tl.maximum(exponential, 1e-37))
    factor = _row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature)
    dz = _gradient_of_logits(
        log2_exponential + shift[:, None],
        exponential * tl.exp2(shift)[:, None],
        columns,
        rows,
        scale * factor,
        first_entry,
        labels_ptr,
        grad_log_prob_ptr,
        grad_entropy_ptr,
        entropies_ptr,
        num_tokens,
    )
    if SOFTCAP:
        tanh = (log2_exponential * _LN_2 + maximum[:, None]) / (softcap * factor)[:, None]
        tanh = tl.maximum(tanh, -1.0)  # of a row without kept entries in its tile
        dz *= 1.0 - tanh * tanh
    out = gradient_ptr + rows.to(tl.int64)[:, None] * gradient_stride + columns[None, :]
    tl.store(out, dz.to(gradient_ptr.dtype.element_ty), mask=mask)
