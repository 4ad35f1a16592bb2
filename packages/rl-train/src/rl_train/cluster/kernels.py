"""Compiled kernels that the next run finds. This file imports no torch."""

import os
from pathlib import Path


def keep_compiled_kernels() -> None:
    """Let flash-attn-4 and quack keep their compiled kernels in the user's cache folder; variables that are set stay.

    Both read the variables at import. quack would use a temporary folder. Triton and torch.compile use the user's.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser()))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache / "rl-train" / "flash-attn-4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache / "rl-train" / "quack"))
