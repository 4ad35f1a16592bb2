"""Import a user's function that an option names as `module:function`."""

from __future__ import annotations

import inspect
import os
import sys
from functools import cache
from typing import Any

from rl_train.rewards.worker import import_function


def find_in_working_folder() -> None:
    """Let imports find the modules in the working folder first."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)


@cache
def imported(option: str, name: str, ready: tuple[str, ...], takes: str) -> Any:
    """Import the function that an option names as `module:function`; the module may be in the working directory.

    Errors name the other values of the option, `ready`, and the arguments and the result of the function, `takes`, such
    as "(batch, options) and returns a number".

    Raises:
        ValueError: The name has another form, the module or the function cannot be used, or the function does not take
            as many arguments.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function.isidentifier()):
        raise ValueError(f"{option}={name!r} must be {', '.join(ready)}, or module:function, such as own:function")
    try:
        user_function = import_function(module, function)
        signature = inspect.signature(user_function)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{option}={name}: {error}") from error
    try:
        signature.bind(*takes[: takes.index(")")].split(","))
    except TypeError:
        raise ValueError(f"{option}={name}: it takes {signature}; a function for {option} takes {takes}") from None
    return user_function
