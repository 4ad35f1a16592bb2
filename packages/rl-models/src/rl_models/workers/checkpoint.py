"""Training checkpoints and live weights of an engine, under the names of its Hugging Face checkpoint.

What is stored are boxes of canonical tensors (`ckpt.save_training`), so a run goes on on any other grid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import ckpt
from parallel_layers.distributed.parallel_dims import form_group
from rl_models.engines import Engine
from rl_models.engines.fsdp import release
from rl_models.engines.optimizer import Optimizer
from rl_models.engines.shards import Shards
from rl_models.grid import Grid


@dataclass(frozen=True)
class Resumed:
    """The result of `load_training`.

    Attributes:
        step: The step that the checkpoint was saved at.
        extra: The values that the caller had saved with it.
    """

    step: int
    extra: dict[str, Any]


def background_group(grid: Grid) -> ProcessGroup | None:
    """A gloo group of all ranks of a grid, for the collectives of a thread; None for one rank."""
    if grid.everyone is None:
        return None
    return form_group(sorted(dist.get_process_group_ranks(grid.everyone)), "gloo")


def _shards(engine: Engine) -> Shards:
    release(engine.module)
    return engine.shards()


def save_training(
    engine: Engine,
    optimizer: Optimizer,
    root: str | os.PathLike[str],
    step: int,
    *,
    extra: Mapping[str, Any],
    keep: int | None,
    group: ProcessGroup | None,
    asynchronous: bool,
) -> ckpt.PendingSave:
    """Weights, optimizer state and random-number states of an engine; see `Worker.save_training`."""
    shards = _shards(engine)
    parameters = shards.parameters
    return ckpt.save_training(
        root,
        step,
        parameters,
        shards.layout,
        shards.places,
        optimizer={name: state for name, p in parameters.items() if (state := optimizer.state(p))},
        extra=extra,
        group=group,
        keep=keep,
        asynchronous=asynchronous,
    )


def load_training(
    engine: Engine, optimizer: Optimizer, root: str | os.PathLike[str], step: int | None
) -> ckpt.TrainingState:
    """Put a training checkpoint's weights and optimizer state into an engine; see `Worker.load_training`."""
    shards, group = _shards(engine), engine.grid.everyone
    parameters = shards.parameters
    state = ckpt.load_training(root, shards.layout, shards.places, step=step, into=parameters, group=group)
    optimizer.zero_grad()
    for name, parameter in parameters.items():
        optimizer.load_state(parameter, state.optimizer.get(name, {}))
    ckpt.restore_rng(state.rng)
    return state


def stream_weights(
    engine: Engine,
    *,
    to: Sequence[int] | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    bucket_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of an engine's checkpoint; see `Worker.stream_weights`."""
    shards = _shards(engine)
    return ckpt.stream_hf(
        [parameters for _, parameters in shards.chunks],
        shards.layout,
        engine.grid.everyone,
        shards.places,
        to=to,
        dtype=dtype,
        device=device,
        bucket_bytes=bucket_bytes,
    )
