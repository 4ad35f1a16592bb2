"""The console command `rl-models`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default cuda where there is one.")]


@app.callback()
def main() -> None:
    """Sharded actors and critics for reinforcement learning on language models."""


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints and the reward curve.")] = Path("quickstart"),
    steps: Annotated[int, typer.Option(min=10, help="Steps of learning.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights, the prompts and the draws.")] = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Make a small model, teach it a small task by PPO on 2 ranks, save it, and check it against transformers."""
    with _mistakes_as_messages():
        # The models take seconds to import; `--help` and a wrong option should not.
        from rl_models.quickstart import Display, QuickstartOptions, result_table
        from rl_models.quickstart import quickstart as run

        options = QuickstartOptions(out=out, steps=steps, seed=seed, device=device)
        with Display(steps) as display:
            result = run(options, display)
        if as_json:
            typer.echo(json.dumps(result))
        else:
            Console().print(result_table(result))


@app.command()
def score(
    model: Annotated[Path, typer.Option(help="Checkpoint folder of a causal language model.")],
    data: Annotated[Path, typer.Option(help='JSON lines: {"tokens": [ids]} or {"text": "..."}.')],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks to start.")] = 1,
    critic: Annotated[Path | None, typer.Option(help="Checkpoint folder of a value model.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the result; default standard output.")] = None,
    temperature: Annotated[float, typer.Option(min=1e-6, help="The logits are divided by it.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of one forward pass.")] = 16384,
    device: Device = None,
) -> None:
    """Log-probability, entropy and (with a critic) value of every token, as JSON lines in the order of the data."""
    with _mistakes_as_messages():
        from rl_models.score import ScoreOptions, read_sequences
        from rl_models.score import score as run

        options = ScoreOptions(model, critic, tp, temperature, max_tokens, device)
        sequences = read_sequences(data, model, max_tokens)
        console = Console(stderr=True)
        with _output(out) as file, Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("scoring", total=len(sequences))

            def write(record: dict[str, Any]) -> None:
                file.write(json.dumps(record) + "\n")
                progress.advance(task)

            run(options, sequences, write)


@contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that appears when it is complete."""
    if path is None:
        yield sys.stdout
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _mistakes_as_messages() -> Iterator[None]:
    """A user's mistake is one line and exit status 2; a failed rank is shown in its own words, status 1."""
    from rl_models.launch import RankFailed

    try:
        yield
    except RankFailed as failure:
        typer.secho(f"error: {failure.mistake or failure}", fg="red", err=True)
        raise typer.Exit(2 if failure.mistake else 1) from None
    except (ValueError, OSError) as mistake:
        typer.secho(f"error: {mistake}", fg="red", err=True)
        raise typer.Exit(2) from None
