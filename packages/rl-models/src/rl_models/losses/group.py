"""Advantages without a critic, from the scores of several responses to one prompt or from returns.

N sequences, T tokens. Equal numbers in `groups` `[N]` mark responses to the same prompt, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_models.losses.advantages import gae
from rl_models.losses.terms import require_tensors


def _by_group(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of each sequence's group, the sizes of the groups, and the scores above the smallest, in fp64.

    No advantage depends on the smallest score of a group. Without it equal scores have a mean without rounding.
    """
    require_tensors(scores=scores, groups=groups)
    if scores.dim() != 1 or groups.shape != scores.shape:
        raise ValueError(f"scores and groups must both be [N], got {list(scores.shape)} and {list(groups.shape)}")
    _, number = torch.unique(groups, return_inverse=True)
    sizes, scores = torch.bincount(number), scores.detach().double()
    smallest = scores.new_full(sizes.shape, torch.inf).scatter_reduce(0, number, scores, "amin")
    return number, sizes, scores - smallest[number]


def grpo_advantages(scores: Tensor, groups: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Compute group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

        A_i = (score_i - mean of its group) / (standard deviation of its group + eps)

    The deviation is the unbiased one. A group of one response, or of equal scores, has advantage 0.

    Args:
        scores, groups: `[N]`.
        scale: Divide by the deviation. False: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
        eps: Added to the deviation.

    Returns:
        `[N]` fp32 without gradient; `advantages[batch.sequence_ids]` is per token.
    """
    number, sizes, scores = _by_group(scores, groups)
    sums = torch.zeros(len(sizes), dtype=scores.dtype, device=scores.device)
    centred = scores - (sums.index_add(0, number, scores) / sizes)[number]
    if scale:
        variance = sums.index_add(0, number, centred.square()) / (sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[number] + eps)
    return centred.float()


def rloo_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """Compute leave-one-out advantages (RLOO, Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, equation 10).

        A_i = score_i - mean of the other scores of its group

    Scores and groups are `[N]`; the result is as for `grpo_advantages`.

    Raises:
        ValueError: A group has only one response.
    """
    number, sizes, scores = _by_group(scores, groups)
    if alone := torch.nonzero(sizes[number] < 2).flatten().tolist():
        raise ValueError(f"sequences {alone[:5]} are the only ones of their groups; generate with n >= 2")
    sums = torch.zeros(len(sizes), dtype=scores.dtype, device=scores.device).index_add(0, number, scores)
    return (scores - (sums[number] - scores) / (sizes[number] - 1)).float()


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Sequence[int], *, gamma: float = 1.0) -> Tensor:
    """Sum the reward of each action and the discounted later rewards: R_t = r_t + gamma R_{t+1}.

    REINFORCE++ (Hu 2025, arXiv:2501.03262) is `whiten(discounted_returns(rewards, ...), mask, group=dp)` with rewards
    from `token_rewards(scores, ..., penalty=kl_penalty(..., "k1"))`, in the clipped surrogate of PPO.

    For the arguments see `gae`. The result is `[T]` fp32 without gradient, zero outside the mask.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, lengths, gamma=gamma, lam=1.0).returns


def overlong_penalty(response_lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Compute the overlong penalty of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13).

        0                                        for length <= max_length - buffer
        (max_length - buffer - length) / buffer  inside the buffer, down to -1
        -1                                       beyond max_length

    The penalty grows in the `buffer` tokens before `max_length`. It is `[N]` fp32, to add to the scores.

    Raises:
        ValueError: The buffer is not in (0, max_length].
    """
    require_tensors(response_lengths=response_lengths)
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be above 0 and at most max_length={max_length}")
    return ((max_length - buffer - response_lengths.float()) / buffer).clamp(-1, 0)
