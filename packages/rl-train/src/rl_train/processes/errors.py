"""Errors that leave a process: bounded, and readable in every other process."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Maximum number of characters of a value in a message, and of characters or bytes of an error.
_MOST_SHOWN, _MOST_OF_ERROR = 500, 50_000


class RankFailed(RuntimeError):
    """A rank raised an exception, or its process ended (`died`); the message holds the traceback of the rank.

    `mistake` is the text of a ValueError or of a disk error, to show without a traceback; None for other errors.
    """

    def __init__(self, message: str, mistake: str | None = None, died: bool = False) -> None:
        super().__init__(message)
        self.mistake, self.died = mistake, died


class ProcessLost(RuntimeError):
    """A process has ended, or has been ended because it was silent or late.

    Attributes:
        reason: The message without the names of the process and the method.
        late: Whether a call took longer than its limit.
    """

    def __init__(self, message: str, reason: str = "", late: bool = False) -> None:
        super().__init__(message)
        self.reason, self.late = reason or message, late


@dataclass(frozen=True)
class Raised:
    """An exception of another process.

    Attributes:
        text: The traceback.
        mistake: The message of a ValueError, the caller's mistake; None for other exceptions.
        pickled: The exception; empty if the exception cannot be pickled or is too large.
    """

    text: str
    mistake: str | None
    pickled: bytes

    def exception(self) -> Exception:
        """Return the exception; a ValueError or a RuntimeError if its class is not imported in this process."""
        error = None
        with suppress(Exception):
            error = _Imported(io.BytesIO(self.pickled)).load()
        if isinstance(error, Exception):
            return error
        if self.mistake is not None:
            return ValueError(self.mistake)
        return RuntimeError(self.text.strip().splitlines()[-1])


class _Imported(pickle.Unpickler):
    """Unpickle without imports: the class of an exception may belong to a package that only the other process needs."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not imported")
        return super().find_class(module, name)


def portable(error: BaseException) -> Raised:
    """Return an exception in the form that leaves a process."""
    pickled = b""
    with suppress(Exception):
        pickled = pickle.dumps(error)
    mistake = shown(error, str, _MOST_OF_ERROR) if isinstance(error, ValueError) else None
    text = cut("".join(traceback.format_exception(error)), _MOST_OF_ERROR)
    return Raised(text, mistake, pickled if len(pickled) <= _MOST_OF_ERROR else b"")


def shown(value: Any, form: Callable[[Any], str] = repr, limit: int = _MOST_SHOWN) -> str:
    """Return a text of a user's value for a message: at most `limit` characters, even if `form` raises."""
    try:
        text = form(value)
    except BaseException as error:
        text = f"<{type(value).__name__}, whose {form.__name__} raises {type(error).__name__}>"
    return cut(text, limit)


def cut(text: str, limit: int) -> str:
    """Return a text, or its beginning and its length if it has more than `limit` characters, as `encodable` does."""
    return encodable(text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)")


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: halves of surrogate pairs are joined, and U+FFFD stands for single ones."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def stopped(pids: Mapping[int, int | None]) -> dict[int, str]:
    """Return the ranks whose process on this machine is stopped, as by SIGSTOP, with an error; only Linux tells."""
    errors = {}
    for rank, pid in pids.items():
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in ("T", "t"):
                why = "by a debugger, Ctrl-Z or SIGSTOP, and the other ranks waited for it"
                errors[rank] = f"is stopped: process {pid} waits for SIGCONT, {why}"
    return errors
