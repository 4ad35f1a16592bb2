"""`check_examples`: check the options of a recipe that learns from a file, and read its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt import Checkpoint
from parallel_models.engine import checkpoint_folder, max_positions
from rl_models import Actor
from rl_train.cluster.launch import Devices
from rl_train.data.codec import TextCodec
from rl_train.data.examples import Example, read_examples
from rl_train.data.prompts import vocabulary_size
from rl_train.data.sources import place
from rl_train.loop.checked_models import check_model, check_reference, summary
from rl_train.loop.checked_teacher import check_tokens
from rl_train.loop.file_objectives import OBJECTIVES
from rl_train.loop.folder import check_folder
from rl_train.loop.resume import changed_inputs, inputs_of
from rl_train.options.file_options import DistillOptions, FileOptions, mistakes
from rl_train.report.loggers import check_loggers

_SHOWN = ["model", "dataset", "number_of_rows", "learned_tokens", "longest_sequence", "passes_over_rows", "steps"]
_SHOWN += ["batch_size", "out", "ranks"]


@dataclass(frozen=True)
class CheckedExamples:
    """The options and the rows of a run that has been checked.

    `dropped` is the number of rows that were too long (`--data.long-prompts drop`). For `options_as_given`, `inputs`
    and `changes` see `CheckedRun`.
    """

    options: FileOptions
    examples: list[Example]
    eval_examples: list[Example]
    dropped: int = 0
    options_as_given: FileOptions | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[str] = ()

    def describe(self) -> dict[str, Any]:
        """Return the run as JSON values: every resolved option, and the values derived from the options."""
        sequences = [sequence for example in self.examples for sequence in example.sequences]
        return self.options.to_json() | {
            "ranks": self.options.grid.world_size,
            "number_of_rows": len(self.examples),
            "number_of_eval_rows": len(self.eval_examples),
            "number_of_dropped_rows": self.dropped,
            "learned_tokens": sum(label >= 0 for _, labels in sequences for label in labels),
            "longest_sequence": max(example.longest for example in self.examples),
            "passes_over_rows": round(self.options.steps * self.options.batch_size / len(self.examples), 3),
        }

    def summary(self) -> dict[str, Any]:
        """Return the summary of a dry run: some entries of `describe`, and all options that are given."""
        options = self.options
        required = {name: options.value(name) for name in ("model", "dataset", "teacher") if name in options.names()}
        return summary(options, type(options)(**required), self.describe(), _SHOWN)


def check_examples(
    options: FileOptions, rows: Iterable[Any] | None = None, eval_rows: Iterable[Any] | None = None
) -> CheckedExamples:
    """Check the options against the files and the devices, and read the rows.

    Args:
        options: The options of the run.
        rows, eval_rows: Rows that replace the files `options.dataset` and `options.evaluation.dataset`, as for
            `rl_train.loop.check_run`.

    Raises:
        ValueError: An option or a row is wrong; the error names it and the fix.
    """
    for mistake in mistakes(options):
        raise ValueError(mistake)
    check_folder(options)
    check_loggers(options.logger)
    options_as_given = options
    folders = {name: options.value(name) for name in ("model", "reference", "teacher") if name in options.names()}
    options = options.model_copy(
        update={name: folder and Path(checkpoint_folder(folder)) for name, folder in folders.items()}
    )
    checkpoint, objective = Checkpoint(options.model), OBJECTIVES[options.learned]
    limits = {"--max-tokens": options.max_tokens, "the model's positions": max_positions(checkpoint)}
    limit, of = min((limit, name) for name, limit in limits.items() if limit is not None)
    files = {"dataset": options.dataset, "evaluation.dataset": options.evaluation.dataset}
    fitting, dropped = dict[str, list[Example]](), 0
    for (name, file), given_rows in zip(files.items(), (rows, eval_rows), strict=True):
        if file is None:
            continue
        examples = read_examples(
            file,
            options.model,
            objective.read,
            system_prompt=options.data.system_prompt,
            columns=options.data.columns,
            rows=given_rows,
        )
        # A reward model reads a token more.
        fitting[name] = [row for row in examples if row.longest + (objective.kind is not Actor) <= limit]
        long = next((row for row in examples if row.longest + (objective.kind is not Actor) > limit), None)
        if long is not None and (options.data.long_prompts == "refuse" or not fitting[name]):
            raise ValueError(
                f"{place(file, long.line)}: {long.longest} tokens are more than {of}, {limit}; shorten the row, give a "
                "larger --max-tokens where the model has the positions, or drop such rows by --data.long-prompts drop"
            )
        dropped += len(examples) - len(fitting[name])
    longest = max(row.longest for examples in fitting.values() for row in examples)
    Devices.find(options.device).require(options.grid.world_size)
    check_model(options, objective.kind.role, checkpoint, options.grid, longest)
    if objective.reference:
        check_reference(options, Checkpoint(options.reference_folder or options.model), options.grid, longest)
    if isinstance(options, DistillOptions):
        _check_teacher(options)
    inputs = inputs_of(options, fitting)
    changes = changed_inputs(options_as_given, inputs)
    eval_examples = fitting.get("evaluation.dataset", [])
    return CheckedExamples(options, fitting["dataset"], eval_examples, dropped, options_as_given, inputs, changes)


def _check_teacher(options: DistillOptions) -> None:
    check_tokens(TextCodec(options.model), TextCodec(options.teacher))
    sizes = {folder: vocabulary_size(folder) for folder in (options.model, options.teacher)}
    if len(set(sizes.values())) > 1 or options.backend != "parallel" or options.engine.share_prefixes:
        raise ValueError(
            f"a divergence needs backend=parallel without engine.share_prefixes, and vocabularies of one size; got "
            f"{options.backend}, and {', '.join(f'{folder} with {size} entries' for folder, size in sizes.items())}"
        )
