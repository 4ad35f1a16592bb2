"""JSON texts of answers: an answer with many log-probs costs no Python object for each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any
from uuid import uuid4

# Stands for a `Raw` in an encoded text; no client knows it.
_MARK = f'"{uuid4().hex}"'


@dataclass(frozen=True)
class Raw:
    """A JSON text among the values of an answer."""

    text: str


def encode(values: Any) -> str:
    """Return values as a JSON text; they may contain `Raw`."""
    texts = list[str]()

    def mark(value: Raw) -> str:
        texts.append(value.text)
        return _MARK[1:-1]

    first, *others = json.dumps(values, default=mark, allow_nan=False).split(_MARK)
    return first + "".join(text + other for text, other in zip(texts, others, strict=True))


def token_entries(names: Sequence[str], log_probs: Sequence[float], *, with_bytes: bool) -> Raw:
    """Return the log-probs of tokens as a list in the form of chat completions.

    Args:
        names: The name of each token.
        log_probs: The log-prob of each token.
        with_bytes: Whether an entry has the bytes of its name.
    """
    entries = [
        f'{{"token": {quoted(name)}, "logprob": {log_prob!r}, '
        f'"bytes": {list(name.encode()) if with_bytes else "null"}, "top_logprobs": []}}'
        for name, log_prob in zip(names, log_probs, strict=True)
    ]
    return Raw(f"[{', '.join(entries)}]")
