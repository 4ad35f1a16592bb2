"""What each rank of the quickstart runs: PPO with an actor, a critic and a reference, all from the same files."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import ParallelDims
from rl_models import losses
from rl_models.batch import Batch
from rl_models.engines.optimizer import OptimizerOptions
from rl_models.workers.actor import Actor
from rl_models.workers.critic import Critic
from rl_train.cluster.launch import Devices
from rl_train.quickstart.task import RESPONSE_LENGTH, correct, make_prompts, show


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes:
        start: the checkpoint to start from.
        out: where the actor's and the critic's checkpoints go.
        tp: tensor-parallel ranks; sequence parallel when more than one.
        steps: of PPO: generate, estimate, learn.
        seed: of prompts and draws.
        device: as `rl_train.cluster.launch.Devices.find` takes it.
        prompts: a step; epochs: passes over each step's batch.
        kl_coefficient: of the penalty for leaving the reference.
        entropy_coefficient: of the entropy bonus.
    """

    start: Path
    out: Path
    tp: int
    steps: int
    seed: int
    device: str | None = None
    prompts: int = 64
    epochs: int = 2
    learning_rate: float = 1.5e-3
    kl_coefficient: float = 0.002
    entropy_coefficient: float = 0.02


def learn(send: Callable[[dict[str, Any]], None], settings: Settings) -> dict[str, Any]:
    """Load, learn, save; sends one event a step and returns what only the ranks know."""
    dims, device = ParallelDims(tp=settings.tp), Devices.find(settings.device).current
    optimizer = OptimizerOptions(learning_rate=settings.learning_rate)
    actor = Actor.from_pretrained(settings.start, dims=dims, device=device, optimizer=optimizer)
    critic = Critic.from_pretrained(settings.start, dims=dims, device=device, optimizer=optimizer)
    leader = dist.get_rank() == 0
    reference = Actor.from_pretrained(settings.start, backend="transformers", device=device) if leader else None

    probe = probe_batch()
    before = actor.log_probs(probe).log_probs.cpu()
    if leader:
        send({"kind": "parity", "log_probs": before})

    prompt_stream = random.Random(settings.seed)
    rewards: list[float] = []
    began, tokens = time.monotonic(), 0
    for step in range(settings.steps):
        prompts = make_prompts(settings.prompts, prompt_stream)
        batch = actor.generate(prompts, max_new_tokens=RESPONSE_LENGTH, seed=settings.seed * 1_000_003 + step)
        batch, reward = estimate(batch, actor, critic, reference, settings)
        metrics: dict[str, float] = {}
        for _ in range(settings.epochs):
            metrics = actor.update(batch, partial(policy_loss, settings.entropy_coefficient))
            metrics |= {f"critic_{name}": value for name, value in critic.update(batch, value_loss).items()}
        rewards.append(reward)
        tokens += batch.num_tokens
        if leader:
            sample = show(batch.split()[0])
            send({"kind": "step", "step": step + 1, "reward": reward, "sample": sample, **metrics})
    seconds = time.monotonic() - began

    actor.save_pretrained(settings.out / "actor")
    critic.save_pretrained(settings.out / "critic")
    after = actor.log_probs(probe).log_probs.cpu()
    return {
        "rewards": rewards,
        "log_probs": after,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
    }


def probe_batch() -> Batch:
    """Sequences of ragged lengths, the total no multiple of 2, for comparing log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    return Batch.from_sequences([torch.randint(1, 30, (length,), generator=generator) for length in (11, 1, 17, 6)])


def estimate(
    batch: Batch, actor: Actor, critic: Critic, reference: Actor | None, settings: Settings
) -> tuple[Batch, float]:
    """Add what PPO needs to know of the tokens while the policy is still the one that drew them."""
    values = critic.values(batch)
    old_log_probs = actor.log_probs(batch).log_probs
    penalty = losses.kl_penalty(old_log_probs, _reference_log_probs(batch, reference), "k1")
    previous = batch.tokens.roll(1)
    earned = torch.where(batch.mask, correct(previous, batch.tokens).float() / RESPONSE_LENGTH, 0)
    rewards = earned - settings.kl_coefficient * penalty
    advantages, returns = losses.gae(rewards, values, batch.mask, batch.lengths, gamma=0.9, lam=0.9)
    batch = batch.with_fields(
        old_log_probs=old_log_probs,
        old_values=values,
        advantages=losses.whiten(advantages, batch.mask),
        returns=returns,
    )
    return batch, float(batch.sum_by_sequence(earned).mean())


def _reference_log_probs(batch: Batch, reference: Actor | None) -> Tensor:
    """The first rank asks the reference and tells the others: what ranks compute from it must be equal to the bit."""
    log_probs = torch.zeros(batch.num_tokens, device=batch.device)
    if reference is not None:
        log_probs = reference.log_probs(batch).log_probs
    if dist.get_world_size() > 1:
        dist.broadcast(log_probs, src=0)
    return log_probs


def policy_loss(entropy_coefficient: float, log_probs: Tensor, entropy: Tensor, batch: Batch) -> losses.LossTerms:
    """PPO's clipped surrogate and a bonus for entropy."""
    surrogate = losses.ppo_clip(log_probs, batch["old_log_probs"], batch["advantages"])
    return surrogate + losses.entropy_bonus(entropy, entropy_coefficient)


def value_loss(values: Tensor, batch: Batch) -> losses.LossTerms:
    """The clipped squared error against the returns."""
    return losses.value_clip(values, batch["old_values"], batch["returns"])
