"""`check_examples`: check the options of a recipe that learns from a file, and read its rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckpt import Checkpoint
from parallel_models.engine import checkpoint_folder, max_positions
from rl_models import Actor
from rl_train.cluster.launch import Devices, require_devices
from rl_train.data.codec import TextCodec
from rl_train.data.examples import Example, ExampleReader
from rl_train.data.mixture import Mixture, check_mixture, mixture_of, read_sources, sources_of
from rl_train.data.prompts import vocabulary_size
from rl_train.data.sources import place
from rl_train.loop.checked_models import check_model, check_reference, check_tokens, summary, with_dtype
from rl_train.loop.file_objectives import OBJECTIVES
from rl_train.loop.folder import check_folder
from rl_train.loop.resume import changed_inputs, inputs_of
from rl_train.loop.tracing import check_profile
from rl_train.options.file_options import DistillOptions, FileOptions, mistakes
from rl_train.report.loggers import check_loggers
from rl_train.report.metrics_server import check_port

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

    def mixture(self) -> Mixture[Example]:
        """Return the rows in the order of the run."""
        options = self.options
        return mixture_of(options.dataset, options.data, options.seed, self.examples, _RunExamples(options))

    def describe(self) -> dict[str, Any]:
        """Return the run as JSON values: every resolved option, and the values derived from the options."""
        sequences = [sequence for example in self.examples for sequence in example.sequences]
        return self.options.to_json() | {
            "ranks": self.options.grid.world_size,
            "number_of_rows": "not counted" if self.options.data.shuffle_buffer else len(self.examples),
            "number_of_eval_rows": len(self.eval_examples),
            "number_of_dropped_rows": self.dropped,
            "learned_tokens": sum(label >= 0 for _, labels in sequences for label in labels),
            "longest_sequence": max(example.longest for example in self.examples),
            "passes_over_rows": "not counted"
            if self.options.data.shuffle_buffer
            else round(self.options.steps * self.options.batch_size / len(self.examples), 3),
        }

    def summary(self) -> dict[str, Any]:
        """Return the summary of a dry run: some entries of `describe`, and all options that are given."""
        options = self.options
        required = {name: options.value(name) for name in ("model", "dataset", "teacher") if name in options.names()}
        return summary(options, type(options)(**required), self.describe(), _SHOWN)


def check_examples(
    options: FileOptions,
    rows: Iterable[Any] | None = None,
    eval_rows: Iterable[Any] | None = None,
    *,
    devices: Devices | None = None,
) -> CheckedExamples:
    """Check the options against the files and the devices, and read the rows.

    Args:
        options: The options of the run.
        rows, eval_rows: Rows that replace the files `options.dataset` and `options.evaluation.dataset`, as for
            `rl_train.loop.check_run`.
        devices: All devices of a run that starts elsewhere (default: those of this machine).

    Raises:
        ValueError: An option or a row is wrong; the error names it and the fix.
    """
    for mistake in mistakes(options):
        raise ValueError(mistake)
    check_folder(options.of_epochs(sys.maxsize))  # without the rows, all steps may be right
    check_loggers(options.logger)
    check_port(options.metrics_port)
    options_as_given = options
    folders = {name: options.value(name) for name in ("model", "reference", "teacher") if name in options.names()}
    options = options.model_copy(
        update={name: folder and Path(checkpoint_folder(folder)) for name, folder in folders.items()}
    )
    checkpoint, objective = Checkpoint(options.model), OBJECTIVES[options.learned]
    engine = with_dtype(options.engine, checkpoint, devices or Devices.find(options.device))
    options = options.model_copy(update={"engine": engine})
    reader, window = _RunExamples(options), options.data.shuffle_buffer
    check_mixture(options.dataset, options.data, rows)
    sources = sources_of(options.dataset, rows)
    examples, dropped = read_sources(reader, sources, rows, window)
    eval_examples, eval_file = list[Example](), options.evaluation.dataset
    if eval_file is not None:
        eval_examples, eval_dropped = read_sources(reader, sources_of(eval_file, eval_rows), eval_rows)
        dropped += eval_dropped
    options, options_as_given = (each.of_epochs(len(examples)) for each in (options, options_as_given))
    check_profile(options)
    longest = reader.limit[0] if window else max(row.longest for row in (*examples, *eval_examples))
    require_devices(options.device, options.grid.world_size, devices)
    check_model(options, objective.kind.role, checkpoint, options.grid, longest)
    if objective.reference:
        check_reference(options, Checkpoint(options.reference_folder or options.model), options.grid, longest)
    if isinstance(options, DistillOptions):
        _check_teacher(options)
    training_inputs: Sequence[Example | Path] = sources if window else examples
    inputs = inputs_of(options, {"dataset": training_inputs, "evaluation.dataset": eval_examples})
    changes = changed_inputs(options_as_given, inputs)
    return CheckedExamples(options, examples, eval_examples, dropped, options_as_given, inputs, changes)


@dataclass(frozen=True)
class _RunExamples:
    """Reads the rows of a run, which must fit its options and the model's positions."""

    options: FileOptions

    @cached_property
    def _reader(self) -> ExampleReader:
        options, data = self.options, self.options.data
        return ExampleReader(options.model, data.system_prompt, data.columns, reader=OBJECTIVES[options.learned].read)

    @cached_property
    def limit(self) -> tuple[int, str]:
        """Return the maximum number of tokens of a sequence, and what limits it."""
        limits = {"--max-tokens": self.options.max_tokens}
        limits["the model's positions"] = max_positions(Checkpoint(self.options.model)) or self.options.max_tokens
        return min((limit, name) for name, limit in limits.items())

    def rows(self, source: Path, rows: Iterable[Any] | None = None, start: int = 0) -> Iterator[tuple[int, Any]]:
        """See `Reader`."""
        return self._reader.rows(source, rows, start)

    def read(self, source: Path, number: int, row: Any) -> Example | None:
        """See `Reader`."""
        example, (limit, of) = self._reader.read(source, number, row), self.limit
        classes = max(2, self.options.engine.num_labels or 2)
        if (label := max(max(sequence.labels) for sequence in example.sequences)) >= classes:
            raise ValueError(
                f"{place(source, number)}: the label {label} is not below {classes}, the number of labels; give "
                f"--engine.num-labels {label + 1}, or the number of all labels"
            )
        # A reward model reads a token more.
        if example.longest + (OBJECTIVES[self.options.learned].kind is not Actor) <= limit:
            return example
        if self.options.data.long_prompts == "refuse":
            raise ValueError(
                f"{place(source, number)}: {example.longest} tokens are more than {of}, {limit}; shorten the row, give "
                "a larger --max-tokens where the model has the positions, or drop such rows by --data.long-prompts drop"
            )
        return None


def _check_teacher(options: DistillOptions) -> None:
    check_tokens(TextCodec(options.model), TextCodec(options.teacher))
    sizes = {folder: vocabulary_size(folder) for folder in (options.model, options.teacher)}
    if len(set(sizes.values())) > 1 or options.backend != "parallel" or options.engine.share_prefixes:
        raise ValueError(
            f"a divergence needs backend=parallel without engine.share_prefixes, and vocabularies of one size; got "
            f"{options.backend}, and {', '.join(f'{folder} with {size} entries' for folder, size in sizes.items())}"
        )
