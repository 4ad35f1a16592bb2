"""`Models`: the actor, the critic and the reference of a run; the critic may be a head on the policy's backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from rl_models import Batch
from rl_models.api import ModelCalls
from rl_models.batch import OtherPrompts
from rl_models.calls import ROUTING, TEACHER_IDS, TEACHER_STATES, Divergence
from rl_train.engines.teacher_engine import TeacherEngine
from rl_train.loop.judging import JudgingModel
from rl_train.loop.objective import joint_loss, policy_loss, value_loss
from rl_train.options.options import TrainOptions
from rl_train.trajectories.episodes import with_episode_weights


@dataclass(frozen=True)
class Models:
    """The models of a run, which take whole batches: `WholeBatches` or `RayModelGroup`.

    `judges` are models that judge, by the name of their reward.
    """

    actor: ModelCalls
    critic: ModelCalls | None = None
    reference: ModelCalls | None = None
    teacher: TeacherEngine | None = None
    judges: Mapping[str, JudgingModel] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, ModelCalls]:
        """Return the models that learn, by the name of their folder."""
        named = {"actor": self.actor, "critic": self.critic}
        return {name: model for name, model in named.items() if model is not None}

    def estimate(self, batch: Batch, options: TrainOptions) -> Batch:
        """Add `old_log_probs` to the batch, and what the run needs of `old_values` and `routing`."""
        temperature = options.sampling.temperature
        replays = options.objective.router_replay and ROUTING not in batch.fields
        predictions = self.actor.predict(batch, temperature=temperature, record_routing=replays)
        fields = {"log_probs": "old_log_probs", "values": "old_values", "routing": "routing"}
        batch = batch.with_fields(**{fields[name]: values for name, values in predictions.items() if name in fields})
        if self.critic is not None:
            return batch.with_fields(old_values=self.critic.values(batch))
        return batch

    def routing_difference(self, batch: Batch, options: TrainOptions) -> float:
        """Return the share of the experts of `routing` that the policy's routers do not choose, for the same tokens.

        Rounding alone changes choices near a tie (https://arxiv.org/abs/2510.11370). It takes a forward of its own,
        without the replay.
        """
        plain = replace(batch, fields={name: field for name, field in batch.fields.items() if name != ROUTING})
        predictions = self.actor.predict(plain, temperature=options.sampling.temperature, record_routing=True)
        replayed, chosen = batch[ROUTING], predictions["routing"].to(batch.device)
        differs = (replayed[..., None] != chosen[..., None, :]).all(-1)[replayed >= 0]
        return float(differs.float().mean()) if len(differs) else 0.0

    def with_reference(self, batch: Batch, options: TrainOptions, prompts: Sequence[Sequence[int]] | None) -> Batch:
        """Add `reference_log_probs` to the batch, or for a divergence the teacher's states or likeliest tokens.

        The reference or teacher is an engine, a model, or without both the policy without its adapters. It reads the
        responses behind the `prompts`, one for each (default: behind the policy's own).
        """
        if prompts is None:
            return batch.with_fields(**self._read(batch, options))
        other = OtherPrompts.of(batch, prompts)
        fields = self._read(other.batch, options)
        return batch.with_fields(
            **{name: other.aligned(rows, -1 if name == TEACHER_IDS else 0) for name, rows in fields.items()}
        )

    def _read(self, batch: Batch, options: TrainOptions) -> Mapping[str, Tensor]:
        name = options.objective.divergence
        if self.teacher is not None:
            return self.teacher.read(batch, options.teacher.top_k if name is not None else 0)
        temperature = options.sampling.temperature
        model, changes = (self.actor, {"adapters": False}) if self.reference is None else (self.reference, {})
        if name is None:
            return {"reference_log_probs": model.log_probs(batch, temperature=temperature, **changes).log_probs}
        return {TEACHER_STATES: model.states(batch, **changes)}

    def update(self, mini_batch: Batch, options: TrainOptions) -> dict[str, float]:
        """Run one optimizer step of each model that learns; the critic's metrics begin with `critic_`."""
        loss = partial(joint_loss if options.critic.share_backbone else policy_loss, options)
        temperature, aggregation = options.sampling.temperature, options.objective.aggregation
        mini_batch = with_episode_weights(mini_batch, aggregation)
        name, mixture = options.objective.divergence, options.objective.mixture
        divergence = None if name is None else Divergence(name, mixture)
        metrics = self.actor.update(
            mini_batch, loss, temperature=temperature, aggregation=aggregation, divergence=divergence
        )
        if self.critic is not None:
            critic_metrics = self.critic.update(mini_batch, partial(value_loss, options))
            metrics |= {f"critic_{name}": value for name, value in critic_metrics.items()}
        return metrics
