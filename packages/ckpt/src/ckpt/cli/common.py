"""Options and output that the commands share: tables and progress for people, JSON for programs."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from ckpt.cli.foreign_text import printable, printable_warnings
from ckpt.files.mirror import mirrored
from ckpt.layout.place import LayerPlacement

if TYPE_CHECKING:
    import torch

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel size.")]
Vpp = Annotated[int, typer.Option("--vpp", min=1, help="Virtual pipeline stages of each rank.")]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Expert parallel size.")]
Etp = Annotated[int | None, typer.Option("--etp", min=1, help="Tensor parallel size of each expert (default: --tp).")]
Layers = Annotated[
    str | None,
    typer.Option("--layers", help="The layers of each stage, such as 7,8,8,7 (default: by their cost)."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Cast weights to this dtype, such as bfloat16 (default: as stored).")
]
VocabMultiple = Annotated[
    int, typer.Option("--vocab-multiple", min=1, help="Pad each rank's vocabulary rows to a multiple of this.")
]


def read_layers(text: str | None) -> LayerPlacement:
    """Return the layer placement that `--layers` names."""
    if text is None:
        return None
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers={text!r} must be numbers such as 7,8,8,7") from None


def read_dtype(text: str | None) -> torch.dtype | None:
    """Return the floating-point dtype that `--dtype` names."""
    if text is None:
        return None
    from ckpt.files.dtypes import dtype_of_name

    dtype = dtype_of_name(text)
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"--dtype={text!r} is no type of weights; use one such as bfloat16 or float32")
    return dtype


class _Stopped(BaseException):
    """A signal has asked the command to end."""


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let signals that end a process raise `_Stopped` instead, so that saves remove their temporary folders."""

    def stop(number: int, _frame: object) -> None:
        raise _Stopped(signal.Signals(number))

    # Python allows handlers in the main thread only; a command in another thread runs without them.
    main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def reports_mistakes() -> Iterator[None]:
    """Turn a ValueError or OSError of a command, and a signal to stop, into one line on standard error; a decorator.

    The exit code is 2 for an error, and 128 plus the signal's number for a signal (130 for Ctrl-C).
    """
    try:
        with _signals_raise(), warnings.catch_warnings(), printable_warnings():
            # Without numpy, torch warns when it is imported; no command needs numpy.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            yield
    except (ValueError, OSError) as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except typer.Exit:
        raise
    except Exception:
        # Python would print the message of the exception as it is.
        echo(traceback.format_exc().rstrip(), err=True)
        raise typer.Exit(1) from None
    except _Stopped as stopped:
        (number,) = stopped.args
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        typer.echo(
            f"stopped by {name}: unfinished output is removed, and a folder that was to be replaced is complete",
            err=True,
        )
        raise typer.Exit(128 + number) from None


def takes_urls(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let arguments of a command be URLs; the command gets the folders of their mirrors (`ckpt.files.mirror`)."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def on_mirrors(**arguments: Any) -> None:
            with contextlib.ExitStack() as stack:
                for name in names:
                    if arguments[name] is not None:
                        arguments[name] = stack.enter_context(mirrored(arguments[name]))
                command(**arguments)

        return on_mirrors

    return decorate


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield the update function of a progress bar with GB/s; the bar appears if standard error is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def echo(text: str, *, err: bool = False) -> None:
    """Print a text that may have names and messages of foreign files."""
    typer.echo(printable(text), err=err)


def print_json(value: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; with empty column names it has no header."""
    table = Table(*(Column(name, overflow="fold") for name in columns), show_header=any(columns))
    for row in rows:
        # rich would read brackets in a plain string as markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console()
    console.print(Text(printable(title)), soft_wrap=True)
    console.print(table)
