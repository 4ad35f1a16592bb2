"""The script that a run was started with, which Megatron's save imports again in a process of its own."""

import sys
from pathlib import Path


def check_entry_script() -> None:
    """Refuse to save from a script without a guard: imported again, it would begin the run anew inside of the save.

    Raises:
        RuntimeError: names the script.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        source = None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # not a script
    if source is not None and "__name__" not in source:
        raise RuntimeError(
            f"{path} saves a checkpoint, for which Megatron-Core starts a process that imports {path} again; put what "
            'the script runs under `if __name__ == "__main__":`'
        )
