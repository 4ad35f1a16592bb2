"""Keep compiled kernels for the next run. This file imports no torch."""

import os
from pathlib import Path


def keep_compiled_kernels() -> None:
    """Keep the compiled kernels of flash-attn-4 and quack in the user's cache folder; variables that are set stay.

    Both read the variables at import. quack's default is a temporary folder. Triton and torch.compile use the cache.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path("~/.cache").expanduser()))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache / "rl-train" / "flash-attn-4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache / "rl-train" / "quack"))
