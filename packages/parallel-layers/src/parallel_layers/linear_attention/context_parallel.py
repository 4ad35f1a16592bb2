"""The gated delta rule, Mamba-2 and the short convolution over tokens that are divided over a context-parallel group.

A rank's tokens are one slice of the pack (contiguous layout) or two (zigzag). Each slice maps the state before it to
the state behind it, S -> A S + B, and A is 0 where a sequence begins inside. The ranks exchange these maps instead of
tokens; then each rank knows the states before its slices and computes its outputs. The backward exchanges the
gradients of the states before the slices, which go through the transposed maps from the last slice to the first.

Shape legend: T tokens of the whole pack, n ranks, L tokens of a slice, of which a rank has S (1 or 2), N sequences, V
value heads, D key size, E value size, C channels, W tokens of the convolution's window.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.attention.context_parallel.sequence_layout import Layout, boundaries_in, chunk_order
from parallel_layers.data.boundaries import check_boundaries
from parallel_layers.distributed.async_collectives import all_gather
from parallel_layers.distributed.collectives import gather_from_sequence_parallel
from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.delta_rule import backend_of, check_arguments
from parallel_layers.linear_attention.fla import fla_context_parallel_delta_rule
from parallel_layers.linear_attention.operators import (
    chunked_backward,
    chunked_gated_delta_rule,
    gradients_before_slices,
    slice_maps,
)
from parallel_layers.linear_attention.state_space import check_state_space, form_of
from parallel_layers.module.autocast import autocast_off


class Slices:
    """The slices of the pack that this rank holds, and where sequences begin in them.

    Attributes:
        order: The number of each slice in the pack, rank by rank.
        numbers: The numbers of this rank's slices.
        size: L.
    """

    def __init__(self, cu_seqlens: Tensor, num_tokens: int, group: ProcessGroup, layout: Layout) -> None:
        """Describe `num_tokens` tokens of this rank; `cu_seqlens [N+1]` are the boundaries in the whole pack."""
        self.order = chunk_order(layout, group.size())
        count = len(self.order) // group.size()
        self.numbers = self.order[group.rank() * count : (group.rank() + 1) * count]
        if num_tokens % count or not num_tokens:
            raise ValueError(f"{num_tokens} tokens of a rank do not divide into {count} slices; pad the pack")
        check_boundaries(cu_seqlens, num_tokens * group.size(), least=2)
        self.size = num_tokens // count
        self._cu_seqlens = cu_seqlens

    def boundaries(self, before: int = 0) -> Tensor:
        """Return the boundaries `[S N + 1]` in this rank's slices, each with `before` tokens more at its beginning."""
        size = self.size + before
        parts: list[Tensor] = []
        for number in self.numbers:
            bounds = boundaries_in(self._cu_seqlens, number * self.size - before, size)
            bounds[0] = 0  # in the first slice nothing is before the first sequence
            parts.append(bounds[bool(parts) :] + size * len(parts))
        return torch.cat(parts)

    def continues(self) -> Tensor:
        """Return whether a sequence goes on from the slice before, for each of this rank's slices: `[S]`."""
        begins, ends = self._cu_seqlens[:-1], self._cu_seqlens[1:]
        starts = [number * self.size for number in self.numbers]
        return torch.stack([((begins < start) & (start < ends)).any() for start in starts])

    def in_order(self, gathered: Tensor) -> list[Tensor]:
        """Return the parts of a tensor gathered from all ranks, `[n S, ...]`, in the order of the pack."""
        return [gathered[self.order.index(number)] for number in range(len(self.order))]


def context_parallel_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    log_decay: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor,
    *,
    group: ProcessGroup,
    layout: Layout = "contiguous",
    scale: float | None = None,
    normalize: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, None]:
    """`gated_delta_rule` over tokens in the layout of `split_sequence`.

    Forward: an all-gather of S maps `[V, D, D + E]` fp32 of each rank. Backward: an all-gather of S gradients
    `[V, D, E]`, by "fla" of S maps again. Neither depends on the number of tokens. "fla" reads `cu_seqlens` on the host
    once for each pack, as long as the tensor stays the same.

    Args:
        q_TKD, k_TKD, v_TVE, log_decay, beta_TV: This rank's tokens, as in `gated_delta_rule`.
        cu_seqlens: `[N+1]` int32 boundaries in the whole pack, the same on all ranks.
        group: The ranks that divide the tokens.
        layout: See `split_sequence`.
        scale, normalize, backend: See `gated_delta_rule`.

    Returns:
        The outputs `[T/n, V, E]`, and None in place of states.

    Raises:
        ValueError: As `gated_delta_rule`, or the tokens do not divide into slices; before the exchange.
    """
    check_arguments(q_TKD, k_TKD, v_TVE, log_decay, beta_TV, None, len(cu_seqlens) - 1)
    slices = Slices(cu_seqlens, len(v_TVE), group, layout)
    scale = k_TKD.shape[-1] ** -0.5 if scale is None else scale
    tensors = q_TKD, k_TKD, v_TVE, log_decay, beta_TV
    out: Tensor
    if backend_of(backend, *tensors, None) == "fla":
        with autocast_off(v_TVE):
            out = fla_context_parallel_delta_rule(*tensors, cu_seqlens, scale, normalize, group, layout)
    else:
        out = _Recurrence.apply(*tensors, None, slices, group, scale, normalize, "delta")
    return out, None


def context_parallel_state_space(
    x_TVE: Tensor,
    dt_TV: Tensor,
    A_V: Tensor,
    B_TGD: Tensor,
    C_TGD: Tensor,
    cu_seqlens: Tensor,
    *,
    group: ProcessGroup,
    layout: Layout = "contiguous",
    D_V: Tensor | None = None,
) -> tuple[Tensor, None]:
    """`state_space_dual` over tokens in the layout of `split_sequence`; see `context_parallel_delta_rule`.

    Forward: an all-gather of S maps `[V, D, 1 + E]` fp32 of each rank. Backward: an all-gather of S gradients
    `[V, D, E]`. Sum the gradients of A and D over the group.

    Args:
        x_TVE, dt_TV, A_V, B_TGD, C_TGD, D_V: This rank's tokens, and A and D of all, as in `state_space_dual`.
        cu_seqlens: `[N+1]` int32 boundaries in the whole pack, the same on all ranks.
        group: The ranks that divide the tokens.
        layout: See `split_sequence`.

    Returns:
        The outputs `[T/n, V, E]`, and None in place of states.

    Raises:
        ValueError: As `state_space_dual`, or the tokens do not divide into slices; before the exchange.
    """
    check_state_space(x_TVE, dt_TV, A_V, B_TGD, C_TGD, D_V, None, len(cu_seqlens) - 1)
    slices = Slices(cu_seqlens, len(x_TVE), group, layout)
    tensors = C_TGD, B_TGD, x_TVE, dt_TV * A_V, dt_TV, D_V
    out: Tensor = _Recurrence.apply(*tensors, slices, group, 1.0, False, form_of(x_TVE, B_TGD))
    return out, None


class _Recurrence(torch.autograd.Function):
    """The exchange around the operators; saves its arguments, the maps of all slices and the states before its own."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, skip: Tensor | None,
        slices: Slices, group: ProcessGroup, scale: float, normalize: bool, form: str,
    ) -> Tensor:  # fmt: skip
        tensors, bounds, count = (q, k, v, log_decay, beta), slices.boundaries(), len(slices.numbers)
        ctx.options, ctx.slices, ctx.group = (bounds, scale, normalize, count, form), slices, group
        continues = slices.continues().view(-1, 1, 1, 1)
        maps = slice_maps(*tensors, bounds, normalize, count, form)
        sizes = [maps.shape[-1] - v.shape[-1], v.shape[-1]]
        transitions, increments = maps.split(sizes, -1)
        maps = torch.cat([transitions.masked_fill(~continues, 0), increments], -1)
        ordered = slices.in_order(all_gather(maps, group))
        states = [torch.zeros_like(increments[0])]
        for slice_map in ordered[: max(slices.numbers)]:
            transition, increment = slice_map.split(sizes, -1)
            states.append(_carry(transition, states[-1], increment))
        before = torch.stack([states[number] for number in slices.numbers]).masked_fill(~continues, 0)
        ctx.save_for_backward(*tensors, skip, before, continues, *(x[..., : sizes[0]].clone() for x in ordered))
        out, _ = chunked_gated_delta_rule(*tensors, skip, before, bounds, scale, normalize, False, count, form)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, beta, skip, before, continues, *transitions = ctx.saved_tensors
        bounds, scale, normalize, count, form = ctx.options
        tensors = q, k, v, log_decay, beta
        d_before = gradients_before_slices(d_out, *tensors, bounds, scale, normalize, count, form)
        ordered = ctx.slices.in_order(all_gather(d_before.masked_fill(~continues, 0), ctx.group))
        d_behind = [torch.zeros_like(before[0])]  # the last slice first
        for transition, gradient in zip(transitions[:0:-1], ordered[:0:-1], strict=True):
            d_behind.append(_carry(transition.mT if form == "delta" else transition, d_behind[-1], gradient))
        d_state = torch.stack([d_behind[-1 - number] for number in ctx.slices.numbers])
        gradients = chunked_backward(d_out, d_state, *tensors, skip, before, bounds, scale, normalize, count, form)
        return *gradients[:5], None if skip is None else gradients[5], *(None,) * 5


def _carry(transition: Tensor, state: Tensor, increment: Tensor) -> Tensor:
    """Return A S + B, where A is a matrix or one column of factors."""
    carry = torch.addcmul if transition.shape[-1] == 1 else torch.baddbmm
    return carry(increment, transition, state)


def context_parallel_convolution(
    x_TC: Tensor,
    weight_CW: Tensor,
    cu_seqlens: Tensor,
    *,
    group: ProcessGroup,
    layout: Layout = "contiguous",
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, None]:
    """`short_convolution` over this rank's tokens, in the layout of `split_sequence`: `[T/n, C]` -> (`[T/n, C]`, None).

    Forward: an all-gather of the last min(W - 1, L) tokens of each slice; backward: a reduce-scatter of gradients.

    Raises:
        ValueError: As `short_convolution`, or the tokens do not divide into slices.
    """
    slices, reach = Slices(cu_seqlens, len(x_TC), group, layout), weight_CW.shape[1] - 1
    parts = x_TC.unflatten(0, (-1, slices.size))
    tails = parts[:, max(slices.size - reach, 0) :]
    gathered = gather_from_sequence_parallel(tails.flatten(0, 1), group).unflatten(0, (len(slices.order), -1))
    earlier = F.pad(torch.cat(slices.in_order(gathered)), (0, 0, reach, 0))
    windows = [earlier[number * tails.shape[1] :][:reach] for number in slices.numbers]
    x = torch.cat([torch.stack(windows), parts], 1)
    bounds = slices.boundaries(before=reach)
    out, _ = short_convolution(x.flatten(0, 1), weight_CW, bounds, bias=bias, activation=activation)
    return out.unflatten(0, (len(parts), -1))[:, reach:].flatten(0, 1), None
