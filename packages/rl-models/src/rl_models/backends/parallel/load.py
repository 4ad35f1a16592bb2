"""`backend="parallel"`: the native models of parallel-models, with transformers' vision towers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt import Checkpoint
from parallel_models import EngineOptions, Grid, Role
from parallel_models.model import PackedModel
from parallel_models.training import ParallelEngine, build_engine

if TYPE_CHECKING:
    from rl_models.backends.parallel.vision import Vision


def load(
    checkpoint: Checkpoint, role: Role, grid: Grid, options: EngineOptions, base: ParallelEngine | None = None
) -> ParallelEngine:
    """Load a checkpoint, see `parallel_models.training.build_engine`."""
    return build_engine(checkpoint, role, grid, options, base, build_vision=build_vision)


def build_vision(checkpoint: Checkpoint, model: PackedModel, grid: Grid, prefix: str) -> Vision:
    """Return the vision of a vision-language model, with the tower on the first stage; `prefix`: see `Tower`.

    Raises:
        ImportError: hf-patches is not installed.
        ValueError: The tower adds to more layers than the first stage has.
    """
    try:
        from rl_models.backends.parallel.vision import (
            Vision,  # imported here: models of text alone need no transformers
        )
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the vision tower of {model.config.family} needs {error.name}, which is not installed; in a clone of "
            "this project: pip install ./packages/hf-patches"
        ) from error
    chunk, dtype = model.chunks[0], next(model.parameters()).dtype
    vision = Vision(str(checkpoint.path), grid, prefix if chunk.first else None, dtype=dtype, device=grid.device)
    if chunk.first and vision.depth > len(chunk.layers):
        raise ValueError(
            f"the vision tower of {model.config.family} adds to the outputs of {vision.depth} layers, and the first "
            f"stage has {len(chunk.layers)}; use a smaller pp, or PipelineOptions(split=[{vision.depth}, ...])"
        )
    return vision
