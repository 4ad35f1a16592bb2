"""Trace the step of `--profile` on the chosen ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.profiler import profile

from rl_train.loop.recipe import Recipe
from rl_train.options.fields import numbers, place_of
from rl_train.options.run_options import RunOptions
from rl_train.report.phase_table import write_tables

FOLDER = "profile"


def check_profile(options: RunOptions) -> None:
    """Raise ValueError for a step or ranks that the run does not have."""
    ranks, chosen = options.grid.world_size, numbers(options.profile_ranks)
    if not options.profile and options.profile_ranks != "0":
        raise ValueError(f"profile_ranks={options.profile_ranks} needs profile, a step; give that, or leave it out")
    if options.profile and (not chosen or not {*chosen} <= {*range(ranks)} or options.profile > options.steps):
        raise ValueError(
            f"profile={options.profile} on profile_ranks={options.profile_ranks} must name a step of "
            f"1..{options.steps} and ranks of 0..{ranks - 1}"
        )
    if options.profile and getattr(options, "ray", False):
        raise ValueError("profile traces the ranks of this machine, and ray runs them elsewhere; leave one of them out")


@contextmanager
def traced(options: RunOptions, recipe: Recipe, step: int) -> Iterator[None]:
    """Trace a step if it is that of `--profile`: `profile/rank-N.json.gz` for each chosen rank, and `profile.md`."""
    if step != options.profile:
        yield
        return
    folder, rank = options.out / FOLDER, dist.get_rank() if dist.is_initialized() else 0
    if rank in numbers(options.profile_ranks):
        folder.mkdir(exist_ok=True)
        with profile() as trace:
            yield
        trace.export_chrome_trace(str(folder / f"rank-{rank}.json.gz"))
    else:
        yield
    recipe.once(lambda: None)  # all ranks have written
    if recipe.writes:
        page = write_tables(folder, step)
        recipe.say(page.read_text(encoding="utf-8"))
        recipe.say(f"step {step} is traced in {place_of(folder)}")
