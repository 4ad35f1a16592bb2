"""Auxiliary losses of a router as pure functions.

Losses average over tokens. If the ranks of a `group` hold different tokens, sums are reduced over the group: forward
all-reduce, backward identity. Every rank then has the loss of all tokens and the complete gradient of its tokens.
Padding, where `mask_T` is False, is left out of every sum and divisor.

With the sums of the whole batch (`BatchTotals`), a loss is the share of the given tokens. Shares and their gradients
add up over micro-batches and over data- and context-parallel ranks.

Shape suffixes: T tokens of this rank, E experts, k experts per token, S sequences.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import reduce_from_tensor_parallel


def expert_load(experts_Tk: Tensor, num_experts: int, mask_T: Tensor) -> Tensor:
    """Count this rank's tokens per expert: `[E]` fp32, without host synchronisation."""
    counts = mask_T.float()[:, None].expand_as(experts_Tk)
    load = torch.zeros(num_experts, dtype=torch.float32, device=experts_Tk.device)
    return load.scatter_add(0, experts_Tk.flatten(), counts.flatten())


def _count(mask_T: Tensor, group: ProcessGroup | None, num_tokens: Tensor | None) -> Tensor:
    """Return the number of tokens on all ranks, at least 1; `num_tokens` if given."""
    if num_tokens is None:
        num_tokens = reduce_from_tensor_parallel(mask_T.sum().float(), group)
    return num_tokens.clamp(min=1)


def load_balancing_loss(
    probs_TE: Tensor,
    experts_Tk: Tensor,
    mask_T: Tensor,
    *,
    group: ProcessGroup | None = None,
    load_E: Tensor | None = None,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """Return E Σ_e f_e P_e, 0-dim, with f_e the choices of expert e per token and P_e its mean probability.

    Equations 4 to 6 of Switch Transformers, https://arxiv.org/abs/2101.03961, for k choices as in transformers'
    `load_balancing_loss_func`: perfectly balanced routing gives k. `probs_TE` are scores that sum to one over the
    experts. `load_E` are the tokens per expert and `num_tokens` (0-dim) the tokens of the whole batch; None: of these
    tokens. With loads of a large batch, experts can specialise within the batch ("Demons in the Detail",
    https://arxiv.org/abs/2501.11873).
    """
    num_experts = probs_TE.shape[1]
    count = _count(mask_T, group, num_tokens)
    if load_E is None:
        load_E = reduce_from_tensor_parallel(expert_load(experts_Tk, num_experts, mask_T), group)
    mass_E = reduce_from_tensor_parallel((probs_TE * mask_T[:, None]).sum(0), group)
    return num_experts * (load_E / count * (mass_E / count)).sum()


def sequence_balance_loss(
    probs_TE: Tensor,
    experts_Tk: Tensor,
    segments_T: Tensor,
    num_segments: int,
    *,
    group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
    num_sequences: Tensor | None = None,
) -> Tensor:
    """Return the mean over sequences of Σ_e f_e P_e, 0-dim, with f_e = E / (k L) · choices of e.

    Equations 17 to 20 of DeepSeek-V3, https://arxiv.org/abs/2412.19437; balanced routing gives 1. `segments_T` is the
    sequence of each token, -1 for padding. Sequences can lie on several ranks of `group`. Empty sequences are left out;
    `num_sequences` (0-dim) counts the sequences of the whole batch that are not empty; None: of these tokens. With a
    `context_group`, whose ranks hold further tokens of the same sequences, the result is this rank's share, and there
    is one more all-reduce `[S, E]`.
    """
    num_experts, top_k = probs_TE.shape[1], experts_Tk.shape[1]
    # Padding goes to an extra row, which is dropped.
    row = torch.where(segments_T < 0, num_segments, segments_T).long()
    chosen = torch.zeros_like(probs_TE).scatter(1, experts_Tk, 1.0)
    shape = (num_segments + 1, num_experts)

    def per_sequence(x_TE: Tensor) -> Tensor:
        return reduce_from_tensor_parallel(x_TE.new_zeros(shape).index_add(0, row, x_TE), group)[:num_segments]

    load_SE, mass_SE = reduce_from_tensor_parallel(per_sequence(chosen), context_group), per_sequence(probs_TE)
    length_S = load_SE.sum(1) / top_k
    square_S = length_S.clamp(min=1).square()
    loss_S = num_experts / top_k * (load_SE * mass_SE).sum(1) / square_S
    count = (length_S > 0).sum() if num_sequences is None else num_sequences
    return loss_S.sum() / count.clamp(min=1)


def router_z_loss(
    logits_TE: Tensor, mask_T: Tensor, *, group: ProcessGroup | None = None, num_tokens: Tensor | None = None
) -> Tensor:
    """Return the mean over tokens of logsumexp(logits)², which keeps logits small. https://arxiv.org/abs/2202.08906

    `group` and `num_tokens` as in `load_balancing_loss`.
    """
    squares_T = torch.logsumexp(logits_TE, dim=-1).square()
    return reduce_from_tensor_parallel((squares_T * mask_T).sum(), group) / _count(mask_T, group, num_tokens)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.full_like(loss, ctx.scale), None


def attach_loss(x: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Return `x`; the backward also adds the gradient of `scale * loss`.

    This works across pipeline stages and recomputation. The gradient is added only if x takes part in a backward.
    """
    result: Tensor = _AttachLoss.apply(x, loss, scale)
    return result
