"""The custom operator of the recurrences in chunks, and its backward, opaque to torch.compile.

Shape legend: T tokens, N sequences, V value heads, D key size, E value size, M chunks.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from parallel_layers.kernels import state_space, state_space_backward
from parallel_layers.linear_attention import chunked, chunked_state_space
from parallel_layers.linear_attention.chunks import Chunks
from parallel_layers.module.autocast import wide, without_autocast

SIZE = 64
"""The tokens of a chunk, a power of two."""

MOST_ROWS = 1 << 18
"""Tokens of value heads that are computed at a time: with heads of 128 each tensor of states has 256 MiB."""


FORMS: dict[str, ModuleType | None] = {"delta": chunked, "state_space": chunked_state_space, "triton": None}
"""The chunked forms: two in plain torch, and the kernels of Mamba-2, which compute all heads at a time."""


@torch.library.custom_op("parallel_layers::chunked_gated_delta_rule", mutates_args=())
@without_autocast
def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, skip: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor, scale: float, normalize: bool, output_state: bool, slices: int,
    form: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `gated_delta_rule` (form "delta") and `state_space_dual`; the second tensor is empty if not `output_state`.

    Some key heads are computed at a time, so that memory is bounded. The backward computes the forward again. With
    `slices` > 0 states are those before and behind this many equal parts of the sequences; see `Chunks.of_slices`.
    """
    tensors = (q, k, v, log_decay, beta, skip, initial_state, cu_seqlens)
    out, state = _outputs(*tensors, scale, normalize, output_state, slices, form)
    if (module := FORMS[form]) is None:
        end = state if output_state else None
        state_space.forward(v, beta, log_decay, k, q, skip, initial_state, cu_seqlens, out, end, slices)
        return out, state
    chunks = _chunks(cu_seqlens, len(v), slices)
    for _, values, inputs in _turns(chunks, q, k, v, log_decay, beta, scale, normalize):
        start = _start(chunks, initial_state, values, inputs.k.shape[1])
        result, behind = module.forward(inputs, chunks.numbers == 0, start)
        result = chunks.join(_by_token(result))
        if skip is not None:
            result += skip[values, None].to(result.dtype) * v[:, values]
        out[:, values] = result.to(out.dtype)
        if output_state:
            unchanged = 0 if initial_state is None else initial_state[:, values]
            empty = (chunks.last < 0).view(-1, 1, 1, 1)
            state[:, values] = torch.where(empty, unchanged, behind[chunks.last].flatten(1, 2))
    return out, state


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, skip: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor, scale: float, normalize: bool, output_state: bool, slices: int,
    form: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Allocate the outputs `[T, V, E]` and the states `[N, V, D, E]`."""
    shape = (slices or len(cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2]) if output_state else 0
    return v.new_empty(v.shape), v.new_empty(shape, dtype=wide(v.dtype))


def _chunks(cu_seqlens: Tensor, num_tokens: int, slices: int) -> Chunks:
    """Return the chunks of the sequences, with states of sequences or of `slices` parts of them.

    Chunks of short sequences are smaller, at least `SIZE` / 4 tokens, so that fewer places are empty.
    """
    size, num_sequences = SIZE, len(cu_seqlens) - 1
    while size > SIZE // 4 and size * num_sequences > num_tokens:
        size //= 2
    chunks = Chunks.of(cu_seqlens, num_tokens, size)
    return chunks.of_slices(slices) if slices else chunks


def _turns(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, normalize: bool
) -> Iterator[tuple[slice, slice, chunked.Inputs]]:
    """Yield the key heads and the value heads that are computed together, and their inputs."""
    group = v.shape[1] // k.shape[1]
    step = max(1, MOST_ROWS // (len(chunks.tokens) * group))
    for first in range(0, k.shape[1], step):
        keys, values = slice(first, first + step), slice(first * group, (first + step) * group)
        tensors = q[:, keys], k[:, keys], v[:, values], log_decay[:, values], beta[:, values]
        yield keys, values, _inputs(chunks, *tensors, scale, normalize)


def _inputs(
    chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, normalize: bool
) -> chunked.Inputs:
    """Cast to fp32 or fp64, norm, and lay out in chunks."""
    dtype, key_heads = wide(v.dtype), k.shape[1]
    q, k = (x.to(dtype) for x in (q, k))
    if normalize:
        q, k = q * _norm_factor(q), k * _norm_factor(k)
    q, k = (chunks.cut(x).transpose(1, 2)[:, :, None] for x in (q * scale, k))
    decay = log_decay if log_decay.dim() == 3 else log_decay[..., None]
    v, decay, beta = (
        chunks.cut(x.to(dtype)).unflatten(2, (key_heads, -1)).movedim(1, 3) for x in (v, decay, beta[..., None])
    )
    return chunked.Inputs(q, k, v, decay.double().cumsum(-2), beta)


def _norm_factor(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _through_norm(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of x from that of y = x · factor."""
    x = x.to(gradient.dtype)
    factor = _norm_factor(x)
    y = x * factor
    return factor * (gradient - y * (y * gradient).sum(-1, keepdim=True))


def _start(chunks: Chunks, initial_state: Tensor | None, values: slice, key_heads: int) -> Tensor | None:
    """Return the initial states at the chunks with which sequences or slices begin, else 0: `[M, K, G, D, E]`."""
    if initial_state is None:
        return None
    begins = chunks.first[chunks.sequences] == torch.arange(len(chunks.sequences), device=chunks.first.device)
    start = initial_state[chunks.sequences, values].masked_fill_(~begins.view(-1, 1, 1, 1), 0)
    return start.unflatten(1, (key_heads, -1))


def _result_gradient(chunks: Chunks, d_out: Tensor, inputs: chunked.Inputs) -> Tensor:
    """Lay the gradients of the outputs of some heads out in chunks: `[T, V, E]` -> `[M, K, G, C, E]`."""
    return chunks.cut(d_out.to(inputs.v.dtype)).unflatten(2, inputs.v.shape[1:3]).movedim(1, 3)


def _by_token(x: Tensor) -> Tensor:
    """`[M, K, G, C, ...]` -> `[M, C, V, ...]`."""
    return x.movedim(3, 1).flatten(2, 3)


@torch.library.custom_op("parallel_layers::chunked_gated_delta_rule_backward", mutates_args=())
@without_autocast
def chunked_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    skip: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor, scale: float, normalize: bool, slices: int,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the seven tensors; those of the last two are empty where the tensor is None."""
    gradients = _gradients(d_out, d_state, q, k, v, log_decay, beta, skip, initial_state)
    if (module := FORMS[form]) is None:
        d_q, d_k, d_v, d_decay, d_beta, d_skip, d_initial = gradients
        ordered = d_v, d_beta, d_decay, d_k, d_q, d_skip, d_initial
        state_space_backward.backward(
            d_out, d_state, v, beta, log_decay, k, q, skip, initial_state, cu_seqlens, ordered, slices
        )
        return gradients
    chunks = _chunks(cu_seqlens, len(v), slices)
    empty = (chunks.last < 0).view(-1, 1, 1, 1)
    for keys, values, inputs in _turns(chunks, q, k, v, log_decay, beta, scale, normalize):
        heads = inputs.v.shape[1:3]
        start = _start(chunks, initial_state, values, heads[0])
        d_result = _result_gradient(chunks, d_out[:, values], inputs)
        d_behind = None
        if d_state is not None:
            d_last = d_state[:, values].masked_fill(empty, 0)
            d_behind = d_last.new_zeros(len(chunks.sequences), *d_last.shape[1:])
            d_behind = d_behind.index_add_(0, chunks.last.clamp(min=0), d_last).unflatten(1, heads)
        d_inputs, d_start = module.backward(inputs, chunks.numbers == 0, start, d_result, d_behind)
        d_q, d_k, d_v, d_decay, d_beta = (chunks.join(_by_token(x)) for x in d_inputs)
        d_q *= scale
        if normalize:
            d_q, d_k = _through_norm(q[:, keys], d_q), _through_norm(k[:, keys], d_k)
        if skip is not None:
            wide_out = d_out[:, values].to(d_v.dtype)
            d_v += skip[values, None].to(d_v.dtype) * wide_out
            gradients[5][values] = (wide_out * v[:, values]).sum((0, 2))
        results = d_q, d_k, d_v, d_decay.view_as(log_decay[:, values]), d_beta.squeeze(-1)
        for gradient, heads_of, result in zip(gradients, (keys, keys, values, values, values), results, strict=False):
            gradient[:, heads_of] = result
        if d_start is not None:
            d_initial = d_start[chunks.first].flatten(1, 2)
            unchanged = 0 if d_state is None else d_state[:, values]
            gradients[6][:, values] = torch.where(empty, unchanged, d_initial)
    return gradients


def _gradients(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    skip: Tensor | None, initial_state: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocate the gradients of the seven tensors."""
    optional = (v.new_empty(0) if x is None else x for x in (skip, initial_state))
    d_q, d_k, d_v, d_decay, d_beta, d_skip, d_initial = (
        x.new_empty(x.shape) for x in (q, k, v, log_decay, beta, *optional)
    )
    return d_q, d_k, d_v, d_decay, d_beta, d_skip, d_initial


@without_autocast
def slice_maps(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, normalize: bool, slices: int,
    form: str,
) -> Tensor:  # fmt: skip
    """Return what each slice makes of the state before it: S -> A S + B, [A, B] `[slices, V, D, D + E]`.

    Without the delta rule A is one factor for each row of S, `[slices, V, D, 1]`.
    """
    columns = (k.shape[2] if form == "delta" else 1) + v.shape[2]
    maps = v.new_empty(slices, v.shape[1], k.shape[2], columns, dtype=wide(v.dtype))
    if (module := FORMS[form]) is None:
        state_space.maps_of_slices(v, beta, log_decay, k, cu_seqlens, maps)
        return maps
    chunks = _chunks(cu_seqlens, len(v), slices)
    for _, values, inputs in _turns(chunks, q, k, v, log_decay, beta, 1.0, normalize):
        maps[:, values] = module.summary(inputs, chunks.numbers == 0, chunks.first, chunks.last).flatten(1, 2)
    return maps


@without_autocast
def gradients_before_slices(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float,
    normalize: bool, slices: int, form: str,
) -> Tensor:  # fmt: skip
    """Return the gradients of the states before the slices by the slices' own outputs, `[slices, V, D, E]`."""
    gradients = v.new_empty(slices, v.shape[1], k.shape[2], v.shape[2], dtype=wide(v.dtype))
    if (module := FORMS[form]) is None:
        state_space_backward.gradients_before_slices(d_out, beta, log_decay, q, cu_seqlens, gradients)
        return gradients
    chunks = _chunks(cu_seqlens, len(v), slices)
    for _, values, inputs in _turns(chunks, q, k, v, log_decay, beta, scale, normalize):
        d_result = _result_gradient(chunks, d_out[:, values], inputs)
        d_start = module.gradient_of_starts(inputs, chunks.numbers == 0, d_result)
        gradients[:, values] = d_start[chunks.first].flatten(1, 2)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.normalize, ctx.output_state, ctx.slices, ctx.form = inputs
    if not ctx.output_state:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_out is None and d_state is None:
        return (None,) * 13
    q, k, v, log_decay, beta, skip, initial_state, cu_seqlens = ctx.saved_tensors
    d_out = torch.zeros_like(v) if d_out is None else d_out
    options = ctx.scale, ctx.normalize, ctx.slices, ctx.form
    *gradients, d_skip, d_initial = chunked_backward(
        d_out, d_state, q, k, v, log_decay, beta, skip, initial_state, cu_seqlens, *options
    )
    optional = (None if x is None else gradient for x, gradient in ((skip, d_skip), (initial_state, d_initial)))
    return *gradients, *optional, *(None,) * 6


chunked_gated_delta_rule.register_fake(_outputs)
chunked_backward.register_fake(_gradients)
chunked_gated_delta_rule.register_autograd(_backward, setup_context=_setup_context)
