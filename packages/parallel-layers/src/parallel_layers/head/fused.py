"""The head on CUDA: fused kernels for the logits, plain GEMMs for the gradients of hidden states and weight.

The functions are those of `chunked`. The forward is one kernel that multiplies and reduces. The backward walks the
vocabulary: one kernel recomputes the logits of a slice and writes their gradient in bf16, then two GEMMs with fp32 sums
compute the gradients. If the forward has kept the exponentials, the gradient of all logits may overwrite them in one
slice.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary, N tiles of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.head.logit_transform import LogitTransform
from parallel_layers.head.softmax_statistics import UpstreamGradients
from parallel_layers.kernels import head
from parallel_layers.kernels.runtime import num_multiprocessors, use_triton

_SLICES = 10
_MIN_SLICE, _MAX_ELEMENTS = 2048, 1 << 28
_GRADIENT_TILE = 128 * 256  # of cuBLAS on Hopper


class Kept(NamedTuple):
    """Tensors that the forward keeps to save a GEMM in the backward."""

    exponentials: Tensor
    """`[T, V]` (V rounded up to 8), rounded to the inputs' dtype."""
    parts: Tensor
    """`[N, 3, T]` fp32; the first row of each tile holds the maxima that were subtracted before the exponential."""


def supports(hidden_TH: Tensor, weight_VH: Tensor) -> bool:
    """Return whether the kernels take the tensors: non-empty bf16 on Hopper or newer, H a multiple of 8."""
    return (
        use_triton(hidden_TH, weight_VH)
        and hidden_TH.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(hidden_TH.device) >= (9, 0)
        and hidden_TH.shape[1] % 8 == 0
        and hidden_TH.numel() > 0
        and weight_VH.numel() > 0
    )


def new_kept(hidden_TH: Tensor, num_tokens: int, num_entries: int) -> Kept:
    """Allocate the tensors that the forward keeps."""
    # A tensor descriptor writes rows of whole 16 bytes.
    row = -(-num_entries // 8) * 8
    tiles = -(-num_entries // head.BLOCK_V)
    return Kept(hidden_TH.new_empty(num_tokens, row), hidden_TH.new_empty(tiles, 3, num_tokens, dtype=torch.float32))


def slice_entries(num_tokens: int, num_entries: int, hidden_size: int, multiprocessors: int) -> int:
    """Return the vocabulary entries of a slice: whole tiles, about a tenth of the vocabulary.

    Small slices read and write the fp32 gradient of the hidden states more often; large slices take memory. Of the
    sizes near a tenth, the function takes the size whose GEMMs for the weight's gradient need the fewest waves of SMs.
    """
    most = max(_MAX_ELEMENTS // num_tokens, _MIN_SLICE) // head.BLOCK_V * head.BLOCK_V
    share = -(-max(num_entries // _SLICES, _MIN_SLICE) // head.BLOCK_V)
    sizes = [n * head.BLOCK_V for n in range(round(0.9 * share), round(1.05 * share) + 1)]

    def waves(entries: int) -> int:
        return -(-entries * hidden_size // (_GRADIENT_TILE * multiprocessors))

    def cost(entries: int) -> tuple[int, int]:
        whole, rest = divmod(num_entries, entries)
        return whole * waves(entries) + waves(rest), whole

    return min(sorted({min(size, most) for size in sizes}, reverse=True), key=cost)


def _numbers(transform: LogitTransform) -> tuple[head.Numbers, Tensor | None]:
    """Return the transform as the kernels take it: one temperature, or one for each token."""
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        return head.Numbers(transform.scale, transform.softcap, 1.0), temperature.float().reciprocal()
    return head.Numbers(transform.scale, transform.softcap, 1.0 / temperature), None


def head_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    kept: Kept | None = None,
) -> Tensor:
    """Compute `chunked.head_statistics` by a kernel, and fill `kept`."""
    numbers, inverse_temperatures = _numbers(transform)
    return head.product_statistics(
        _readable(hidden_TH),
        _readable(weight_VH),
        labels_T,
        inverse_temperatures,
        numbers,
        parts_N3T=None if kept is None else kept.parts,
        exponentials_TV=None if kept is None else kept.exponentials[:, : len(weight_VH)],
    )


def head_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    transform: LogitTransform,
    upstream: UpstreamGradients,
    *,
    grad_hidden_TH: Tensor | None,
    grad_weight_VH: Tensor | None,
    accumulate_weight: bool = False,
    hidden_done: Callable[[], None] = lambda: None,
    kept: Kept | None = None,
    overwrite: bool = False,
    entries_a_slice: int | None = None,
) -> None:
    """Compute `chunked.head_gradients` by kernels; with `kept`, without a GEMM for the logits.

    With `overwrite` the gradient of all logits overwrites the kept exponentials. Otherwise the vocabulary is cut into
    slices of `entries_a_slice`, a multiple of `head.BLOCK_V` (default: `slice_entries`).
    """
    hidden, weight_VH = _readable(hidden_TH), _readable(weight_VH)
    numbers, inverse_temperatures = _numbers(transform)
    rows = head.Rows(
        labels_T,
        inverse_temperatures,
        upstream.label.contiguous(),
        None if upstream.entropy is None else upstream.entropy.contiguous(),
        upstream.logsumexps,
        upstream.entropies,
    )
    num_tokens, num_entries = len(hidden), len(weight_VH)
    if kept is not None and overwrite:
        step, buffer = num_entries, kept.exponentials
    else:
        multiprocessors = num_multiprocessors(hidden.device)
        step = entries_a_slice or slice_entries(num_tokens, num_entries, hidden.shape[1], multiprocessors)
        buffer = hidden.new_empty(num_tokens, min(step, -(-num_entries // head.BLOCK_V) * head.BLOCK_V))
    for first in range(0, num_entries, step):
        entries = slice(first, first + step)
        weight = weight_VH[entries]
        gradient = buffer[:, : len(weight)]
        if kept is None:
            head.product_gradient(hidden, weight, gradient, rows, numbers, first_entry=first)
        else:
            head.kept_gradient(kept.exponentials, kept.parts, gradient, rows, numbers, first_entry=first)
        if grad_hidden_TH is not None:
            torch.addmm(grad_hidden_TH, gradient, weight, out_dtype=torch.float32, out=grad_hidden_TH)
        if first + step >= num_entries:
            hidden_done()
        if grad_weight_VH is None:
            continue
        out = grad_weight_VH[entries]
        if accumulate_weight:
            torch.addmm(out, gradient.T, hidden, out_dtype=torch.float32, out=out)
        else:
            torch.mm(gradient.T, hidden, out=out)


def _readable(x: Tensor) -> Tensor:
    """Return `x` as a tensor descriptor reads it: contiguous, from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
