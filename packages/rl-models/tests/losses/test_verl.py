"""Losses and advantages are those of an installed verl, values and gradients; `.ci/upstream verl` runs this.

Differences that are meant: verl whitens by the unbiased variance, and gives a response that is alone in its group its
score as advantage, where ours is 0. Its k3 ends at 10. Its DRO has another constant, so only its gradients are
compared. Responses have tokens between their turns, which the policy has not drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_models import Batch
from rl_models.losses import (
    LossTerms,
    cispo,
    discounted_returns,
    dro,
    gae,
    grpo_advantages,
    gspo_clip,
    kl_penalty,
    ppo_clip,
    rloo_advantages,
    sapo,
    value_clip,
)
from rl_models.losses.aggregation import token_weights, total_weight

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed; `.ci/upstream verl` has it")

ROWS, TOKENS = 6, 9
# Our names of verl's means over tokens and sequences.
MEANS = {"token-mean": "token-mean", "seq-mean-token-mean": "sequence-mean", "seq-mean-token-sum": "sequence-sum"}


def masks() -> Tensor:
    """Return `[N, L]` masks with holes; the first token of a row is its prompt."""
    mask = torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 0], mask[:, 3] = False, True
    return mask


MASK = masks()
BATCH = Batch(torch.zeros(ROWS * TOKENS, dtype=torch.int64), [TOKENS] * ROWS, MASK.flatten())


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    """Return `[N, L]` normal numbers in fp64."""
    return scale * torch.randn(ROWS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mean_of(terms: Tensor, mean: str) -> Tensor:
    """Return our mean of terms `[T]` by verl's name of it."""
    weights = token_weights(BATCH, MEANS[mean], total_weight(BATCH.masked_counts.tolist(), MEANS[mean]))
    return (terms * weights).sum()


Loss = Callable[..., LossTerms]
POLICY_LOSSES: dict[str, tuple[str, Loss, dict[str, Any]]] = {
    "PPO with two clips": ("vanilla", partial(ppo_clip, clip_high=0.28, dual_clip=3.0), {"clip_ratio_high": 0.28}),
    "GSPO": (
        "gspo",
        lambda *values: gspo_clip(*values, BATCH.mask, BATCH.lengths, clip_low=0.05, clip_high=0.07),
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.07},
    ),
    "CISPO": ("cispo", partial(cispo, clip_low=0.3, clip_high=0.4), {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}),
    "SAPO": ("sapo", partial(sapo, temperature=1.2, negative_temperature=1.4), {"tau_pos": 1.2, "tau_neg": 1.4}),
    "DRO": ("dro", partial(dro, beta=0.3), {"dro_beta": 0.3}),
}


@pytest.mark.parametrize(
    ("name", "mean"),
    # verl's SAPO has one mean.
    [(name, mean) for name in POLICY_LOSSES for mean in MEANS if name != "SAPO" or mean == "seq-mean-token-mean"],
)
def test_policy_losses(name: str, mean: str) -> None:
    theirs, ours, options = POLICY_LOSSES[name]
    if beta := options.get("dro_beta"):
        options = {"policy_loss": config("PolicyLossConfig", dro_beta=beta)}
    actor = config("ActorConfig", strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    old, advantages = numbers(1), numbers(2)
    expected, actual = ((old + numbers(3)).requires_grad_() for _ in range(2))
    loss, _ = verl.get_policy_loss_fn(theirs)(old, expected, advantages, MASK.long(), mean, actor)
    loss.backward()
    terms = ours(actual.flatten(), old.flatten(), advantages.flatten()).loss
    mean_of(terms, mean).backward()
    if name != "DRO":
        torch.testing.assert_close(mean_of(terms, mean), loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-6, atol=1e-8)
    assert actual.grad is not None
    assert actual.grad[MASK].abs().sum() > 0


def config(name: str, **options: Any) -> Any:
    """Return an object of verl's configuration."""
    from verl.workers import config as configs

    return getattr(configs, name)(**options)


@pytest.mark.parametrize("mean", MEANS)
def test_the_loss_of_values(mean: str) -> None:
    old, returns = numbers(1), numbers(2)
    expected, actual = numbers(3).requires_grad_(), numbers(3).requires_grad_()
    loss, _ = verl.compute_value_loss(expected, returns, old, MASK.long(), 0.2, mean)
    loss.backward()
    terms = value_clip(actual.flatten(), old.flatten(), returns.flatten(), clip=0.2).loss
    ours = mean_of(terms, mean)
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("theirs", "ours"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_penalties(theirs: str, ours: str) -> None:
    expected, actual = numbers(1, 0.5).requires_grad_(), numbers(1, 0.5).requires_grad_()
    reference = numbers(2, 0.5)
    penalty = verl.kl_penalty(expected, reference, theirs)
    penalty.sum().backward()
    own = kl_penalty(actual.flatten(), reference.flatten(), ours)
    own.sum().backward()
    torch.testing.assert_close(own, penalty.flatten())
    torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_of_groups(scale: bool) -> None:
    scores, groups = numbers(1)[:, 0], [3, 1, 1, 3, 3, 1]
    rewards = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    rewards[:, -1] = scores
    index = torch.tensor(groups).numpy()
    expected, _ = verl.compute_grpo_outcome_advantage(rewards, MASK.long(), index, norm_adv_by_std_in_grpo=scale)
    ours = grpo_advantages(scores, torch.tensor(groups), scale=scale)
    torch.testing.assert_close(ours[:, None] * MASK, expected.float())
    expected, _ = verl.compute_rloo_outcome_advantage(rewards, MASK.long(), index)
    torch.testing.assert_close(rloo_advantages(scores, torch.tensor(groups))[:, None] * MASK, expected.float())


def test_returns_and_advantages_of_a_critic() -> None:
    rewards, values, gamma, lam = numbers(1) * MASK, numbers(2), 0.97, 0.9
    advantages, returns = verl.compute_gae_advantage_return(rewards, values, MASK.long(), gamma, lam)
    ours = gae(rewards.flatten(), values.flatten(), BATCH.mask, BATCH.lengths, gamma=gamma, lam=lam)
    torch.testing.assert_close(ours.returns.view_as(returns)[MASK], returns[MASK].float())
    raw = ours.advantages.view_as(returns)[MASK].double()
    torch.testing.assert_close((raw - raw.mean()) / raw.std(), advantages[MASK], rtol=1e-5, atol=1e-5)
    algorithm = type("Algorithm", (), {"gamma": gamma})()
    _, returns = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, MASK.long(), config=algorithm)
    ours_returns = discounted_returns(rewards.flatten(), BATCH.mask, BATCH.lengths, gamma=gamma)
    torch.testing.assert_close(ours_returns.view_as(returns), returns.float())
