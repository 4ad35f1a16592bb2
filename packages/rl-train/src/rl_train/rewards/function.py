"""The reward: find a ready one or a Python function by name, call it, and report its errors with the prompt's line."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from rl_train.data.prompts import Prompt
from rl_train.rewards.ready import READY

T = TypeVar("T")

_LARGEST = torch.finfo(torch.float32).max

# (prompt, response, row) -> a number. Prompt and response are text where the checkpoint has a tokenizer, else lists of
# token ids; row is the JSON object of the prompt's line.
Reward = Callable[[Any, Any, Mapping[str, Any]], float]


def check_reward(name: str) -> None:
    """Raise ValueError unless the reward is a ready one, or the module of `module:function` exists."""
    if name not in READY:
        _ask(name, _find)


def load_reward(name: str) -> Reward:
    """Return a reward of `READY`, or import `module:function`, also from the working directory; or raise ValueError."""
    if name in READY:
        return READY[name]
    found = _ask(name, importlib.import_module)
    reward = getattr(found, name.partition(":")[2], None)
    if not callable(reward):
        raise ValueError(f"reward {name!r}: {found.__name__} has no function {name.partition(':')[2]}")
    return reward


def _ask(name: str, ask: Callable[[str], T]) -> T:
    """Return the result of `ask` for the name of the module; raise ValueError for any exception of `ask`."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"reward {name!r} must be {', '.join(READY)}, or module:function, such as rewards:length")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return ask(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward {name!r}: importing {module_name} raised {type(error).__name__}: {error}") from error


def _find(module_name: str) -> None:
    if importlib.util.find_spec(module_name) is None:
        raise ModuleNotFoundError(f"No module named {module_name!r}")


def score(reward: Reward, file: Path, prompt: Prompt, prompt_value: Any, response: Any) -> float:
    """Call the reward for one response.

    Raises:
        ValueError: The reward raised, or returned no finite number; the error names the file and line of the prompt.
    """
    where = f"{file}, line {prompt.line}: the reward"
    try:
        value = reward(prompt_value, response, prompt.row)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where} returned {value!r}, which is not a number") from None
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise ValueError(f"{where} returned {number}; it must be finite in fp32")
    return number
