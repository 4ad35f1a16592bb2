"""`Reinforcement`: the recipe that draws responses, scores them, and estimates what to learn from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.training import saved_steps
from parallel_layers.module import python_random
from rl_models import Batch, losses
from rl_models.api import ModelCalls
from rl_models.calls import ROUTING
from rl_train.data.mixture import by_source
from rl_train.engines.interface import VERSION, RolloutEngine
from rl_train.loop.batches import mini_batches
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.draws import Ask, Drawn, Draws, DrawsInFlight, State, asking
from rl_train.loop.evaluation import evaluate
from rl_train.loop.experience import Experience, StepRollouts
from rl_train.loop.models import Models
from rl_train.loop.objective import advantages
from rl_train.loop.partial_rollouts import PartialRollouts
from rl_train.loop.recipe import NothingToLearnError, Recipe
from rl_train.loop.scoring import Scored, Scorer, question
from rl_train.options.options import TrainOptions
from rl_train.rewards.function import Rewards
from rl_train.trajectories.episodes import describe, episode_ids, select_episodes, sum_by_episode
from rl_train.trajectories.rollout_files import RolloutFiles

# Prompts of a step whose responses go to `samples.jsonl`.
_SHOWN = 4


@dataclass
class Reinforcement(Recipe):
    """Draw responses to prompts, score them, learn from them, and hand the weights to the engine.

    Attributes:
        checked_run, models: The options, the prompts and the models of the run.
        rollouts: The engine that generates; its weights are those after `version` steps.
        rewards: The rewards of the run; None on ranks where `once` does not call its function.
    """

    checked_run: CheckedRun
    models: Models
    rollouts: RolloutEngine
    rewards: Rewards | None
    _state: State = field(default=State(0, ()), init=False)
    _lengths: Sequence[int] = field(default=(), init=False)
    _said_equal: bool = field(default=False, init=False)
    _sample: dict[str, str] = field(default_factory=dict, init=False)
    _shown: list[dict[str, Any]] = field(default_factory=list, init=False)
    _questions: list[str | None] = field(default_factory=list, init=False)

    @property
    def options(self) -> TrainOptions:
        """Return the options of the run."""
        return self.checked_run.options

    @property
    def trained(self) -> Mapping[str, ModelCalls]:
        """Return the policy and the critic."""
        return self.models.trained

    @property
    def evaluation_interval(self) -> int:
        """Return `--eval-every` where the run has evaluation prompts."""
        return self.options.evaluation.every if self.checked_run.eval_prompts else 0

    def collect(self, step: int) -> tuple[Batch | None, dict[str, float]]:
        """Draw and score responses, and add what the losses read; None if no response is left."""
        rollouts, values = self._collect(step)
        batch, experience = None, rollouts.experience
        self._say_if_equal(step, experience)
        if experience.batch.mask.any():
            with self.phase("estimating"):
                batch, estimates = self._estimate(experience)
                if self.options.rollouts.routing and ROUTING in batch.fields and self._shows(step):
                    estimates["routing_difference"] = self.models.routing_difference(batch, self.options)
            values |= estimates
        if values.get("importance_rejected") == 1:
            self.say(f"step {step}: importance sampling rejects all responses; look at --importance-*")
        if self.writes:
            self._write(step, rollouts.with_estimates(batch))
        return batch, values

    def mini_batches(self, batch: Batch, step: int) -> Iterator[Batch]:
        """Yield the mini-batches of each pass over the episodes; with smaller mini-batches in another order."""
        options = self.options
        for epoch in range(options.epochs):
            order = episode_ids(batch).unique().tolist()
            if options.mini_batch and options.mini_batch < options.batch:
                python_random(options.seed, step, epoch).shuffle(order)
            for start, end in mini_batches(len(order), options.batch, options.mini_batch or options.batch):
                yield select_episodes(batch, order[start:end])

    def update(self, mini_batch: Batch) -> dict[str, float]:
        """Take one optimizer step of the policy and the critic."""
        return self.models.update(mini_batch, self.options)

    def hand_over(self, step: int) -> None:
        """Give the engine the new weights."""
        with self.phase("generating"):
            self._draws.wait(step)
        with self.phase("syncing_weights"):
            self.rollouts.update_weights(self.models.actor, step)
        self._state = self._draws.state

    @property
    def drawn_lengths(self) -> Sequence[int]:
        """Return the lengths of all samples of the last step; the devices of a server are unknown."""
        return () if self.options.rollouts.has_server else self._lengths

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Return the best and the worst responses of the last step, with their turns."""
        return self._shown

    def shown(self, step: int) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """Return the samples every `--show-every` steps, and a response."""
        rows = self._shown if self._shows(step) else ()
        shown = [{name: value for name, value in row.items() if name != "turns"} for row in rows]
        samples = [row | {"prompt": asked or row["prompt"]} for row, asked in zip(shown, self._questions, strict=False)]
        return shown, {"sample": self._sample, "samples": samples, "nothing": self._said_equal}

    def _shows(self, step: int) -> bool:
        return self.options.show_every > 0 and step % self.options.show_every == 0

    def state(self, training: Path, step: int) -> dict[str, Any]:
        """Return the place in the order of the prompts and the best evaluation reward; write responses drawn ahead."""
        if self.options.rollouts.staleness:
            self.once(lambda: self._state.save(training, step, saved_steps(training / "actor")))
        return self._state.to_json() | ({} if self._best is None else {"best": self._best})

    def resume(self, state: Mapping[str, Any], training: Path, step: int) -> None:
        """Go on with the next prompts, and with the responses that were drawn ahead."""
        self._best = state.get("best")
        self.rollouts.update_weights(self.models.actor, step)
        self._draws.resume(state, training, step)

    @cached_property
    def _draws(self) -> Draws:
        rollouts = self.options.rollouts
        kind = DrawsInFlight if rollouts.in_flight else PartialRollouts if rollouts.partial else Draws
        return kind(self.checked_run, self.rollouts, self._ask, self.once)

    @cached_property
    def _ask(self) -> Ask:
        return asking(self.checked_run, self.rollouts, self.rewards, self.once, self.say)

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.checked_run, self.rewards, self.once, self.say, self.models.judges)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the evaluation after a step; with `--evaluation.keep-best` save the best policy."""
        with self.phase("evaluating"):
            values = evaluate(self.checked_run, self._ask, self._scorer)
        reward = values["eval/reward"]
        if step == 0:
            self.tell({"message": f"before step 1: evaluation reward {reward:.3f}", "eval/reward": reward})
        self._keep_best(step, "reward", reward, self.options)
        return values

    @cached_property
    def _files(self) -> RolloutFiles:
        return RolloutFiles(self.options.out, self.checked_run.codec)

    def _write(self, step: int, rollouts: Experience) -> None:
        """Choose the samples of a step, and with `--save-rollouts` write all its responses."""
        prompts, batch = rollouts.prompts, rollouts.batch
        self._shown = list(self._scorer.best_and_worst(prompts, batch, rollouts.scores, _SHOWN))
        self._questions = [row.pop("question") for row in self._shown]
        if self.options.save_rollouts:
            rewards, truncated = rollouts.scored.rewards, self._scorer.truncated(batch)
            self._files.write(step, batch, prompts, rollouts.scores, rewards, truncated=truncated)

    def _say_if_equal(self, step: int, experience: Experience) -> None:
        """Tell once for consecutive steps that all rewards, or all rewards of each group, are equal."""
        grouped = self.options.rule.groups
        scores = experience.scores if len(experience.scores) else experience.scored.scores
        equal = not bool(experience.differs.any()) if grouped else bool(scores.min() == scores.max())
        if equal and not self._said_equal:
            what = "the responses to each prompt have equal rewards" if grouped else "all rewards are equal"
            self.say(
                f"step {step}: {what} (their mean is {float(scores.mean()):g}), so the policy learns nothing from "
                "them; look at the reward, or draw more responses"
            )
        self._said_equal = equal

    def _collect(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """Draw responses to a step's prompts, and describe all of them.

        Unless `--equal-groups` is keep, the step learns only from responses to prompts whose responses differ in score;
        the metrics describe the discarded responses, too.
        """
        options, num_wanted = self.options, self.options.prompts_per_step
        drawn = [self._scored(partial(self._draws.take, step))]
        if options.equal_groups == "keep":
            experience = self._joined(drawn)
            everything = torch.ones(len(experience.prompts), dtype=torch.bool)
            return StepRollouts(experience, experience, everything), self._describe(experience)
        # Compare the scores without the length penalty, which would make equal responses differ.
        kept = [drawn[0].informative()]
        max_batches = options.max_batches if options.equal_groups == "resample" else 1
        while (num_missing := num_wanted - sum(len(draw.scores) for draw in kept)) > 0 and len(drawn) < max_batches:
            drawn.append(self._scored(partial(self._draws.more, num_missing)))
            kept.append(drawn[-1].informative())
        experience = self._joined(kept)
        prompts = sum(len(draw.scores) for draw in drawn)
        if options.equal_groups == "resample" and num_missing > 0:
            if num_missing == num_wanted:
                raise NothingToLearnError(
                    f"all responses to each of {prompts} prompts scored the same: there is nothing for "
                    f"{options.algorithm} to learn; look at the reward, or draw more samples"
                )
            few = f"only {num_wanted - num_missing} of {num_wanted} prompts have responses that differ in reward"
            tried = f"after {len(drawn)} batches (--max-batches)"
            self.say(f"step {step}: {few}, {tried}; the step learns from these")
        rollouts = StepRollouts(experience, self._joined(drawn), torch.cat([draw.differs for draw in drawn]))
        metrics = self._describe(rollouts.drawn) | {
            "batches_drawn": len(drawn),
            "prompts_dropped": prompts - len(experience.scores),
            "responses_kept": experience.scores.numel(),
        }
        if len(experience.batch):
            metrics["reward_kept"] = float(experience.scores.mean())
        return rollouts, metrics

    def _joined(self, draws: Sequence[Experience]) -> Experience:
        """Join the responses of several batches, and add the penalty for length to their scores."""
        options = self.options
        batch = Batch.concatenate([draw.batch for draw in draws])
        scores = torch.cat([draw.scores for draw in draws])
        if buffer := options.rewards.overlong_buffer:
            lengths = sum_by_episode(batch, batch.masked_counts)
            penalty = losses.overlong_penalty(lengths, max_length=options.sampling.max_new_tokens, buffer=buffer)
            scores = scores + penalty.view_as(scores)
        scored = Scored.concatenate([draw.scored for draw in draws])
        return Experience([prompt for draw in draws for prompt in draw.prompts], batch, scores, scored)

    def _describe(self, drawn: Experience) -> dict[str, float]:
        """Return the metrics of all responses that a step has drawn."""
        self._lengths = drawn.batch.lengths
        batch, scores, versions = drawn.batch, drawn.scores, drawn.batch[VERSION][drawn.batch.mask]
        values = {
            "reward": float(scores.mean()),
            "reward_std": float(scores.std(correction=0)),
            "reward_min": float(scores.min()),
            "reward_max": float(scores.max()),
            "response_length": int(batch.mask.sum()) / scores.numel(),
            "truncated": sum(self._scorer.truncated(batch)) / scores.numel(),
            "responses": scores.numel(),
            "tokens": batch.num_tokens,
            **by_source(self.options.prompts, drawn.prompts, scores),
            **(self._staleness(versions) if len(versions) else {}),
            **describe(batch),
        }
        if self.options.samples > 1:
            values["frac_reward_zero_std"] = float((~drawn.differs).float().mean())
        return values | drawn.scored.describe(counts_errors=self.options.rewards.errors == "zero")

    def _staleness(self, versions: Tensor) -> dict[str, float]:
        """Return the oldest of the versions that drew tokens `[T]`, and how many versions behind the tokens are."""
        ages = self.rollouts.version - versions
        values: dict[str, float] = {"rollout_version": int(versions.min()), "staleness": int(ages.max())}
        if self.options.rollouts.staleness:
            values |= {"staleness_mean": float(ages.double().mean()), "staleness_min": int(ages.min())}
            counts = torch.bincount(ages, minlength=1 + self.options.rollouts.staleness).tolist()
            values |= {f"staleness_share@{number}": count / len(versions) for number, count in enumerate(counts)}
        return values

    def _scored(self, draw: Callable[[], Drawn]) -> Experience:
        """Draw responses and score them."""
        with self.phase("generating"):
            drawn = draw()
        batch = drawn.batch
        asked = [prompt for prompt in drawn.prompts for _ in range(self.options.samples)]
        if self.writes:
            ((prompt, response),) = self._scorer.as_read(asked[:1], batch.select([0]))
            self._sample = {"prompt": question(asked[0].row) or str(prompt), "response": str(response)}
        with self.phase("scoring"):
            scored = self._scorer(asked, batch)
        scores = scored.scores.view(len(drawn.prompts), -1)
        self._draws.observe(drawn.prompts, scores)
        return Experience(drawn.prompts, batch, scores, scored)

    def _estimate(self, experience: Experience) -> tuple[Batch, dict[str, float]]:
        """Add the fields that the losses read, and measure how far the policy is from the one that drew the tokens."""
        options, models, ids = self.options, self.models, episode_ids(experience.batch)
        acted = experience.batch.masked_counts > 0  # a program may end without a call of the policy
        batch = experience.batch.select(acted.nonzero().flatten())
        groups, scores = (ids // options.samples)[acted], experience.scores.flatten()[ids][acted]
        if options.groups_on_one_rank:
            batch = batch.with_fields(group=groups[batch.sequence_ids])
        batch = models.estimate(batch, options)
        old = batch["old_log_probs"]
        # The engine's `log_probs` of a batch come from the weights that drew the tokens.
        values = losses.rollout_mismatch(old, batch["log_probs"], batch.mask)
        if (bounds := options.objective.importance).cap is not None:
            importance = losses.importance_weights(
                old, batch["log_probs"], batch.mask, batch.lengths, **bounds.model_dump()
            )
            batch, values = batch.with_fields(importance_weights=importance.weights), values | importance.metrics
        if options.has_reference:
            prompts = [experience.prompts[number].teacher or [] for number in groups.tolist()]
            batch = models.with_reference(batch, options, prompts if options.teacher.prompts else None)
        if (reference := batch.fields.get("reference_log_probs")) is not None:
            values["kl"] = float(losses.kl_penalty(old, reference, "k3")[batch.mask].mean())
        estimates = advantages(options, batch, scores, groups)
        return batch.with_fields(**estimates), values
