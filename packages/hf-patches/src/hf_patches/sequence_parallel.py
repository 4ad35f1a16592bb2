"""Convolutions and recurrences over sequences whose tokens are divided over ranks.

A convolution reads the few tokens before this rank's first. A recurrence exchanges tokens for heads, as Ulysses
attention does (https://arxiv.org/abs/2309.14509): each rank runs some heads over all tokens.

Shapes: T tokens of the packed batch, n ranks, C channels, W taps, K key heads, V value heads, D key size, E value size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hf_patches.batch import BatchPlan
from parallel_layers.distributed import all_to_all, gather_from_sequence_parallel


def convolve_local(convolve: Callable[[Tensor, Tensor], Tensor], x_TC: Tensor, window: int, plan: BatchPlan) -> Tensor:
    """Convolve this rank's tokens behind the last tokens of the ranks before, `[T/n, C]` to `[T/n, C]`.

    Forward: one all-gather of at most W - 1 tokens of each rank. Backward: one reduce-scatter.

    Args:
        convolve: Function of tokens and their `cu_seqlens`.
        x_TC: This rank's tokens.
        window: W.
        plan: The boundaries of all T tokens.
    """
    if plan.group is None or window == 1:
        return convolve(x_TC, plan.cu_seqlens)
    size = min(window - 1, len(x_TC))
    tails = gather_from_sequence_parallel(x_TC[-size:].contiguous(), plan.group)
    earlier = tails[: size * plan.group.rank()][-(window - 1) :]
    joined = torch.cat([earlier, x_TC])
    bounds = (plan.cu_seqlens - (plan.local_tokens.start - len(earlier))).clamp(0, len(joined))
    return convolve(joined, bounds)[len(earlier) :]


def exchange_key_heads(
    recur: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay: Tensor,
    beta_TV: Tensor,
    *,
    group: ProcessGroup | None,
) -> Tensor:
    """Exchange tokens for key heads with their value heads, run `recur` over all tokens, and exchange back.

    Any number of heads is legal: heads of zeros are appended until n divides K. Forward: an all-to-all of q, k and v,
    one of the gates, and one of the output. Backward: the same in reverse.

    Args:
        recur: Function of the five tensors with all tokens and a share of the heads; returns `[T, V', E]`.
        q_TKD: `[T/n, K, D]`.
        k_TKD: `[T/n, K, D]`.
        v_TVE: `[T/n, V, E]`; K divides V.
        decay: `[T/n, V]` or `[T/n, V, D]`.
        beta_TV: `[T/n, V]`.
        group: The ranks that share the tokens; None: call `recur` directly.

    Returns:
        `[T/n, V, E]`.
    """
    tensors = (q_TKD, k_TKD, v_TVE, decay, beta_TV)
    if group is None:
        return recur(*tensors)
    heads, values = k_TKD.shape[1], v_TVE.shape[1]
    extra = -heads % group.size()
    by_head = [F.pad(x.unflatten(1, (heads, -1)).flatten(2), (0, 0, 0, extra)) for x in tensors]
    local: list[Tensor] = []
    for part in (by_head[:3], [x.to(decay.dtype) for x in by_head[3:]]):
        mixed = all_to_all(torch.cat(part, dim=-1), group, split_dim=1, concat_dim=0)
        local += mixed.split([x.shape[-1] for x in part], dim=-1)
    local = [x.unflatten(2, (-1, *tensor.shape[2:])).flatten(1, 2) for x, tensor in zip(local, tensors, strict=True)]
    output = all_to_all(recur(*local), group, split_dim=0, concat_dim=1)
    return output[:, :values]
