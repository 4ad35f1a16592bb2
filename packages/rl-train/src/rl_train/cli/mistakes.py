"""`mistakes_as_messages`: the exceptions of a command as messages with an exit status."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from ckpt.cli import printable, printable_warnings
from rl_train.processes.errors import RankFailed


class _Stopped(KeyboardInterrupt):
    """Raised when a signal asks the command to end; the argument is the number of the signal."""


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise _Stopped(number)


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the command as Ctrl-C does, to end the ranks and remove temporary files."""
    # An ignored SIGHUP (nohup) stays ignored.
    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    except SystemExit as error:
        # After Ray has started, Ray's handler of SIGTERM exits with the number of the signal.
        if error.code == signal.SIGTERM:
            raise _Stopped(signal.SIGTERM) from None
        raise
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def mistakes_as_messages(after: Callable[[], str] = lambda: "it has written nothing") -> Iterator[None]:
    """Turn exceptions into messages: a user's mistake (exit status 2), a failed rank (1), or a signal (128 + number).

    `after` returns the state of a stopped command, and how to continue it.
    """

    def end(message: str, status: int) -> typer.Exit:
        typer.secho(printable(message), fg="red", err=True)
        return typer.Exit(status)

    try:
        with _signals_unwind(), printable_warnings():
            yield
    except KeyboardInterrupt as stop:
        number = signal.Signals(stop.args[0]) if isinstance(stop, _Stopped) else signal.SIGINT
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        raise end(f"stopped by {name}: {after()}", 128 + number) from None
    except (ValueError, OSError) as mistake:
        raise end(f"error: {mistake}", 2) from None
    except Exception as error:
        if isinstance(error, RankFailed):
            raise end(f"error: {error.mistake or error}", 2 if error.mistake else 1) from None
        # Python would print the message of the exception as it is.
        raise end(traceback.format_exc().rstrip(), 1) from None
