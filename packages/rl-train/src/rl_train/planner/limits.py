"""Choose a grid, and the activations that are saved, for devices of a given memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ckpt
from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_models import model_config
from rl_train.planner.memory import MemoryOptions
from rl_train.planner.models import Planned, plan_models

MOST_RANKS = 1024
# The share of a forward pass that "selective" computes again, as `benchmarks/memory_options.py` measured its time.
SELECTIVE = 0.6
# Savings of activations, the fastest first, each with the share of a forward that is computed again: tiles compute each
# MLP once more. Offloading alone costs more than "full" and frees no more.
SAVINGS: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.0, {}),
    (SELECTIVE, {"recompute": "selective"}),
    (1.0, {"recompute": "full"}),
    (1.0, {"recompute": "full", "offload_activations": True}),
    (1.0 + SELECTIVE, {"recompute": "full", "tiled_mlp": 8}),
    (1.0 + SELECTIVE, {"recompute": "full", "tiled_mlp": 8, "offload_activations": True}),
)
# An optimizer in host memory comes behind all savings of activations, as if a step computed two more forwards.
OFFLOADED_OPTIMIZER = 2.0


def fitting(
    model: Checkpoint, options: MemoryOptions, limit: int, *, ranks: int | None = None, **models: Any
) -> list[Planned]:
    """Return the grids of `ranks` ranks whose peak is at most `limit` bytes, each with the fastest savings that fit.

    The savings of a grid are the first of `SAVINGS` that fit, or recomputation of the first layers of each stage where
    that costs less. Where none fits, the optimizer's state is kept in host memory, too, with the first savings that
    then fit. If `options` saves activations already, nothing is added.

    Args:
        model: The checkpoint of the model; a folder with `config.json` is enough.
        options: The training step; `dims` is replaced.
        limit: Bytes of a device.
        ranks: The number of ranks; None: the fewest that fit, a power of two up to 1024.
        models: The other models on the devices, see `plan_models`.

    Returns:
        The fitting grids: with the optimizer on the devices first, then least recomputation, then least traffic (pp,
        tp, ep).
    """
    config = model_config(model)
    expert_sizes = (1, 2, 4, 8, 16, 32, 64) if any(config.moe) else (1,)
    for count in (2**power for power in range(MOST_RANKS.bit_length())) if ranks is None else (ranks,):
        fitting_plans = []
        for tp, pp, ep in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), expert_sizes):
            if count % (tp * pp):
                continue
            try:
                dims = ParallelDims(dp=count // (tp * pp), tp=tp, pp=pp, ep=ep)
                fastest = _fastest(model, replace(options, dims=dims), limit, models)
            except ValueError:
                continue  # heads, layers or experts do not divide
            if fastest is not None:
                fitting_plans.append((fastest[0], pp, tp, ep, fastest[1]))
        if fitting_plans:
            return [planned for *_, planned in sorted(fitting_plans, key=lambda entry: entry[:-1])]
    return []


def _fastest(
    model: Checkpoint, options: MemoryOptions, limit: int, models: dict[str, Any]
) -> tuple[float, Planned] | None:
    """Return the cost in forwards, and the plan, of the fastest savings that fit; None if nothing fits."""

    def plan(options: MemoryOptions) -> Planned | None:
        planned = plan_models(model, options, **models)
        return planned if planned.peak <= limit else None

    saves = options.recompute is not None or options.tiled_mlp is not None or options.offload_activations
    optimizers = [(0.0, options)]
    if not saves and not options.optimizer.offload:
        on_host = replace(options, optimizer=replace(options.optimizer, offload=True))
        optimizers.append((OFFLOADED_OPTIMIZER, on_host))
    for cost_of_optimizer, base in optimizers:
        for cost, savings in SAVINGS[:1] if saves else SAVINGS:
            if (planned := plan(replace(base, **savings))) is not None:
                plans = [(cost, planned)]
                if savings.keys() == {"recompute"}:
                    plans += _fewest_layers(model, base, plan)
                cost, planned = min(plans, key=lambda entry: entry[0])
                return cost_of_optimizer + cost, planned
    return None


def _fewest_layers(
    model: Checkpoint, options: MemoryOptions, plan: Callable[[MemoryOptions], Planned | None]
) -> Iterator[tuple[float, Planned]]:
    """Yield the plan that recomputes the fewest layers of each chunk, unless it recomputes all."""
    layout = ckpt.layout_for(model, target="parallel", layers=options.pipeline.split)
    place = ckpt.Place(pp=(0, options.dims.pp), vpp=(0, options.pipeline.virtual_stages))
    chunks = layout.chunk_layers(place.grid)

    def first(count: int) -> MemoryOptions:
        return replace(options, recompute=tuple(layer for chunk in chunks for layer in chunk[:count]))

    longest = max(map(len, chunks))
    fewest = 1 + bisect.bisect_left(range(1, longest), True, key=lambda count: plan(first(count)) is not None)
    if fewest < longest and (planned := plan(first(fewest))) is not None:
        yield sum(len(chunk[:fewest]) for chunk in chunks) / sum(map(len, chunks)), planned
