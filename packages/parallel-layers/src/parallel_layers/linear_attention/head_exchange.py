"""The gated delta rule and Mamba-2 over a context-parallel group by an exchange of tokens for heads, as Ulysses does.

Also the choice between this form and the states of `context_parallel.py`, which the layers make.

Shape legend: T tokens of the whole pack, n ranks, N sequences, K key heads or groups, V value heads, D key size, E
value size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.context_parallel.sequence_layout import layout_of
from parallel_layers.attention.context_parallel.ulysses import HeadExchange
from parallel_layers.distributed.async_collectives import is_sharded
from parallel_layers.linear_attention.context_parallel import (
    context_parallel_convolution,
    context_parallel_delta_rule,
    context_parallel_state_space,
)
from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.delta_rule import check_arguments, gated_delta_rule
from parallel_layers.linear_attention.state_space import check_state_space, state_space_dual
from parallel_layers.model.options import ContextParallel

Operator = Callable[..., tuple[Tensor, Tensor | None]]


def operators_over(
    group: ProcessGroup | None, form: ContextParallel, recurrence: Operator, **options: Any
) -> tuple[Operator, Operator]:
    """Return `short_convolution` and `recurrence` with `options`, or their forms over a context-parallel group.

    "heads" exchanges tokens for heads around the recurrence. "ulysses" and "ring" hand states over in the layout of
    attention. The convolution reads the last tokens of the slice before.
    """
    if not is_sharded(group):
        return short_convolution, partial(recurrence, **options)
    layout = layout_of(form)
    convolve = partial(context_parallel_convolution, group=group, layout=layout)
    if form == "heads":
        return convolve, partial(_EXCHANGED[recurrence], group=group, **options)
    return convolve, partial(_HANDED_OVER[recurrence], group=group, layout=layout, **options)


def ulysses_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    log_decay: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor,
    *,
    group: ProcessGroup,
    **options: Any,
) -> tuple[Tensor, None]:
    """`gated_delta_rule` over tokens in the contiguous layout of `split_sequence`: each rank has some heads of all.

    Any number of heads is legal; see `exchange_heads`. Forward: an all-to-all of q, k and v, one of the decays and
    beta, which are wider, and one of the outputs. Backward: the same in reverse.

    Args:
        q_TKD, k_TKD, v_TVE, log_decay, beta_TV: This rank's tokens, as in `gated_delta_rule`.
        cu_seqlens: `[N+1]` int32 boundaries in the whole pack, the same on all ranks.
        group: The ranks that divide the tokens.
        **options: `scale`, `normalize` and `backend` of `gated_delta_rule`.

    Returns:
        The outputs `[T/n, V, E]`, and None in place of states.

    Raises:
        ValueError: As `gated_delta_rule`; shapes are checked before the exchange.
    """
    check_arguments(q_TKD, k_TKD, v_TVE, log_decay, beta_TV, None, len(cu_seqlens) - 1)
    exchange = HeadExchange(v_TVE.shape[1], k_TKD.shape[1], group)
    (v,), (q, k) = exchange.to_heads([v_TVE], [q_TKD, k_TKD])
    (log_decay, beta), _ = exchange.to_heads([log_decay, beta_TV.to(log_decay.dtype)], [])
    out, _ = gated_delta_rule(q, k, v, log_decay, beta, cu_seqlens, **options)
    return exchange.to_tokens(out), None


def ulysses_state_space(
    x_TVE: Tensor,
    dt_TV: Tensor,
    A_V: Tensor,
    B_TGD: Tensor,
    C_TGD: Tensor,
    cu_seqlens: Tensor,
    *,
    group: ProcessGroup,
    D_V: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`state_space_dual` over tokens in the contiguous layout of `split_sequence`; see `ulysses_delta_rule`.

    Forward: an all-to-all of x, B and C, one of dt, which is wider, and one of the outputs. Backward: the same in
    reverse. Sum the gradients of A and D over the group: they are 0 for the other ranks' heads.

    Args:
        x_TVE, dt_TV, A_V, B_TGD, C_TGD, D_V: This rank's tokens, and A and D of all, as in `state_space_dual`.
        cu_seqlens: `[N+1]` int32 boundaries in the whole pack, the same on all ranks.
        group: The ranks that divide the tokens.
        **options: `backend` of `state_space_dual`.

    Returns:
        The outputs `[T/n, V, E]`, and None in place of states.

    Raises:
        ValueError: As `state_space_dual`; shapes are checked before the exchange.
    """
    check_state_space(x_TVE, dt_TV, A_V, B_TGD, C_TGD, D_V, None, len(cu_seqlens) - 1)
    exchange = HeadExchange(x_TVE.shape[1], B_TGD.shape[1], group)
    (x,), (b, c) = exchange.to_heads([x_TVE], [B_TGD, C_TGD])
    (dt,), _ = exchange.to_heads([dt_TV], [])
    skips = None if D_V is None else exchange.heads_of_rank(D_V)
    out, _ = state_space_dual(x, dt, exchange.heads_of_rank(A_V), b, c, cu_seqlens, D_V=skips, **options)
    return exchange.to_tokens(out), None


_EXCHANGED: dict[Operator, Operator] = {gated_delta_rule: ulysses_delta_rule, state_space_dual: ulysses_state_space}
_HANDED_OVER: dict[Operator, Operator] = {
    gated_delta_rule: context_parallel_delta_rule,
    state_space_dual: context_parallel_state_space,
}
