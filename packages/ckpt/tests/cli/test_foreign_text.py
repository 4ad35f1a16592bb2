from __future__ import annotations

import os
import warnings

import pytest

from ckpt.cli.foreign_text import printable, printable_warnings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x1b]52;c;Y29weQ==\x1b\\\x1b[2J", r"\x1b]0;title\x07\x1b]52;c;Y29weQ==\x1b\\x1b[2J"),
        ("\x9b2J\x90\x7f\r\b\x00", r"\x9b2J\x90\x7f\r\x08\x00"),
        ("".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))), r"\u202a\u202b\u202c\u202d\u202e"),
        (os.fsdecode(b"bytes \xff"), r"bytes \udcff"),
        ("two\tcolumns\r\n\\x1b [red]«½» 語 שלום 😀", "two\tcolumns\r\n\\x1b [red]«½» 語 שלום 😀"),
    ],
)
def test_what_rules_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert printable(text).startswith(shown)
    assert printable(printable(text)) == printable(text)
    assert all(letter.isprintable() or letter in "\t\r\n" for letter in printable(text))
    printable(text).encode()


def test_a_warning_is_one_printable_line() -> None:
    before = warnings.formatwarning
    with printable_warnings():
        line = warnings.formatwarning(UserWarning("a folder \x1b[2J"), UserWarning, "file.py", 7)
    assert line == "warning: a folder \\x1b[2J\n"
    assert warnings.formatwarning is before
