"""Whether ranks that divide experts gather all of them for a generation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from parallel_layers.moe import bytes_to_gather, divided_mixtures, saves_time, why_not_gather
from parallel_models.engine.grid import Grid
from parallel_models.generation.decoding import CacheOptions, NewCache, free_memory


def gathers_experts(model: nn.Module, grid: Grid, options: CacheOptions, new_cache: NewCache) -> bool:
    """Return whether every rank gets all experts for the draws; all ranks of the grid agree.

    `new_cache` makes the cache that stands beside the experts; see `CacheOptions.build`.

    Raises:
        ValueError: The options ask for it, and experts cannot be gathered.
    """
    if grid.dims.ep == 1 or options.experts == "exchange":
        return False
    mixtures = divided_mixtures(model)
    reason = why_not_gather(mixtures)
    if options.experts == "gather" and reason is not None:
        raise ValueError(f"experts='gather': {reason}; take experts='exchange'")
    memory = free_memory(grid.device)
    fits = (
        memory is None or bytes_to_gather(mixtures, float8=options.float8) + options.wanted_bytes([new_cache]) <= memory
    )
    tokens = options.sequences * (1 + options.drafts)
    gains = all(saves_time(mixture, tokens, float8=options.float8) for mixture in mixtures)
    gather = options.experts == "gather" or (reason is None and fits and gains)
    gathers = torch.tensor(int(gather), device=grid.device)
    dist.all_reduce(gathers, dist.ReduceOp.MIN, group=grid.everyone)
    return bool(gathers)
