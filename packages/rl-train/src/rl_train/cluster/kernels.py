"""Compiled kernels that the next run finds. This file imports no torch."""

import os
from pathlib import Path


def keep_compiled_kernels() -> None:
    """Let flash-attn-4 keep its compiled kernels in the user's cache folder; variables that are set stay.

    flash-attn-4 reads both variables at import. Triton and torch.compile keep their kernels by default.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser()))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache / "rl-train" / "flash-attn-4"))
