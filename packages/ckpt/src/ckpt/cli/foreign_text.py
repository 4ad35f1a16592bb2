"""`printable`: text of files, models and users, as it may go to a terminal or onto a page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Control characters except tab and the ends of lines: with them a text sets a terminal's title, or clears the screen.
# Marks of direction (U+202A to U+202E, U+2066 to U+2069): with them a reader sees characters in another order.
# Halves of surrogate pairs: no terminal takes them. Python has them for bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def printable(text: object) -> str:
    r"""Return a text whose control characters and marks of direction are written out, such as `\x1b`."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], str(text))


def format_warning(message: object, *_: object, **__: object) -> str:
    """Return a warning as one printable line; it can stand for `warnings.formatwarning`."""
    return f"warning: {printable(message)}\n"


@contextmanager
def printable_warnings() -> Iterator[None]:
    """Print warnings by `format_warning`."""
    before, warnings.formatwarning = warnings.formatwarning, format_warning
    try:
        yield
    finally:
        warnings.formatwarning = before
