"""What can be known of a model on a grid before any rank is started."""

from __future__ import annotations

import os
from pathlib import Path

import ckpt
from ckpt.match import match
from parallel_layers import ParallelDims
from rl_models.backends import EngineOptions, Role
from rl_models.backends.parallel import require_fit
from rl_models.config import ModelConfig
from rl_models.grid import checkpoint_folder
from rl_models.plan import MemoryOptions, plan_memory


def check_native_model(path: Path, role: Role, dims: ParallelDims, options: EngineOptions, max_tokens: int) -> None:
    """Refuse now what the ranks would refuse when they load a checkpoint on the native backend; reads headers alone.

    Raises:
        ValueError: there is no checkpoint folder, its family is unknown, an option means nothing on this grid, heads,
            layers or experts do not divide over it, a file is broken or has other tensors than the config says; names
            the values and what would do.
    """
    folder = checkpoint_folder(path)
    config = ModelConfig.from_hf(folder)
    require_fit(config, dims, options)
    memory = MemoryOptions(dims, max_tokens, recompute=options.recompute, pipeline=options.pipeline)
    plan_memory(Path(folder), memory, role=role, trained=True)
    match(ckpt.open_checkpoint(folder), ckpt.layout_for(config.hf, target="parallel", role=role))


def check_writable(folder: Path) -> None:
    """Raise ValueError unless files can be written into `folder`, or into the one that it would be made in."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file, so {folder} cannot be a folder; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{existing} cannot be written to; choose another folder than {folder}")
