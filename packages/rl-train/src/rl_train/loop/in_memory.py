"""`train_on`: train from rows in memory, in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_train.cluster.machines import Machines
from rl_train.data.mixture import sources_of
from rl_train.loop import file_recipe, run
from rl_train.loop.checked_examples import check_examples
from rl_train.loop.checked_run import check_run
from rl_train.loop.recipe import Tell
from rl_train.options.file_options import FILE_RECIPES
from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve
from rl_train.options.run_options import RunOptions

Rows = Iterable[Mapping[str, Any]]


def train_on(
    model: str | os.PathLike[str],
    dataset: Rows | Mapping[str, Rows],
    *,
    recipe: str = "train",
    reward: str | Callable[..., Any] | None = None,
    eval_dataset: Rows | Mapping[str, Rows] | None = None,
    on_event: Tell = lambda event: None,
    **options: Any,
) -> dict[str, float]:
    """Train a model on rows from Python, and return the metrics of the last step.

    A program that calls it needs `if __name__ == "__main__":`, since ranks are processes that import it. The same call
    resumes a run that was stopped.

    Args:
        model: Checkpoint folder, or name on a hub.
        dataset: The rows, as in the files of the recipe; errors name them by "dataset". Or the rows of several sources
            by name, which the options `data={"weights": "3,1", "curriculum": 0.5}` mix as those of files.
        recipe: "train", "sft", "dpo", "reward" or "distill".
        reward: For "train": a name as for `--reward`, or a function of a module, not of the program itself.
        eval_dataset: Rows for evaluations, in the same form.
        on_event: Called with events, such as a `rl_train.report.terminal.Display`.
        **options: Options of the recipe by their names, such as `out`, `steps` or `learning_rate`.

    Raises:
        ValueError: The recipe, an option, a row or the reward is wrong; see `check_run`.
        RankFailed: A rank failed.
    """
    kinds: dict[str, type[RunOptions]] = {TrainOptions.command: TrainOptions, **FILE_RECIPES}
    if recipe not in kinds:
        raise ValueError(f"recipe={recipe!r} must be {', '.join(kinds)}")
    learns_from_files = recipe in FILE_RECIPES
    option = "dataset" if learns_from_files else "prompts"
    values = {"model": Path(model), option: _names("dataset", dataset), **options}
    if reward is not None:
        values["reward"] = reward if isinstance(reward, str) else _name_of(reward)
    if eval_dataset is not None:
        values[f"eval_{option}"] = _names("eval_dataset", eval_dataset)
    resolved: Any = resolve(kinds[recipe], None, values)
    with Machines.here().failures_told():
        if learns_from_files:
            return file_recipe.train(check_examples(resolved, dataset, eval_dataset), on_event)
        return run.train(check_run(resolved, dataset, eval_dataset), on_event)


def _names(argument: str, rows: Rows | Mapping[str, Rows]) -> Path:
    """Return the names of sources with commas; of rows without names that of the argument."""
    # A DatasetDict has splits, of which some are not for training.
    if not isinstance(rows, Mapping) or hasattr(rows, "column_names"):
        return Path(argument)
    names = Path(",".join(map(str, rows)))
    if not rows or [*map(str, sources_of(names, rows))] != [*rows]:
        raise ValueError(
            f"{argument} has the names {', '.join(map(repr, rows))}; give each a name of letters and digits"
        )
    return names


def _name_of(function: Callable[..., Any]) -> str:
    """Return `module:function`, by which the processes of the reward import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        raise ValueError(
            f"reward={function!r} must be a function of a module that other processes import, got {module}:{name}; "
            "move it into a file of its own, and import it from there"
        )
    return f"{module}:{name}"
