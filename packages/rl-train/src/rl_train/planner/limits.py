"""Choose a grid, and the activations that are saved, for devices of a given memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import ckpt
from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_models import model_config
from rl_train.planner.memory import MemoryOptions
from rl_train.planner.models import Planned, plan_models

MOST_RANKS = 1024
# The share of a forward pass that "selective" computes again, as `benchmarks/memory_options.py` measured its time.
SELECTIVE = 0.6
# Savings beyond "full", with the share of a forward that is computed again: tiles compute each MLP once more.
BEYOND_FULL: tuple[tuple[float, dict[str, object]], ...] = (
    (1.0, {"offload_activations": True}),
    (1.0 + SELECTIVE, {"tiled_mlp": 8}),
    (1.0 + SELECTIVE, {"tiled_mlp": 8, "offload_activations": True}),
)
# An optimizer in host memory comes behind all savings of activations, as if a step computed two more forwards.
OFFLOADED_OPTIMIZER = 2.0


def fitting(
    model: Checkpoint, options: MemoryOptions, limit: int, *, ranks: int | None = None, **models: bool
) -> list[Planned]:
    """Return the grids of `ranks` ranks whose peak is at most `limit` bytes, each with the fastest savings that fit.

    The savings of a grid are, by the time that they cost: none; recomputation of the first layers of each stage, as few
    as fit, or "selective" if it costs less; "full"; "full" with offloaded activations; "full" with each dense MLP in
    eight tiles; all three. Offloading alone costs more than "full" and frees no more. Where none of these fits, the
    optimizer's state is kept in host memory, too, with the first savings that then fit. If `options` saves activations
    already, nothing is added.

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
                fastest = _chosen(model, replace(options, dims=dims), limit, models)
            except ValueError:
                continue  # heads, layers or experts do not divide
            if fastest is not None:
                fitting_plans.append((fastest[0], pp, tp, ep, fastest[1]))
        if fitting_plans:
            return [planned for *_, planned in sorted(fitting_plans, key=lambda entry: entry[:-1])]
    return []


def _saves_activations(options: MemoryOptions) -> bool:
    return options.recompute is not None or options.tiled_mlp is not None or options.offload_activations


def _chosen(
    model: Checkpoint, options: MemoryOptions, limit: int, models: dict[str, bool]
) -> tuple[float, Planned] | None:
    """Return the cost in forwards, and the plan, of the fastest savings that fit; None if nothing fits."""
    fastest = _fastest(model, options, limit, models)
    if fastest is not None or _saves_activations(options) or options.optimizer.offload:
        return fastest
    offloaded = replace(options, optimizer=replace(options.optimizer, offload=True))
    fastest = _fastest(model, offloaded, limit, models)
    return None if fastest is None else (OFFLOADED_OPTIMIZER + fastest[0], fastest[1])


def _fastest(
    model: Checkpoint, options: MemoryOptions, limit: int, models: dict[str, bool]
) -> tuple[float, Planned] | None:
    """Return the share of a forward that is computed again, and the plan, of the fastest savings that fit."""

    def plan(**savings: object) -> Planned | None:
        planned = plan_models(model, replace(options, **savings), **models)  # type: ignore[arg-type]
        return planned if planned.peak <= limit else None

    if (plain := plan()) is not None or _saves_activations(options):
        return None if plain is None else (0.0, plain)
    full = plan(recompute="full")
    if full is None:
        beyond = ((share, plan(recompute="full", **more)) for share, more in BEYOND_FULL)
        return next(((share, planned) for share, planned in beyond if planned is not None), None)
    candidates = [(1.0, full)]
    if (selective := plan(recompute="selective")) is not None:
        candidates.append((SELECTIVE, selective))
    candidates += _fewest_layers(model, options, plan)
    return min(candidates, key=lambda entry: entry[0])


def _fewest_layers(
    model: Checkpoint, options: MemoryOptions, plan: Callable[..., Planned | None]
) -> Iterator[tuple[float, Planned]]:
    """Yield the plan that recomputes the fewest layers of each chunk, unless it recomputes all."""
    layout = ckpt.layout_for(model, target="parallel", layers=options.pipeline.split)
    place = ckpt.Place(pp=(0, options.dims.pp), vpp=(0, options.pipeline.virtual_stages))
    chunks = layout.chunk_layers(place.grid)
    total = sum(map(len, chunks))

    def first(count: int) -> tuple[int, ...]:
        return tuple(layer for chunk in chunks for layer in chunk[:count])

    low, high, best = 1, max(map(len, chunks)) - 1, None
    while low <= high:
        middle = (low + high) // 2
        layers = first(middle)
        planned = plan(recompute=layers)
        if planned is None:
            low = middle + 1
        else:
            best, high = (len(layers) / total, planned), middle - 1
    if best is not None:
        yield best
