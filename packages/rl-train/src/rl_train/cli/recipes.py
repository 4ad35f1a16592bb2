"""The commands that train: `train`, `sft`, `dpo`, `reward` and `distill`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console

from ckpt.cli import printable
from rl_train.cli.mistakes import mistakes_as_messages
from rl_train.cluster.fork_server import prepare
from rl_train.options.command import PANELS, OptionsCommand, takes_options
from rl_train.options.fields import place_of
from rl_train.options.file_options import DistillOptions, DpoOptions, FileOptions, RewardModelOptions, SftOptions
from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve
from rl_train.options.run_options import RunOptions


class _Command(NamedTuple):
    """A command: its options, the text of its help, and an example of its arguments."""

    kind: type[RunOptions]
    text: str
    example: str


_COMMANDS = (
    _Command(
        TrainOptions,
        "Train a policy on prompts from a file with a reward in Python",
        "--prompts prompts.jsonl --reward rewards:exact",
    ),
    _Command(SftOptions, "Train a policy on the answers of chats, on completions or on texts", "--dataset chats.jsonl"),
    _Command(
        DpoOptions,
        "Train a policy on preferences by DPO, IPO, SimPO or KTO",
        "--dataset pairs.jsonl --loss ipo --lora-rank 16",
    ),
    _Command(
        RewardModelOptions, "Train a reward model on pairs, on labels, or on labelled steps", "--dataset pairs.jsonl"
    ),
    _Command(
        DistillOptions,
        "Train a policy on a teacher's distributions over the tokens of a file",
        "--teacher TEACHER --dataset chats.jsonl",
    ),
)


# The options of each command that trains, by its name.
RECIPES = {command.kind.command: command.kind for command in _COMMANDS}


def add_recipes(app: typer.Typer) -> None:
    """Add the commands that train."""
    for kind, text, example in _COMMANDS:
        command, beginning = _command(kind), f"rl-train {kind.command}"
        command.__doc__ = (
            f"{text}; the same command resumes a run that was stopped.\n\n"
            "Every switch has a --no- form, such as --no-offload."
        )
        takes_options(
            command,
            kind,
            PANELS,
            config=(
                Path | None,
                None,
                typer.Option(help="YAML or TOML file of options; the command line overrides it."),
            ),
            dry_run=(bool, False, typer.Option("--dry-run", help="Check everything, print the checked run, and end.")),
            as_json=(bool, False, typer.Option("--json", help="Print the last metrics, or the checked run, as JSON.")),
        )
        lines = (
            f"{beginning} --model MODEL {example} --out RUN --dry-run",
            f"{beginning} --config run.yaml --steps 200",
        )
        app.command(kind.command, cls=OptionsCommand, epilog=examples(*lines))(command)


def examples(*lines: str) -> str:
    """Return examples for the end of a command's help."""
    return "\n\n".join(("Examples:", *lines))


def _command(kind: type[RunOptions]) -> Callable[..., None]:
    """Return the command that trains with the options of a kind."""

    def train(**arguments: Any) -> None:
        _train(kind, **arguments)

    return train


def _train(kind: type[RunOptions], *, config: Path | None, dry_run: bool, as_json: bool, **arguments: Any) -> None:
    checked_run: Any = None

    def after() -> str:
        from rl_train.loop.folder import how_to_go_on

        return "no step was done" if checked_run is None or dry_run else how_to_go_on(checked_run.options)

    with mistakes_as_messages(after), ExitStack() as stack:
        if sys.stderr.isatty():
            typer.echo("checking the options, the model and the rows", err=True)
        options = resolve(kind, config, arguments)
        if not (dry_run or getattr(options, "ray", False)):
            prepare("rl_train.loop.run", "rl_train.loop.file_recipe")
        # Imported here: the models take seconds to import, and `--help` needs none of them.
        from rl_train.cluster.machines import Machines
        from rl_train.loop.folder import check_unlocked, steps_done
        from rl_train.report.terminal import Display, counted, two_columns

        check, rehearse, train = functions_of(options)
        machines = Machines.here()
        stack.enter_context(machines.failures_told())
        checked_run = check(options)
        if dry_run:
            check_unlocked(options.out, told)
            rehearse(checked_run)
            if as_json:
                typer.echo(json.dumps(checked_run.describe()))
            else:
                Console().print(two_columns(checked_run.summary(), "This run can start; --json prints every option."))
            return
        grid = options.dims or "one rank"
        title = f"rl-train: {options.learned} of {options.model.name} ({grid}), to {place_of(options.out)}"
        if not machines.first:
            train(checked_run, lambda event: None)
            return
        steps = checked_run.options.steps
        with Display(steps, title=title) as display:
            result = train(checked_run, display)
            model, page = (place_of(options.out / name) for name in (options.trained[0], "report.html"))
            done = f"done: after {counted(steps, 'step')} the model is in {model}, the curves in {page}"
            display({"message": done if steps_done(options.out) == steps else f"stopped: {after()}"})
        if as_json:
            typer.echo(json.dumps(result))


def told(event: Mapping[str, Any]) -> None:
    """Print the message of a check."""
    typer.echo(printable(event["message"]), err=True)


def functions_of(options: RunOptions) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return what checks a run with these options, what a dry run tries beyond that, and what trains."""
    if isinstance(options, FileOptions):
        from rl_train.loop import file_recipe
        from rl_train.loop.checked_examples import check_examples

        return check_examples, lambda checked_run: None, file_recipe.train
    from rl_train.loop import run
    from rl_train.loop.checked_run import check_run
    from rl_train.rewards.function import Rewards

    return check_run, lambda checked_run: Rewards(checked_run.options).close(), run.train
