"""The options of recipes that learn from rows of a file: `sft`, `dpo`, `reward` and `distill`."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field

from parallel_models import OptimizerOptions
from rl_train.options.algorithms import DivergenceName
from rl_train.options.fields import CONFIG, Count, Folder, Fraction, Free, NotNegative, Number, Positive, Sources
from rl_train.options.groups import ExampleOptions
from rl_train.options.nested import Nested
from rl_train.options.run_options import STEP_OF_OPTIMIZER, Needs, Optimizer, RunOptions


class HeldOutOptions(BaseModel):
    """Evaluations during the run: the loss on rows that the model does not learn from."""

    model_config = CONFIG

    dataset: Free[Sources | None] = None
    """Evaluation rows, in the form of --dataset; the model does not learn from them."""
    every: Free[Count] = 20
    """Number of steps between evaluations; the first one is before step 1, the last one after the last step."""
    keep_best: Free[bool] = False
    """Keep the model with the lowest evaluation loss in the folder `best` of --out."""


class FileOptions(RunOptions):
    """The options of a recipe that learns from rows of a file."""

    dataset: Sources
    """Rows: .jsonl, .csv, .parquet, a pattern, a datasets folder, a URL or name:FILES of a hub; several with commas."""
    batch_size: Count = 64
    """Number of rows in a step, which is one optimizer step."""
    epochs: Free[Annotated[Positive, Field(le=1e6)] | None] = None
    """Number of passes over the rows, in place of --steps."""
    # A recipe that learns from good answers takes larger steps than one that learns from scores.
    optimizer: Free[
        Annotated[
            OptimizerOptions, Nested(OptimizerOptions, fixed=("algorithm", *STEP_OF_OPTIMIZER), learning_rate=1e-5)
        ]
    ] = Field(default_factory=lambda: OptimizerOptions(learning_rate=1e-5))
    data: ExampleOptions = Field(default_factory=ExampleOptions)
    evaluation: HeldOutOptions = Field(default_factory=HeldOutOptions)

    @classmethod
    def filled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Leave room for any schedule where the rows decide the number of steps; see `of_epochs`."""
        values = super().filled(values)
        if values.get("epochs") is not None and "optimizer.schedule.total_steps" in values:
            values["optimizer.schedule.total_steps"] = sys.maxsize
        return values

    def of_epochs(self, rows: int) -> Self:
        """Return the options with the number of steps of `--epochs` over this number of rows."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(round(self.epochs * rows / self.batch_size, 6)))
        schedule = self.optimizer.schedule
        if schedule.total_steps is not None:
            schedule = dataclasses.replace(schedule, total_steps=steps)
        optimizer = dataclasses.replace(self.optimizer, schedule=schedule)
        return self.model_copy(update={"steps": steps, "optimizer": optimizer})

    @property
    def reference_folder(self) -> Path | None:
        """Return the folder of the reference or teacher; None: the policy's own."""
        return None


class SftOptions(FileOptions):
    """The options of `rl-train sft`."""

    command: ClassVar[str] = "sft"


class DpoOptions(FileOptions):
    """The options of `rl-train dpo`."""

    command: ClassVar[str] = "dpo"

    loss: Literal["dpo", "ipo", "kto", "simpo"] = "dpo"
    """Loss: dpo, ipo or simpo of pairs, or kto of single completions with a label."""
    beta: Positive | None = None
    """Strength of the pull towards the reference, for simpo the factor of the rewards (default: 0.1; simpo: 2)."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are labelled wrongly (dpo)."""
    margin: NotNegative = 1.0
    """Difference of the rewards that simpo aims at."""
    desirable_weight: NotNegative = 1.0
    """Weight of desirable completions (kto)."""
    undesirable_weight: NotNegative = 1.0
    """Weight of undesirable completions (kto)."""
    reference: Folder | None = None
    """Checkpoint folder of the reference (default: the policy before it learns; with adapters, without them)."""
    optimizer: Optimizer = Field(default_factory=OptimizerOptions)

    @property
    def learned(self) -> str:
        """Return the name of the loss."""
        return self.loss

    @property
    def reference_folder(self) -> Path | None:
        """Return the folder of the reference; None: the policy's own."""
        return self.reference


class RewardModelOptions(FileOptions):
    """The options of `rl-train reward`."""

    command: ClassVar[str] = "reward"

    rows: Literal["pairs", "labels", "steps"] = "pairs"
    """Rows: pairs (chosen, rejected), labels of whole texts (label), or labels of steps (completions, labels)."""

    @property
    def learned(self) -> str:
        """Return the form of the rows."""
        return self.rows

    @property
    def trained(self) -> list[str]:
        """Return the name of the reward model's folder."""
        return ["critic"]


class DistillOptions(FileOptions):
    """The options of `rl-train distill`."""

    command: ClassVar[str] = "distill"

    teacher: Folder
    """Checkpoint folder of the teacher, with the policy's tokenizer."""
    divergence: DivergenceName = "forward_kl"
    """Divergence from the teacher: forward_kl, reverse_kl, jensen_shannon, skewed_forward_kl or skewed_reverse_kl."""
    mixture: Fraction | None = None
    """Share in the mixture of --divergence jensen_shannon (the teacher's) and of the skewed KLs."""
    temperature: Positive = 1.0
    """Temperature of both models; their logits are divided by it."""

    @property
    def reference_folder(self) -> Path | None:
        """Return the folder of the teacher."""
        return self.teacher


def needs(options: FileOptions) -> Iterator[Needs]:
    """Yield the options that have an effect in some runs alone."""
    held_out = options.evaluation.dataset is not None
    yield "evaluation.keep_best evaluation.every", held_out, "evaluation.dataset"
    yield "keep", options.save_every > 0, "save_every"
    yield "data.weights", len(options.data.weight_of_sources) != 1, "several sources, with a weight for each"
    labels = options.engine.num_labels in (None, 1) or options.learned in ("labels", "steps")
    yield "engine.num_labels", labels, "rl-train reward --rows labels or steps"
    if isinstance(options, DpoOptions):
        yield "reference", options.loss != "simpo", "another loss than simpo, which has no reference"
        for name, loss in (("label_smoothing", "dpo"), ("margin", "simpo")):
            yield name, options.loss == loss, f"loss={loss}"
        yield "desirable_weight undesirable_weight", options.loss == "kto", "loss=kto"


def mistakes(options: FileOptions) -> Iterator[str]:
    """Yield what excludes each other among the options of a recipe."""
    if options.epochs is not None and "steps" in options.model_fields_set:
        yield f"epochs={options.epochs:g} and steps={options.steps} both say how long the run is; give one"
    if options.epochs is not None and options.data.shuffle_buffer:
        yield f"epochs={options.epochs:g} counts rows, which data.shuffle_buffer streams; give steps instead"
    for name, needed in options.without_effect(needs(options)):
        yield f"{name}={options.value(name)} needs {needed}; give that, or leave {name} out"
    if isinstance(options, DistillOptions):
        mixes = options.divergence not in ("forward_kl", "reverse_kl")
        if mixes != (options.mixture is not None and 0 < options.mixture < 1):
            fix = "needs a mixture between 0 and 1" if mixes else "takes no mixture"
            yield f"divergence={options.divergence} {fix}, got {options.mixture}"


# The options of each command that learns from a file.
FILE_RECIPES: dict[str, type[FileOptions]] = {
    kind.command: kind for kind in (SftOptions, DpoOptions, RewardModelOptions, DistillOptions)
}
