"""The folder of a run, `--out`: check it, write its options, and find the step to resume from."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ckpt.files import Lock, check_target, lock_file, remove_abandoned
from ckpt.training import open_step, steps_of_latest
from rl_train.cluster.machines import Machines
from rl_train.data.mixture import split_sources
from rl_train.loop.recipe import BEST, Tell
from rl_train.loop.resume import COMMAND, INPUTS as DIGESTS, check_options
from rl_train.loop.run_store import RunStore
from rl_train.options.fields import place_of
from rl_train.options.run_options import RunOptions
from rl_train.report.html_report import PAGE, VERSIONS, versions
from rl_train.report.lines import LINES, read_lines, read_options, replace_text
from rl_train.report.loggers import names
from rl_train.rewards.judge import JUDGEMENTS
from rl_train.trajectories.rollout_files import ROLLOUTS

# Options whose paths a run reads, and reads again when it is resumed.
INPUTS = ["model", "critic.model", "reference", "teacher", "prompts", "evaluation.prompts"]
INPUTS += ["dataset", "evaluation.dataset"]
# The file of every run.
MARK = "options.json"

# The adapters of each model (`--lora-rank`), in PEFT's format, beside its merged checkpoint.
ADAPTERS = {"actor": "actor-adapter", "critic": "critic-adapter"}


def check_folder(options: RunOptions) -> None:
    """Raise ValueError if the folder cannot take the results, holds other files, or contains an input."""
    if (store := RunStore.of(options.out)) is not None:
        if (count := Machines.here().count) > 1:
            raise ValueError(
                f"out is a URL, and torchrun has started {count} commands, of which each would have a working copy of "
                "its own; give a folder that all machines share"
            )
        store.pull()
    trained = options.trained
    adapters = [] if options.lora is None else [ADAPTERS[name] for name in trained]
    further_checkpoints = [BEST] * options.keeps_best + adapters
    check_output(
        options.out, files=[MARK, VERSIONS, PAGE, JUDGEMENTS, *LINES], checkpoints=[*trained, *further_checkpoints]
    )
    folders = [f"training/{name}" for name in trained] + ["tensorboard"] * ("tensorboard" in names(options.logger))
    for name in [*folders, ROLLOUTS]:
        check_writable(options.out / name)
    _check_inputs(options)
    check_foreign(options.out, mark=MARK)
    if (options.out / MARK).is_file():
        check_options(options, read_options(options.out, "remove it, or choose another out"))
    for name in LINES:
        read_lines(options.out / name)
    _check_steps(options)


def _check_steps(options: RunOptions) -> None:
    """Refuse fewer steps than are done, and a training checkpoint that cannot be opened."""
    training, trained = options.out / "training", options.trained
    step, place = newest_step(training, trained), place_of(options.out)
    if step > options.steps:
        also = "" if place == str(options.out) else f", and remove {options.out}, its copy on this machine"
        raise ValueError(
            f"steps={options.steps}, but {place} has gone on to step {step}; give --steps {step} or more, choose "
            f"another out, or go back: write the name of an earlier step's folder into {place}/training/*/latest{also}"
        )
    for name in trained if step else ():
        open_step(training / name, step)


@contextmanager
def locked(folder: Path, tell: Tell = lambda event: None) -> Iterator[None]:
    """Create the folder of a run, and hold its lock and that of its URL: two runs would mix their checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    with Lock(folder / MARK, _work(folder)):
        store = RunStore.of(folder)
        with nullcontext() if store is None else store.lock.held(tell):
            yield


def check_unlocked(folder: Path, tell: Tell = lambda event: None) -> None:
    """Raise ValueError if another run is at work in this folder or at its URL; names its process; tell of a wait."""
    if lock_file(folder / MARK).exists():
        Lock(folder / MARK, _work(folder)).release()
    if (store := RunStore.of(folder)) is not None:
        store.lock.check_free(tell)


def _work(folder: Path) -> str:
    return f"runs in {place_of(folder)}"


def _check_inputs(options: RunOptions) -> None:
    """Refuse inputs that a result or a training checkpoint would replace."""
    for name in INPUTS:
        if name not in options.names() or (paths := options.value(name)) is None:
            continue
        results = [options.out / result for result in ("critic", *options.trained, "training", BEST)]
        for input_path, replaced in itertools.product(split_sources(paths), results):
            if input_path.resolve().is_relative_to(replaced.resolve()):
                raise ValueError(
                    f"{name}={input_path} is in {replaced}, which the results of this run replace; choose another out "
                    f"than {place_of(options.out)}"
                )


def write_options(options: RunOptions, inputs: Mapping[str, Any] | None = None) -> None:
    """Create the folder and write the options of the run and the digests of its inputs, then its packages' versions."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name, values in (
        (MARK, options.to_json() | {COMMAND: options.command, DIGESTS: inputs or {}}),
        (VERSIONS, versions()),
    ):
        replace_text(options.out / name, json.dumps(values, indent=2) + "\n")


@contextmanager
def saves_cleaned(options: RunOptions) -> Iterator[None]:
    """Remove the remains of interrupted saves, before and after the run inside; saves of living processes stay."""

    def clean() -> None:
        for folder in (options.out, *(options.out / "training" / name for name in options.trained)):
            remove_abandoned(folder.glob(".*.saving-*"))

    clean()
    try:
        yield
    finally:
        clean()


def how_to_go_on(options: RunOptions) -> str:
    """Return a sentence about the steps that a stopped run has done, and the step at which the same command goes on."""
    steps, place = f"{steps_done(options.out)} of {options.steps} steps are done", place_of(options.out)
    saved = newest_step(options.out / "training", options.trained)
    if not saved:
        return f"{steps}, and {place} has no training checkpoint; the same command starts from the beginning"
    return f"{steps}; the same command goes on after step {saved}, the newest training checkpoint in {place}"


def steps_done(folder: Path) -> int:
    """Return the last step in the metrics of a run; 0 without one."""
    records = read_lines(folder / LINES[0])
    return int(records[-1]["step"]) if records else 0


def newest_step(training: Path, models: Iterable[str]) -> int:
    """Return the newest step at which all of these models have a training checkpoint; 0 without one.

    Checkpoints after the step that `latest` names are ignored: the run has been set back behind them.
    """
    return max(set.intersection(*(set(steps_of_latest(training / name)) for name in models)), default=0)


def check_output(folder: Path, *, files: Sequence[str] = (), checkpoints: Sequence[str] = ()) -> None:
    """Raise ValueError if these files and checkpoint folders cannot be written, or would replace foreign files."""
    check_writable(folder)
    for file in (folder / name for name in files):
        if file.is_dir():
            raise ValueError(
                f"{file} is a folder, and a file is to be written there; choose another than {place_of(folder)}"
            )
        if file.exists() and not os.access(file, os.W_OK):
            raise ValueError(f"{file} cannot be written to; choose another folder than {place_of(folder)}")
    for name in checkpoints:
        check_target(folder / name)


def check_foreign(folder: Path, *, mark: str) -> None:
    """Raise ValueError if `folder` holds files but no `mark`, which every folder of such results holds."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    # A kill may leave a temporary file or folder of the mark, and the lock.
    own_prefixes = (f".{mark}.", lock_file(folder / MARK).name)
    if mark not in names and (foreign_names := [name for name in names if not name.startswith(own_prefixes)]):
        raise ValueError(
            f"{place_of(folder)} holds other files, {foreign_names[:5]} ({len(foreign_names)} in all), and no {mark} "
            "of an earlier run; choose another out, or move them elsewhere"
        )


def check_writable(folder: Path) -> None:
    """Raise ValueError unless files can be written into `folder`, or into its nearest existing parent."""
    existing = folder.absolute()
    try:
        while not _is_there(existing):
            existing = existing.parent
        if existing.is_file() and existing == folder.absolute():
            raise ValueError(f"{folder} exists and is no folder; choose another")
        if existing.is_file():
            raise ValueError(f"{existing} is a file, so {folder} cannot be a folder; choose another")
        # Probe with an anonymous temporary file: permissions alone do not show a read-only or full disk.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = f"{existing} cannot be written to ({error.strerror})"
        raise ValueError(f"{why}; choose another folder than {place_of(folder)}") from None


def _is_there(path: Path) -> bool:
    """Say whether the path exists, as a dangling link too; raise OSError for an impossible name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
