"""`FileRecipe`: the recipe that learns from the rows of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_models import Actor, Batch, LossInputs
from rl_models.api import ModelCalls
from rl_models.batch import OtherPrompts
from rl_models.calls import TEACHER_STATES, Divergence
from rl_models.losses import LossTerms
from rl_train.data.examples import Example
from rl_train.data.mixture import Mixture, by_source
from rl_train.loop.checked_examples import CheckedExamples
from rl_train.loop.file_objectives import OBJECTIVES, FileObjective
from rl_train.loop.recipe import Recipe, Tell
from rl_train.loop.recipe_run import LocalRank, ModelMaker, on_ranks, run_recipe
from rl_train.options.file_options import DistillOptions, FileOptions


@dataclass
class FileRecipe(Recipe):
    """Learn from the next rows of a file; each pass over them has another order.

    `reference` is the reference or teacher; None: no reference, or the policy without its adapters.
    """

    checked_run: CheckedExamples
    model: ModelCalls
    reference: ModelCalls | None

    @cached_property
    def _mixture(self) -> Mixture[Example]:
        return self.checked_run.mixture()

    @property
    def options(self) -> FileOptions:
        """Return the options of the run."""
        return self.checked_run.options

    @property
    def objective(self) -> FileObjective:
        """Return what is learned."""
        return OBJECTIVES[self.options.learned]

    @property
    def trained(self) -> Mapping[str, ModelCalls]:
        """Return the model that learns."""
        return {self.options.trained[0]: self.model}

    @property
    def evaluation_interval(self) -> int:
        """Return `--eval-every` where the run has evaluation rows."""
        return self.options.evaluation.every if self.checked_run.eval_examples else 0

    def collect(self, step: int) -> tuple[Batch | None, dict[str, float]]:
        """Return the rows of a step, with the log-probs or states of the reference."""
        examples = [example for _, example in self._mixture.take(self.options.batch_size)]
        batch = self._batch(examples)
        values = {"tokens": batch.num_tokens, "learned_tokens": int(batch.mask.sum()), "passes": self._mixture.passes}
        return batch, values | by_source(self.options.dataset, examples)

    def update(self, mini_batch: Batch) -> dict[str, float]:
        """Take one optimizer step."""
        objective, options = self.objective, self.options

        def loss(inputs: LossInputs) -> LossTerms:
            return objective.loss(inputs, options)

        return self.model.update(mini_batch, loss, aggregation=objective.aggregation, **self._distillation())

    def _distillation(self) -> dict[str, Any]:
        options = self.options
        if not isinstance(options, DistillOptions):
            return {}
        return {"temperature": options.temperature, "divergence": Divergence(options.divergence, options.mixture)}

    def hand_over(self, step: int) -> None:
        """End a step; no engine draws with the weights."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the loss of the evaluation rows, and its metrics; of a distillation the negative log-likelihood."""
        with self.phase("evaluating"):
            objective = OBJECTIVES["sft"] if isinstance(self.options, DistillOptions) else self.objective
            batch = self._batch(self.checked_run.eval_examples, objective)
            outputs = self.model.predict(batch)
            masked = {name: _masked(batch, values) for name, values in outputs.items()}
            terms = objective.loss(LossInputs(batch, masked), self.options)
        means = {name: _mean(batch, values, objective.aggregation) for name, values in terms.metrics.items()}
        values = {f"eval/{name}": value for name, value in means.items()}
        values["eval/loss"] = _mean(batch, terms.loss, objective.aggregation)
        if step == 0:
            self.tell({"message": f"before step 1: evaluation loss {values['eval/loss']:.4f}", **values})
        self._keep_best(step, "loss", values["eval/loss"], self.options, sign=-1)
        return values

    def shown(self, step: int) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """Return no samples; the loss is what the screen shows first."""
        return (), {"headline": "loss"}

    def state(self, training: Path, step: int) -> dict[str, Any]:
        """Return the place in each source, and the best evaluation loss."""
        return self._mixture.state | ({} if self._best is None else {"best": self._best})

    def resume(self, state: Mapping[str, Any], training: Path, step: int) -> None:
        """Go on with the next rows and the best evaluation loss."""
        self._mixture.resume(state, step * self.options.batch_size)
        self._best = state.get("best")

    def _batch(self, examples: Sequence[Example], objective: FileObjective | None = None) -> Batch:
        """Return the batch of rows, with what the loss reads of the reference."""
        objective = objective or self.objective
        batch = objective.batch(examples)
        if not objective.reference:
            return batch
        with self.phase("estimating"):
            if isinstance(self.options, DistillOptions):
                assert self.reference is not None
                return batch.with_fields(**{TEACHER_STATES: self.reference.states(batch)})
            batch = batch.with_fields(reference_log_probs=self._reference_log_probs(batch))
            if self.options.learned == "kto":
                point = self._reference_point(batch)
                batch = batch.with_fields(reference_point=torch.full((batch.num_tokens,), point))
        return batch

    def _reference_log_probs(self, batch: Batch) -> Tensor:
        if self.reference is None:
            return self.model.log_probs(batch, adapters=False).log_probs
        return self.reference.log_probs(batch).log_probs

    def _reference_point(self, batch: Batch) -> float:
        """Return KTO's estimate of KL(policy || reference): each completion behind the next sequence's prompt."""
        pairs = zip(batch.split(), batch.split("mask"), strict=True)
        prompts = [tokens[: int(mask.int().argmax())] for tokens, mask in pairs]
        other = OtherPrompts.of(batch, [*prompts[1:], prompts[0]]).batch
        ratios = self.model.log_probs(other).log_probs - self._reference_log_probs(other)
        return max(0.0, float(other.sum_by_sequence(ratios).mean()))


def _masked(batch: Batch, values: Tensor) -> Tensor:
    mask = batch.mask if values.dim() == 1 else batch.mask[:, None]
    return torch.where(mask, values, 0)


def _mean(batch: Batch, values: Tensor | float, aggregation: str) -> float:
    """Return the mean of a number of each token, over tokens or over sequences."""
    per_token = torch.as_tensor(values).expand(batch.num_tokens)
    if aggregation == "token-mean":
        return float(per_token[batch.mask].mean())
    counts = batch.masked_counts
    return float((batch.sum_by_sequence(per_token)[counts > 0] / counts[counts > 0]).mean())


def train(checked_run: CheckedExamples, on_event: Tell = lambda event: None) -> dict[str, float]:
    """Run all steps that are left, and return the metrics of the last step; see `rl_train.loop.train`.

    Raises:
        RankFailed: A rank failed.
        ValueError: Another process runs in the folder, or a backend does not offer the model.
    """
    return run_recipe(checked_run, on_event, partial(on_ranks, work=_on_rank))


def _on_rank(rank: LocalRank[CheckedExamples]) -> dict[str, float]:
    """Run the recipe on one of the ranks that all run it."""
    checked_run, options = rank.checked_run, rank.checked_run.options
    objective, model = OBJECTIVES[options.learned], ModelMaker(options, rank.make, rank.throughput)
    rank.tell({"phase": "loading"})
    learning = model(objective.kind, options.model, options.grid, options.optimizer.learning_rate)
    folder, reference = options.reference_folder, None
    if objective.reference and (folder is not None or options.lora is None):
        reference = model(Actor, folder or options.model, options.grid, 0.0, lora=None, base_format=None)
    if isinstance(options, DistillOptions):
        learning.load_teacher_head(options.teacher)
    return rank.run(FileRecipe(rank.once, rank.tell, rank.first, checked_run, learning, reference))
