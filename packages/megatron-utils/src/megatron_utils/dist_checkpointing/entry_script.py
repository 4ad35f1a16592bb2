"""A check of the entry script of a run, which Megatron's save imports again in a second process."""

import ast
import sys
from pathlib import Path


def check_entry_script() -> None:
    """Refuse to save from a script without a guard, because importing the script would start the run again.

    The guard is an `if` at the top level that compares `__name__` with `"__main__"`. `python -m package` needs no
    guard: `multiprocessing` does not import a `__main__.py` again.

    Raises:
        RuntimeError: The script has no guard; the error names the script.
    """
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", "")
    path = getattr(main, "__file__", None)
    if path is None or name == "__main__" or name.endswith(".__main__"):
        return
    try:
        script = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # not a script
    if not any(isinstance(statement, ast.If) and _asks_for_main(statement.test) for statement in script.body):
        raise RuntimeError(
            f"{path} saves a checkpoint, for which Megatron-Core starts a process that imports {path} again; put the "
            'code that the script runs under `if __name__ == "__main__":`'
        )


def _asks_for_main(test: ast.expr) -> bool:
    """Return whether a condition, or a part of it, compares `__name__` with `"__main__"`."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            compared = {ast.unparse(side) for side in (node.left, *node.comparators)}
            if compared >= {"__name__", "'__main__'"}:
                return True
    return False
