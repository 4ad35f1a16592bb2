"""The commands that draw responses with a model: `generate` and `evaluate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ckpt.cli import printable
from rl_train.cli.mistakes import mistakes_as_messages
from rl_train.cli.recipes import examples
from rl_train.cluster.fork_server import prepare
from rl_train.options.command import OptionsCommand, takes_options
from rl_train.options.draw_options import EvaluateOptions, GenerateOptions
from rl_train.options.resolve import resolve


def add_draws(app: typer.Typer) -> None:
    """Add the commands that draw responses."""
    model = (Path, ..., typer.Argument(help="Checkpoint folder, or name on a hub.", show_default=False))
    as_json = (bool, False, typer.Option("--json", help="Print the metrics as one JSON object."))
    takes_options(generate, GenerateOptions, model=model)
    takes_options(evaluate, EvaluateOptions, model=model, as_json=as_json)
    lines = {
        generate: "rl-train generate MODEL --prompts prompts.jsonl --out responses.jsonl",
        evaluate: "rl-train evaluate MODEL --prompts test.jsonl --reward number-match --samples 8",
    }
    for command, line in lines.items():
        app.command(command.__name__, cls=OptionsCommand, epilog=examples(line))(command)


def generate(**arguments: Any) -> None:
    """Draw responses to prompts, as JSON lines; without --prompts, chat with the model on the terminal."""
    with mistakes_as_messages(lambda: "the same command starts again"):
        options = resolve(GenerateOptions, None, arguments)
        if options.prompts is not None:
            _draw(options)
            return
        from rl_train.loop.draw_run import chat

        typer.echo("write a message, and end with Ctrl-D", err=True)
        messages = (line.rstrip("\n") for line in sys.stdin if line.strip())
        for _ in chat(options, messages, lambda piece: typer.echo(printable(piece), nl=False)):
            typer.echo()


def evaluate(**arguments: Any) -> None:
    """Score responses to prompts: the mean reward, pass@k and maj@k, with the engines and rewards of train."""
    as_json = arguments.pop("as_json")
    with mistakes_as_messages(lambda: "the same command starts again"):
        values = _draw(resolve(EvaluateOptions, None, arguments))
        if as_json:
            typer.echo(json.dumps(values))
        else:
            from rl_train.report.terminal import two_columns

            Console().print(two_columns(values, "rl-train evaluate"))


def _draw(options: GenerateOptions) -> dict[str, float]:
    """Draw responses, write their records, and return their metrics."""
    prepare("rl_train.loop.draw_run")
    from rl_train.data.mixture import split_sources
    from rl_train.loop.draw_run import draw
    from rl_train.loop.score import open_result
    from rl_train.report.terminal import Display

    evaluates = isinstance(options, EvaluateOptions)
    result: Any = nullcontext(None if evaluates else sys.stdout)
    if options.out is not None:
        inputs = [options.model, *(() if options.prompts is None else split_sources(options.prompts))]
        result = open_result(options.out, *inputs, keys={"line", "prompt", "response"})
    with result as file, Display(1) as display:

        def show(event: Mapping[str, Any]) -> None:
            if "record" not in event:
                display(event)
            elif file is not None:
                file.write(json.dumps(event["record"]) + "\n")

        return draw(options, show)
