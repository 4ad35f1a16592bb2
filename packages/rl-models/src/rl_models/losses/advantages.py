"""Rewards, advantages and returns of packed sequences.

Tensors are `[T]`, the sequences one after another with the given `lengths`. `mask` marks the tokens that the policy
chose (its actions). Other tokens (the prompt, a tool's answer between two turns) take no time: the state after an
action is the state before the next action of the same sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_models.batch.rows import sequence_ids
from rl_models.losses.terms import require_tensors, same_shape


class Advantages(NamedTuple):
    """Advantages and returns, both `[T]`; zero outside the mask."""

    advantages: Tensor
    returns: Tensor


def _action_grid(mask: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the row (its sequence) and the column (its number in the sequence) of every masked token, in order."""
    sequence = sequence_ids(lengths, mask)[mask]
    actions = torch.bincount(sequence, minlength=len(lengths))
    start = actions.cumsum(0) - actions
    return sequence, torch.arange(len(sequence), device=mask.device) - start[sequence]


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Sequence[int], *, gamma: float = 1.0, lam: float = 0.95
) -> Advantages:
    """Estimate advantages by GAE (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    For the actions t = 1 .. n of one sequence, with V_{n+1} = 0 (the episode ends with its last action):

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1},        R_t = A_t + V_t

    Args:
        rewards: `[T]`, received for each token.
        values: `[T]`, the value of the state before each token (`Critic.values`).
        mask, lengths: The actions, `[T]` bool, and the lengths of the sequences.
        gamma: The discount of a step.
        lam: The weight of longer returns (1: Monte Carlo, 0: one step).

    Returns:
        Advantages and returns `[T]` fp32 without gradient, zero outside the mask.

    Raises:
        ValueError: The shapes or lengths disagree, or gamma or lam is outside [0, 1].
    """
    same_shape(rewards=rewards, values=values, mask=mask)
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma={gamma} and lam={lam} must lie in [0, 1]")
    rewards, values, mask = rewards.detach().float(), values.detach().float(), mask.bool()
    row, column = _action_grid(mask, lengths)
    steps = int(column.max()) + 1 if len(column) else 0
    # Rows are sequences. The last column holds the zero value and advantage after the end of the longest one.
    reward_NL = rewards.new_zeros(len(lengths), steps)
    value_NL = rewards.new_zeros(len(lengths), steps + 1)
    reward_NL[row, column], value_NL[row, column] = rewards[mask], values[mask]
    delta_NL = reward_NL + gamma * value_NL[:, 1:] - value_NL[:, :-1]
    advantage_NL = torch.zeros_like(value_NL)
    for t in range(steps - 1, -1, -1):
        advantage_NL[:, t] = delta_NL[:, t] + gamma * lam * advantage_NL[:, t + 1]
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    advantages[mask] = advantage_NL[row, column]
    returns[mask] = advantages[mask] + values[mask]
    return Advantages(advantages, returns)


def token_rewards(
    scores: Tensor, mask: Tensor, lengths: Sequence[int], *, penalty: Tensor | None = None, coefficient: float = 0.0
) -> Tensor:
    """Give the score of each sequence to its last action, and subtract a penalty at every action.

    r_t = score [t is the last action] - coefficient * penalty_t   (Ouyang et al. 2022, arXiv:2203.02155, eq. 2)

    Args:
        scores: `[N]`.
        mask, lengths: The actions, `[T]` bool, and the lengths of the sequences.
        penalty: `[T]`, usually `kl_penalty(log_probs, reference_log_probs, "k1")`.
        coefficient: The factor of the penalty.

    Returns:
        `[T]` fp32 without gradient, zero outside the mask.

    Raises:
        ValueError: The shapes disagree, or a sequence has no action to receive its score.
    """
    require_tensors(scores=scores, mask=mask)
    if scores.shape != (len(lengths),):
        raise ValueError(f"scores must be [{len(lengths)}], one for each sequence, got {list(scores.shape)}")
    mask = mask.bool()
    row, column = _action_grid(mask, lengths)
    actions = torch.bincount(row, minlength=len(lengths))
    if empty := torch.nonzero(actions == 0).flatten().tolist():
        raise ValueError(f"sequences {empty} have a score and no action; put at least one token of each into the mask")
    rewards = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    if penalty is not None:
        same_shape(mask=mask, penalty=penalty)
        rewards[mask] = -coefficient * penalty.detach().float()[mask]
    last_actions = torch.nonzero(mask).flatten()[column == actions[row] - 1]
    rewards[last_actions] += scores.detach().to(rewards)
    return rewards


def whiten(values: Tensor, mask: Tensor, *, group: ProcessGroup | None = None, eps: float = 1e-8) -> Tensor:
    """Normalise values to mean 0 and variance 1 over the masked tokens of all ranks of `group`.

    The statistics cover the whole data-parallel batch. The variance is the biased one; it sums squares around the mean,
    so that a large mean costs no precision. Communication: two all-reduces, of two fp64 numbers and of one.

    Args:
        values: `[T]`.
        mask: `[T]` bool, the tokens to normalise.
        group: The data-parallel group. None: this rank's tokens alone.
        eps: Added to the variance.

    Returns:
        `[T]` fp32 without gradient, zero outside the mask.
    """
    same_shape(values=values, mask=mask)
    mask = mask.bool()
    chosen = values.detach().double()[mask]
    total = torch.stack([chosen.sum(), chosen.new_tensor(float(len(chosen)))])
    if group is not None:
        dist.all_reduce(total, group=group)
    mean = total[0] / total[1].clamp(min=1)
    square = (chosen - mean).square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    deviation = (square / total[1].clamp(min=1) + eps).sqrt()
    white = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    white[mask] = (chosen - mean) / deviation
    return white.float()
