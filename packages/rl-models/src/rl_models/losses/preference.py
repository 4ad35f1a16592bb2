"""Losses of preferences: DPO, SimPO and KTO for policies, Bradley-Terry for reward models.

KTO takes single sequences, the others take pairs of a preferred and a rejected sequence. Two sequences of a batch with
one number in the field `pair` are a pair; the first of them is the preferred one, as `Batch.from_pairs` places them.
`update` keeps the two in one micro-batch. All tokens of a pair have its loss, so `aggregation="sequence-mean"` gives
the mean over pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_models.batch.rows import sequence_ids
from rl_models.losses.terms import LossTerms, same_shape


def dpo(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    pair: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid",
) -> LossTerms:
    """Compute the loss of DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7), for each token of a pair.

    With r = beta * (sum over the response of log_probs_t - reference_log_probs_t), the implicit reward of a response,

        term = -(1 - e) log sigmoid(r_chosen - r_rejected) - e log sigmoid(r_rejected - r_chosen)

    where e is the share of labels that are wrong (cDPO, Mitchell 2023, https://ericmitchell.ai/cdpo.pdf). With
    `loss_type="ipo"` r takes the mean over the response, and (IPO, Azar et al. 2023, arXiv:2310.12036, equation 17)

        term = ((r_chosen - r_rejected) / beta - 1 / (2 beta))^2

    Take `aggregation="sequence-mean"` for the mean over pairs.

    Args:
        log_probs: `[T]` under the policy that learns; receives the gradient.
        reference_log_probs: `[T]` under the policy that learning started from.
        pair: `[T]`, the number of each token's pair (`Batch.from_pairs`).
        mask, lengths: The tokens of the responses, `[T]` bool, and the lengths of the sequences.
        beta: The strength of the KL constraint; a larger beta keeps the policy closer to the reference.
        label_smoothing: e, in [0, 0.5); 0 for "ipo".
        loss_type: "sigmoid" or "ipo".

    Metrics: `chosen_reward` and `rejected_reward`, the implicit rewards; `reward_margin`, their difference; and
    `reward_accuracy`, the share of pairs whose chosen response has the larger one.

    Raises:
        ValueError: The shapes differ, beta or the smoothing is out of its range, or a pair does not have two sequences
            with tokens in the mask.
    """
    same_shape(log_probs=log_probs, reference_log_probs=reference_log_probs, pair=pair, mask=mask)
    if not beta > 0:
        raise ValueError(f"beta={beta} must be positive")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 0.5); it is the share of wrong labels")
    if loss_type not in ("sigmoid", "ipo") or (loss_type == "ipo" and label_smoothing):
        raise ValueError(f"{loss_type=} must be 'sigmoid', or 'ipo' without label_smoothing, got {label_smoothing=}")
    rewards = beta * (log_probs - reference_log_probs.detach())
    if loss_type == "ipo":
        rewards = rewards / _counts(mask, lengths)
        return _preferred(rewards, pair, mask, lengths, lambda margin_P: ((margin_P - 0.5) / beta).square())

    def smoothed(margin_P: Tensor) -> Tensor:
        return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)

    return _preferred(rewards, pair, mask, lengths, smoothed)


def simpo(
    log_probs: Tensor,
    pair: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    beta: float = 2.0,
    margin: float = 1.0,
) -> LossTerms:
    """Compute the loss of SimPO (Meng et al. 2024, arXiv:2405.14734), for each token of a pair.

    With r = beta * (mean over the response of log_probs_t), a reward without a reference policy,

        term = -log sigmoid(r_chosen - r_rejected - margin)

    Args:
        log_probs: `[T]` under the policy that learns; receives the gradient.
        pair, mask, lengths: As for `dpo`.
        beta: The factor of the rewards.
        margin: The difference of rewards that is learned (gamma in the paper).

    Metrics: as for `dpo`, of these rewards.

    Raises:
        ValueError: As for `dpo`; the margin is negative.
    """
    same_shape(log_probs=log_probs, pair=pair, mask=mask)
    if not (beta > 0 and margin >= 0):
        raise ValueError(f"beta={beta} must be positive, and margin={margin} must not be negative")
    rewards = beta * log_probs / _counts(mask, lengths)
    return _preferred(rewards, pair, mask, lengths, lambda margin_P: -logsigmoid(margin_P - margin))


def kto(
    log_probs: Tensor,
    reference_log_probs: Tensor,
    desirable: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    kl: float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossTerms:
    """Compute the loss of KTO (Ethayarajh et al. 2024, arXiv:2402.01306), for each token of a sequence.

    With l = sum over the response of log_probs_t - reference_log_probs_t,

        term = desirable_weight (1 - sigmoid(beta (l - kl)))        of a desirable response
        term = undesirable_weight (1 - sigmoid(beta (kl - l)))      of an undesirable response

    All tokens of a sequence have its loss, so `aggregation="sequence-mean"` gives the mean over sequences.

    Args:
        log_probs, reference_log_probs, mask, lengths, beta: As for `dpo`.
        desirable: `[T]`, 1 for the tokens of desirable responses, 0 for others; its first token counts.
        kl: The reference point, an estimate of KL(policy || reference) over the whole batch (section 4.1): the mean of
            l over responses behind prompts of other sequences (`rl_models.batch.OtherPrompts`), at least 0. It gets no
            gradient. 0 leaves the reference point out.
        desirable_weight, undesirable_weight: The weights of the two kinds, such as the inverse of their frequencies.

    Metrics: `reward`, beta l; `desirable`, the share of desirable responses.

    Raises:
        ValueError: The shapes or lengths disagree, a sequence has no tokens, or kl, beta or a weight is out of its
            range.
    """
    same_shape(log_probs=log_probs, reference_log_probs=reference_log_probs, desirable=desirable, mask=mask)
    if not (beta > 0 and kl >= 0 and desirable_weight >= 0 and undesirable_weight >= 0):
        raise ValueError(f"{beta=} must be positive; {kl=}, {desirable_weight=}, {undesirable_weight=} not negative")
    sequence, is_desirable = sequence_ids(lengths, mask), desirable[_starts(lengths)].bool()
    log_ratios = torch.where(mask.bool(), log_probs - reference_log_probs.detach(), 0)
    reward_N = beta * log_ratios.new_zeros(len(lengths)).index_add(0, sequence, log_ratios)
    sign_N = torch.where(is_desirable, 1.0, -1.0).to(reward_N)
    weight_N = torch.full_like(reward_N, undesirable_weight).masked_fill(is_desirable, desirable_weight)
    loss_N = weight_N * (sign_N * (beta * kl - reward_N)).sigmoid()
    metrics = {"reward": reward_N.detach()[sequence], "desirable": is_desirable.to(reward_N)[sequence]}
    return LossTerms(loss_N[sequence], metrics)


def bradley_terry(values: Tensor, pair: Tensor, mask: Tensor, lengths: Sequence[int]) -> LossTerms:
    """Compute the pairwise loss of a reward model (Ouyang et al. 2022, arXiv:2203.02155, equation 1), per token.

    With the rewards r of the two sequences, the values after their last tokens (Bradley and Terry 1952):

        term = -log sigmoid(r_chosen - r_rejected)

    Args:
        values: `[T]` of a `Critic` on `batch.with_ends()`; receives the gradient.
        pair: `[T]`, the number of each token's pair (`Batch.from_pairs`).
        mask, lengths: The added token of each sequence, `[T]` bool, and the lengths of the sequences.

    Metrics: as for `dpo`, of the rewards.

    Raises:
        ValueError: The shapes differ, a sequence does not have one token in the mask, or a pair not two sequences.
    """
    same_shape(values=values, pair=pair, mask=mask)
    count = torch.bincount(sequence_ids(lengths, mask)[mask.bool()], minlength=len(lengths))
    if bool((count != 1).any()):
        raise ValueError(
            f"the sequences have {count.tolist()} tokens in the mask; a reward stands at one token of each: pass "
            "batch.with_ends() to update"
        )
    return _preferred(values, pair, mask, lengths, lambda margin_P: -logsigmoid(margin_P))


def _counts(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the number of masked tokens of each token's sequence, at least 1, `[T]`."""
    sequence = sequence_ids(lengths, mask)
    return torch.bincount(sequence[mask.bool()], minlength=len(lengths)).clamp(min=1)[sequence]


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return the places of the first tokens of sequences; none may be empty."""
    if 0 in lengths:
        raise ValueError(f"a sequence has no tokens, and a preference needs some: the lengths are {list(lengths)}")
    return [0, *accumulate(lengths)][:-1]


def _preferred(
    rewards: Tensor,
    pair: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    loss: Callable[[Tensor], Tensor],
) -> LossTerms:
    """Return each token's `loss(r_chosen - r_rejected)` of its pair; r is the sum of `rewards` `[T]` over the mask."""
    sequence, mask = sequence_ids(lengths, mask), mask.bool()
    masked = torch.stack([torch.where(mask, rewards, 0), mask.to(rewards)])
    reward_N, count_N = masked.new_zeros(2, len(lengths)).index_add(1, sequence, masked)
    numbers, number_N, size_P = torch.unique(pair[_starts(lengths)], return_inverse=True, return_counts=True)
    alone = (size_P != 2).index_fill(0, number_N[count_N == 0], True)
    if bool(alone.any()):
        raise ValueError(
            f"pairs {numbers[alone].tolist()[:8]} do not have two sequences with tokens in the mask; make the batch "
            "with Batch.from_pairs, and select both sequences of a pair"
        )
    # Sorting keeps the order of the batch within a pair.
    chosen_P, rejected_P = reward_N[number_N.argsort(stable=True)].view(-1, 2).unbind(1)
    margin_P = chosen_P - rejected_P
    loss_P = loss(margin_P)
    metrics = {
        "chosen_reward": chosen_P,
        "rejected_reward": rejected_P,
        "reward_margin": margin_P,
        "reward_accuracy": (margin_P > 0).to(margin_P),
    }
    number_T = number_N[sequence]
    return LossTerms(loss_P[number_T], {name: values.detach()[number_T] for name, values in metrics.items()})
