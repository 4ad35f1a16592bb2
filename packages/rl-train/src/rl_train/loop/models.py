"""`Models`: the actor, the critic and the reference of a run; the critic may be a head on the policy's backbone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rl_models import Batch
from rl_models.api import ModelCalls
from rl_models.calls import ROUTING, Divergence
from rl_train.loop.objective import joint_loss, policy_loss, value_loss
from rl_train.options.options import TrainOptions
from rl_train.trajectories.episodes import with_episode_weights


@dataclass(frozen=True)
class Models:
    """The models of a run, which take whole batches: `WholeBatches` or `RayModelGroup`."""

    actor: ModelCalls
    critic: ModelCalls | None = None
    reference: ModelCalls | None = None

    @property
    def trained(self) -> dict[str, ModelCalls]:
        """Return the models that learn, by the name of their folder."""
        named = {"actor": self.actor, "critic": self.critic}
        return {name: model for name, model in named.items() if model is not None}

    def estimate(self, batch: Batch, options: TrainOptions) -> Batch:
        """Add `old_log_probs` to the batch, and what the run needs of `old_values`, `teacher_states` and `routing`."""
        temperature = options.sampling.temperature
        replays = options.objective.router_replay and ROUTING not in batch.fields
        predictions = self.actor.predict(batch, temperature=temperature, record_routing=replays)
        fields = {"log_probs": "old_log_probs", "values": "old_values", "routing": "routing"}
        batch = batch.with_fields(**{fields[name]: values for name, values in predictions.items() if name in fields})
        if options.objective.divergence is not None:
            assert self.reference is not None
            batch = batch.with_fields(teacher_states=self.reference.states(batch))
        if self.critic is not None:
            return batch.with_fields(old_values=self.critic.values(batch))
        return batch

    def reference_log_probs(self, batch: Batch, temperature: float) -> Tensor:
        """Return the log-probs of the reference `[T]`: a model, or without one the policy without its adapters."""
        if self.reference is None:
            return self.actor.log_probs(batch, temperature=temperature, adapters=False).log_probs
        return self.reference.log_probs(batch, temperature=temperature).log_probs

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
