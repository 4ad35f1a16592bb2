"""Count the bytes of tensors that are read and written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest


@contextmanager
def counted(name: Literal["preadv", "pwritev"]) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each call of `os.preadv` or `os.pwritev`."""
    call, counts = getattr(os, name), list[int]()

    def counting(*args: Any) -> int:
        counts.append(call(*args))
        return counts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, counting)
        yield counts
