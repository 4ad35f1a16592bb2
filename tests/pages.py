"""The fenced blocks of the pages in docs/, for the tests that run them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SNIPPET = re.compile(r'--8<-- "([\w./-]+?)(?::([\w-]+))?"')
_BLOCK = re.compile(
    r"(?:<!-- not run: ([^\n]+) -->\n+)?^(?P<indent> *)(```+|~~~+) *([^\n]*)\n(.*?)^(?P=indent)\3 *$",
    re.MULTILINE | re.DOTALL,
)
# A line of a block that is indented by four columns, and begins with one of our commands or with pip.
_INDENTED = re.compile(r"^ {4,}(?:\$ )?((?:rl-train|ckpt|pip install) [^\n]+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page, from docs/ on; `../README.md` for one beside docs/.
        line: The number of the block's first line.
        language: "python", "bash", "text" and so on; empty without one.
        code: The text between the fences.
        reason: Why no test runs the block: the comment `<!-- not run: REASON -->` before it; empty without one.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"docs/{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page of docs/, in order."""
    text = (DOCS / page).read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start(3)) + 2,
            found[4].strip(" {.}").split(" ")[0],
            textwrap.dedent(found[5]) if found["indent"] else found[5],
            found[1] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def indented_commands(page: str) -> list[str]:
    """Return the commands of a page that stand in no fence, each on one line."""
    text = re.sub(r"\\\n\s*", " ", (DOCS / page).read_text())
    return _INDENTED.findall(_BLOCK.sub("", text))


def programs(page: str) -> str:
    """Return the Python blocks of a page that can run, as one program."""
    return "\n".join(one.code for one in blocks(page) if one.language == "python" and not one.reason)


def expanded(word: str) -> list[str]:
    """Return what a shell makes of a word with at most one pair of braces."""
    before, brace, rest = word.partition("{")
    inside, _, after = rest.partition("}")
    return [f"{before}{one}{after}" for one in inside.split(",")] if brace else [word]
