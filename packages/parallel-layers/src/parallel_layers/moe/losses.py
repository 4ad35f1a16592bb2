"""Auxiliary losses of a router, as pure functions of its scores and choices, and the update that needs no loss.

Each averages over tokens, so under a group whose ranks hold different tokens its sums are reduced over the group:
forward all-reduce, backward identity. Every rank then has the loss of all tokens, and its gradient is that of its own
tokens, complete. Padding never counts: it is masked out of every sum and every divisor.

Given the sums of a batch of which these tokens are a part (`BatchTotals`), a loss is this part's share of the batch's:
the choices of experts are constants, so each loss is linear in what a token adds to it. Shares add up, values and
gradients, over micro-batches, data- and context-parallel ranks, whichever way the batch was divided.

Shape suffixes: T tokens of this rank, E experts, k experts a token goes to, S sequences.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import reduce_from_tensor_parallel


def expert_load(experts_Tk: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """How many of this rank's tokens chose each expert: `[E]` fp32, without a host synchronisation."""
    ones = torch.ones(experts_Tk.shape, dtype=torch.float32, device=experts_Tk.device)
    if mask_T is not None:
        ones = ones * mask_T[:, None]
    load = torch.zeros(num_experts, dtype=torch.float32, device=experts_Tk.device)
    return load.scatter_add(0, experts_Tk.flatten(), ones.flatten())


def _count(like_TE: Tensor, mask_T: Tensor | None, group: ProcessGroup | None, num_tokens: Tensor | None) -> Tensor:
    """The number of tokens that count on all ranks, at least 1; `num_tokens` where it is known."""
    if num_tokens is not None:
        return num_tokens.to(like_TE.dtype).clamp(min=1)
    mine = like_TE.new_tensor(float(len(like_TE))) if mask_T is None else mask_T.sum().to(like_TE.dtype)
    return reduce_from_tensor_parallel(mine, group).clamp(min=1)


def _masked_sum(x_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    return (x_TE if mask_T is None else x_TE * mask_T[:, None]).sum(0)


def load_balancing_loss(
    probs_TE: Tensor,
    experts_Tk: Tensor,
    *,
    mask_T: Tensor | None = None,
    group: ProcessGroup | None = None,
    load_E: Tensor | None = None,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """E Σ_e f_e P_e: f_e how many of its k choices a token spends on e, P_e its mean probability of e.

    Equations 4 to 6 of Switch Transformers, https://arxiv.org/abs/2101.03961, for k choices as in transformers'
    `load_balancing_loss_func`: perfectly balanced routing gives k. The loss of small parts asks for balance within each
    of them; with `load_E` of a large batch experts may specialise within it ("Demons in the Detail",
    https://arxiv.org/abs/2501.11873).

    Args:
        probs_TE: Scores that sum to one over the experts.
        experts_Tk: The chosen experts.
        mask_T: True for tokens that count; None: all.
        group: Ranks that hold the other tokens.
        load_E: Of the batch of which these tokens are a part, the tokens that chose each expert; None: of these tokens.
        num_tokens: 0-dim, of that batch; None: of these tokens.

    Returns:
        0-dim, differentiable in `probs_TE`.
    """
    num_experts = probs_TE.shape[1]
    count = _count(probs_TE, mask_T, group, num_tokens)
    load = load_E
    if load is None:
        load = reduce_from_tensor_parallel(expert_load(experts_Tk, num_experts, mask_T), group)
    mass = reduce_from_tensor_parallel(_masked_sum(probs_TE, mask_T), group)
    return num_experts * (load / count * (mass / count)).sum()


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
    """Mean over sequences of Σ_e f_e P_e with f_e = E / (k L) · choices of e: balanced routing of a sequence gives 1.

    Equations 17 to 20 of DeepSeek-V3, https://arxiv.org/abs/2412.19437.

    Args:
        probs_TE: Scores that sum to one over the experts.
        experts_Tk: The chosen experts.
        segments_T: Which sequence each token belongs to, -1 for padding.
        num_segments: S; sequences without a token do not count.
        group: Ranks that hold the other tokens (a sequence may lie on several).
        context_group: Ranks that hold further tokens of the same sequences; the result is this rank's share. One
            all-reduce `[S, E]`.
        num_sequences: 0-dim, sequences with a token in the batch of which these are a part; None: in these.

    Returns:
        0-dim, differentiable in `probs_TE`.
    """
    num_experts, top_k = probs_TE.shape[1], experts_Tk.shape[1]
    # Padding goes to a row of its own, which is dropped.
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
    logits_TE: Tensor,
    *,
    mask_T: Tensor | None = None,
    group: ProcessGroup | None = None,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """Mean over tokens of logsumexp(logits)², ST-MoE, https://arxiv.org/abs/2202.08906: keeps logits small.

    Args:
        logits_TE: The router's logits.
        mask_T: True for tokens that count; None: all.
        group: Ranks that hold the other tokens.
        num_tokens: 0-dim, of the batch of which these are a part; None: of these.

    Returns:
        0-dim, differentiable in `logits_TE`.
    """
    squares = torch.logsumexp(logits_TE, dim=-1, keepdim=True).square()
    total = reduce_from_tensor_parallel(_masked_sum(squares, mask_T), group)[0]
    return total / _count(logits_TE, mask_T, group, num_tokens)


@torch.no_grad()
def update_correction_bias_(bias_E: Tensor, load_E: Tensor, rate: float = 1e-3) -> None:
    """Raise the bias of experts with less than the mean load by `rate`, lower that of the others, in place.

    Balances without a loss, https://arxiv.org/abs/2408.15664. Call it once an optimizer step.

    Args:
        bias_E: A router's `e_score_correction_bias`.
        load_E: Tokens that chose each expert since the last update, summed over every rank that holds other tokens.
        rate: The step.

    Raises:
        ValueError: The two shapes differ.
    """
    if bias_E.shape != load_E.shape:
        raise ValueError(f"bias of shape {list(bias_E.shape)} and load of shape {list(load_E.shape)} must agree")
    bias_E += rate * torch.sign(load_E.mean() - load_E).to(bias_E)


class _Attach(torch.autograd.Function):
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
    """`x`, whose backward also adds the gradient of `scale * loss`.

    The loss needs no way to the end of the model: it works across pipeline stages and recomputation, and only when x
    itself takes part in a backward.
    """
    result: Tensor = _Attach.apply(x, loss, scale)
    return result
