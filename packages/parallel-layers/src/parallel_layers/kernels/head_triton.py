"""The Triton kernels of the language-model head, which `parallel_layers.head.fused` launches.

With the logits z of a tile and their maximum m in a row,

- `product_statistics_kernel` reduces the tile to m, s = sum e^(z - m) and u = sum (z - m) e^(z - m), and can keep
  e^(z - m) in the inputs' dtype;
- `product_gradient_kernel` writes `dz_j = g_lp (1[j = label] - p_j) - g_H p_j (log p_j + H)` in the inputs' dtype;
- `kept_gradient_kernel` computes dz from kept exponentials without a GEMM: log p = log e^(z - m) + m - logsumexp;
- the first two drop the entries of a tile that a sampling mask does not keep, by the bits of `kernels.sampling_mask`.

Arguments named `*_ptr` are tensors, or None if optional. `hidden`, `weight`, `exponentials` and `gradient` are tensor
descriptors. A tile is `[BT, BV]`, BT tokens by BV vocabulary entries, contracted in steps of BH.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import math
from typing import Any

from torch import Tensor

from parallel_layers.kernels.runtime import HAS_TRITON, tl, triton
from parallel_layers.kernels.sampling_mask import kept

if HAS_TRITON:
    from triton.language.extra import libdevice
    from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
# The logit of entries outside the vocabulary: finite, so that its product with a probability of 0 is 0.
OUTSIDE = tl.constexpr(-1e30)


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
def row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature):
    """Return the inverse temperature of each row."""
    factor = tl.full(rows.shape, inverse_temperature, tl.float32)
    if inverse_temperatures_ptr is not None:
        factor *= tl.load(inverse_temperatures_ptr + rows, mask=rows < num_tokens, other=1.0)
    return factor


@triton.jit
def tanh_of(x):
    """Return the hyperbolic tangent."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _fast_log2(x):
    """Return the hardware's logarithm. tl.log2 takes several times the instructions, for more digits than bf16 has."""
    return libdevice.fast_log2f(x)


@triton.jit
def _next_below(x):
    """Return the largest fp32 number below each number."""
    bits = x.to(tl.int32, bitcast=True)
    below = tl.where(bits > 0, bits - 1, bits + 1)
    return tl.where(x == 0.0, -1.2e-38, below.to(tl.float32, bitcast=True))


@triton.jit
def _product(hidden, weight, tile_t, tile_v, hidden_size, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr):
    product = tl.zeros((BT, BV), dtype=tl.float32)
    for step in range(tl.cdiv(hidden_size, BH)):
        x = hidden.load([tile_t * BT, step * BH])
        w = weight.load([tile_v * BV, step * BH])
        product = tl.dot(x, w.T, product)
    return product


@triton.jit
def product_statistics_kernel(
    hidden,
    weight,
    exponentials,
    bits_ptr,
    inverse_temperatures_ptr,
    parts_ptr,
    labels_ptr,
    label_logits_ptr,
    larger_ptr,
    maxima_ptr,
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
    BG: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Statistics m, s, u of every tile of the logits, `[N, 3, T]`; with KEEP, e^(z - m) as well.

    With `maxima_ptr` also the maxima of groups of BG entries, `[T, N * BV / BG]`, and how many entries come before the
    label, `[N, T]` int32: their logits are larger, or equal with a lower id. These logits are times log2 e.
    """
    tiles_t = tl.cdiv(num_tokens, BT)
    tiles_v = tl.cdiv(num_entries, BV)
    for index in tl.range(tl.program_id(0), tiles_t * tiles_v, PROGRAMS, flatten=True):
        tile_t, tile_v = _tile_of(index, tiles_t, tiles_v, GROUP)
        z = _product(hidden, weight, tile_t, tile_v, hidden_size, BT, BV, BH)
        rows = tile_t * BT + tl.arange(0, BT)
        factor = row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature) * LOG2_E
        # Scaling before the reduction measured faster than folding the factor into z - m: it frees the accumulator.
        if SOFTCAP:
            z = tanh_of(z * (scale / softcap)) * (softcap * factor)[:, None]
        else:
            z = z * (scale * factor)[:, None]
        if bits_ptr is not None:  # no bit is set beyond the entries
            z = tl.where(kept(bits_ptr, tile_v, rows, num_tokens, BT, BV), z, OUTSIDE)
        elif (tile_v + 1) * BV > num_entries:
            columns = tile_v * BV + tl.arange(0, BV)
            z = tl.where((columns < num_entries)[None, :], z, OUTSIDE)
        inside = rows < num_tokens
        if maxima_ptr is not None:
            label = tl.load(labels_ptr + rows, mask=inside, other=-1).to(tl.int32) - tile_v * BV
            label_logit = tl.load(label_logits_ptr + rows, mask=inside, other=0.0)
            # An entry in front of the label comes before it also if their logits are equal.
            bound = tl.where(label >= BV, _next_below(label_logit), label_logit)
            larger = tl.sum((z > bound[:, None]).to(tl.int32), 1)
            in_tile = (label >= 0) & (label < BV)
            if tl.max(in_tile.to(tl.int32), 0) > 0:
                column = tl.arange(0, BV)[None, :]
                before = (z > label_logit[:, None]) & (column != label[:, None])
                before = before | ((z == label_logit[:, None]) & (column < label[:, None]))
                larger = tl.where(in_tile, tl.sum(before.to(tl.int32), 1), larger)
            tl.store(larger_ptr + tile_v.to(tl.int64) * num_tokens + rows, larger, mask=inside)
            groups = (tile_v * (BV // BG) + tl.arange(0, BV // BG))[None, :]
            of_groups = tl.max(tl.reshape(z, (BT, BV // BG, BG)), 2)
            at = rows.to(tl.int64)[:, None] * (tiles_v * (BV // BG)) + groups
            tl.store(maxima_ptr + at, of_groups, mask=inside[:, None])
            maximum = tl.max(of_groups, 1)
        else:
            maximum = tl.max(z, 1)
        z = z - maximum[:, None]
        exponential = tl.exp2(z)
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
    maximum = tl.full((BT,), OUTSIDE, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    moment = tl.zeros((BT,), tl.float32)
    for begin in range(0, num_parts, BN):
        part_numbers = begin + tl.arange(0, BN)
        mask = (part_numbers < num_parts)[:, None] & (rows < num_tokens)[None, :]
        address = parts_ptr + part_numbers.to(tl.int64)[:, None] * 3 * num_tokens + rows[None, :]
        maxima = tl.load(address, mask=mask, other=OUTSIDE)
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
    log2_logits_ptr,
    num_entries,
    hidden_size,
    scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    BH: tl.constexpr,
):
    """Write the logit of each token's label, 0 for a label outside this rank's entries.

    `log2_logits_ptr` gets the logit times log2 e, rounded as `product_statistics_kernel` rounds.
    """
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
    product = tl.sum(products, 0)
    if log2_logits_ptr is not None:
        factor = inverse_temperature * LOG2_E
        if inverse_temperatures_ptr is not None:
            factor = inverse_temperature * tl.load(inverse_temperatures_ptr + row) * LOG2_E
        if SOFTCAP:
            log2_logit = tanh_of(product * (scale / softcap)) * (softcap * factor)
        else:
            log2_logit = product * (scale * factor)
        tl.store(log2_logits_ptr + row, tl.where(inside, log2_logit, 0.0))
    z = product * scale
    if SOFTCAP:
        z = softcap * tanh_of(z / softcap)
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
        factor = row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature)
        logsumexp = tl.load(logsumexps_ptr + rows, mask=inside, other=0.0) * LOG2_E
        if SOFTCAP:
            tanh = tanh_of(z * (scale / softcap))
            log2_probs = tanh * (factor * (softcap * LOG2_E))[:, None] - logsumexp[:, None]
        else:
            log2_probs = z * (factor * (scale * LOG2_E))[:, None] - logsumexp[:, None]
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
            dz = tl.where(kept(bits_ptr, tile_v, rows, num_tokens, BT, BV), dz, 0.0)
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
    shift = (maximum - tl.load(logsumexps_ptr + rows, mask=inside, other=0.0)) * LOG2_E
    # If the exponential underflowed, the probability is 0 and any finite logarithm will do.
    log2_exponential = _fast_log2(tl.maximum(exponential, 1e-37))
    factor = row_factor(inverse_temperatures_ptr, rows, num_tokens, inverse_temperature)
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
