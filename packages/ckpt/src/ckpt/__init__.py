"""Hugging Face safetensors to and from any tensor-, pipeline- and expert-parallel grid: streaming, exact, verified."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.comparison.compare import verify as verify
    from ckpt.comparison.report import Difference as Difference, Report as Report
    from ckpt.files.atomic import FolderWriter as FolderWriter
    from ckpt.files.boxio import IOCounter as IOCounter
    from ckpt.files.folder import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
    from ckpt.files.written_files import copy_companions as copy_companions, read_companions as read_companions
    from ckpt.layout.adapters import AdapterLayout as AdapterLayout, Change as Change, adaptable as adaptable
    from ckpt.layout.canonical import Canonical as Canonical
    from ckpt.layout.families import Role as Role
    from ckpt.layout.model_layout import Layout as Layout, layout_for as layout_for
    from ckpt.layout.pieces import Block as Block, Piece as Piece
    from ckpt.layout.place import Grid as Grid, Place as Place
    from ckpt.training.checkpoint import (
        PendingSave as PendingSave,
        TrainingState as TrainingState,
        load_training as load_training,
        save_training as save_training,
    )
    from ckpt.training.rng import capture_rng as capture_rng, restore_rng as restore_rng
    from ckpt.training.runs import (
        latest_step as latest_step,
        saved_steps as saved_steps,
        steps_of_latest as steps_of_latest,
    )
    from ckpt.transfer.adapters import (
        load_adapter as load_adapter,
        open_adapter as open_adapter,
        save_adapter as save_adapter,
        whole_adapters as whole_adapters,
    )
    from ckpt.transfer.agreement import agree as agree, all_gather_json as all_gather_json
    from ckpt.transfer.float8 import float8_sides as float8_sides
    from ckpt.transfer.load import load_blocks as load_blocks, load_hf as load_hf
    from ckpt.transfer.offline import merge as merge, reshard as reshard
    from ckpt.transfer.save import save_hf as save_hf
    from ckpt.transfer.stream import stream_hf as stream_hf

# The public names of each module. A module is imported when one of its names is first used: `ckpt --help` runs without
# torch.
_NAMES = {
    "ckpt.comparison.compare": ("verify",),
    "ckpt.comparison.report": ("Difference", "Report"),
    "ckpt.files.atomic": ("FolderWriter",),
    "ckpt.files.boxio": ("IOCounter",),
    "ckpt.files.folder": ("Checkpoint", "open_checkpoint"),
    "ckpt.files.written_files": ("copy_companions", "read_companions"),
    "ckpt.layout.adapters": ("AdapterLayout", "Change", "adaptable"),
    "ckpt.layout.families": ("Role",),
    "ckpt.layout.canonical": ("Canonical",),
    "ckpt.layout.model_layout": ("Layout", "layout_for"),
    "ckpt.layout.pieces": ("Block", "Piece"),
    "ckpt.layout.place": ("Grid", "Place"),
    "ckpt.training.checkpoint": ("PendingSave", "TrainingState", "load_training", "save_training"),
    "ckpt.training.rng": ("capture_rng", "restore_rng"),
    "ckpt.training.runs": ("latest_step", "saved_steps", "steps_of_latest"),
    "ckpt.transfer.adapters": ("load_adapter", "open_adapter", "save_adapter", "whole_adapters"),
    "ckpt.transfer.agreement": ("agree", "all_gather_json"),
    "ckpt.transfer.float8": ("float8_sides",),
    "ckpt.transfer.load": ("load_blocks", "load_hf"),
    "ckpt.transfer.offline": ("merge", "reshard"),
    "ckpt.transfer.save": ("save_hf",),
    "ckpt.transfer.stream": ("stream_hf",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
