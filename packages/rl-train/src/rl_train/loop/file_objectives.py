"""A table of the recipes that learn from files: the reader of their rows, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rl_models import Actor, Batch, Critic, LossInputs, losses
from rl_models.api import Worker
from rl_models.losses import LossTerms
from rl_train.data.examples import NONE, Example, Reader, judged, labelled, pair, steps, whole


def _sft(inputs: LossInputs, options: Any) -> LossTerms:
    return LossTerms(-inputs.log_probs, {"entropy": inputs.entropy.detach()})


def _dpo(inputs: LossInputs, options: Any) -> LossTerms:
    loss_type: Literal["sigmoid", "ipo"] = "ipo" if options.loss == "ipo" else "sigmoid"
    beta, smoothing = options.beta or 0.1, options.label_smoothing
    return losses.dpo(*_compared(inputs, "pair"), beta=beta, label_smoothing=smoothing, loss_type=loss_type)


def _kto(inputs: LossInputs, options: Any) -> LossTerms:
    weights = {name: getattr(options, name) for name in ("desirable_weight", "undesirable_weight")}
    point = float(inputs["reference_point"][0])
    return losses.kto(*_compared(inputs, "label"), kl=point, beta=options.beta or 0.1, **weights)


def _compared(inputs: LossInputs, field: str) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return the leading arguments of losses that compare with a reference."""
    batch = inputs.batch
    return inputs.log_probs, inputs["reference_log_probs"], inputs[field], batch.mask, batch.lengths


def _simpo(inputs: LossInputs, options: Any) -> LossTerms:
    pair_and_mask = inputs["pair"], inputs.batch.mask, inputs.batch.lengths
    return losses.simpo(inputs.log_probs, *pair_and_mask, beta=options.beta or 2.0, margin=options.margin)


def _bradley_terry(inputs: LossInputs, options: Any) -> LossTerms:
    return losses.bradley_terry(inputs.values, inputs["pair"], inputs.batch.mask, inputs.batch.lengths)


def _labels(inputs: LossInputs, options: Any) -> LossTerms:
    return losses.label_cross_entropy(inputs.values, inputs["labels"])


def _divergence(inputs: LossInputs, options: Any) -> LossTerms:
    return LossTerms(inputs["divergence"], {"entropy": inputs.entropy.detach()})


class FileObjective(NamedTuple):
    """The reader of a recipe's rows, and its loss.

    Attributes:
        read: Returns the sequences of a row.
        loss: (inputs, options) -> the terms of the loss.
        aggregation: Average of the terms (`rl_models.losses.aggregation`).
        reference: Whether the loss compares with a reference, or a teacher.
        kind: The class of the model that learns.
    """

    read: Reader
    loss: Callable[[LossInputs, Any], LossTerms]
    aggregation: str = "sequence-mean"
    reference: bool = False
    kind: type[Worker] = Actor

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Return the sequences of rows with the learned tokens in the mask, and the fields of the loss, all `[T]`.

        `pair` is the number of a pair. `label` is the row's label. For a reward model each sequence has a token more,
        whose value is the score, and `labels` are the labels of its tokens.
        """
        sequences = [sequence for example in examples for sequence in example.sequences]
        lengths = tuple(len(sequence.tokens) for sequence in sequences)
        tokens = torch.tensor([token for sequence in sequences for token in sequence.tokens])
        labels = torch.tensor([label for sequence in sequences for label in sequence.labels])
        batch = Batch(tokens, lengths, torch.zeros_like(tokens, dtype=torch.bool))
        rows = torch.tensor([number for number, example in enumerate(examples) for _ in example.sequences])
        if self.read is pair:
            batch = batch.with_fields(pair=rows[batch.sequence_ids])
        if self.read is judged:
            marks = torch.tensor([float(example.row["label"]) for example in examples])
            batch = batch.with_fields(label=marks[batch.sequence_ids])
        if self.kind is Critic:
            return batch.with_ends(None if self.read is pair else labels)
        mask = (labels != NONE) & ~batch.first
        return Batch(tokens, lengths, mask, batch.fields)


OBJECTIVES: dict[str, FileObjective] = {
    "sft": FileObjective(whole, _sft, "token-mean"),
    "dpo": FileObjective(pair, _dpo, reference=True),
    "ipo": FileObjective(pair, _dpo, reference=True),
    "kto": FileObjective(judged, _kto, reference=True),
    "simpo": FileObjective(pair, _simpo),
    "pairs": FileObjective(pair, _bradley_terry, kind=Critic),
    "labels": FileObjective(labelled, _labels, kind=Critic),
    "steps": FileObjective(steps, _labels, "token-mean", kind=Critic),
    "distill": FileObjective(whole, _divergence, "token-mean", reference=True),
}
