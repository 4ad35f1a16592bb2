"""Hugging Face safetensors to and from any tensor-, pipeline- and expert-parallel grid: streaming, exact, verified."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.comparison.compare import verify, verify_live
    from ckpt.comparison.report import Difference, Report
    from ckpt.files.atomic import FolderWriter
    from ckpt.files.boxio import IOCounter
    from ckpt.files.folder import Checkpoint, open_checkpoint
    from ckpt.files.written_files import copy_companions
    from ckpt.layout.families import Role
    from ckpt.layout.model_layout import Canonical, Layout, layout_for
    from ckpt.layout.pieces import Block, Piece
    from ckpt.layout.place import Grid, Place
    from ckpt.training.checkpoint import PendingSave, TrainingState, load_training, save_training
    from ckpt.training.rng import capture_rng, restore_rng
    from ckpt.training.runs import latest_step, saved_steps, steps_of_latest
    from ckpt.transfer.agreement import agree, all_gather_json
    from ckpt.transfer.load import load_hf
    from ckpt.transfer.offline import merge, reshard
    from ckpt.transfer.redistribute import redistribute, redistribute_optimizer
    from ckpt.transfer.save import save_hf
    from ckpt.transfer.shards import Shards, load_shards, open_shards, save_shards
    from ckpt.transfer.stream import stream_hf

__all__ = [
    "Block",
    "Canonical",
    "Checkpoint",
    "Difference",
    "FolderWriter",
    "Grid",
    "IOCounter",
    "Layout",
    "PendingSave",
    "Piece",
    "Place",
    "Report",
    "Role",
    "Shards",
    "TrainingState",
    "agree",
    "all_gather_json",
    "capture_rng",
    "copy_companions",
    "latest_step",
    "layout_for",
    "load_hf",
    "load_shards",
    "load_training",
    "merge",
    "open_checkpoint",
    "open_shards",
    "redistribute",
    "redistribute_optimizer",
    "reshard",
    "restore_rng",
    "save_hf",
    "save_shards",
    "save_training",
    "saved_steps",
    "steps_of_latest",
    "stream_hf",
    "verify",
    "verify_live",
]

# Where each name lives. Imported when it is first asked for: `ckpt --help` need not wait for torch, and only training
# checkpoints for torch.distributed.checkpoint, which takes about as long to import as torch itself.
_HOME = {
    "Block": "ckpt.layout.pieces",
    "Canonical": "ckpt.layout.model_layout",
    "Checkpoint": "ckpt.files.folder",
    "Difference": "ckpt.comparison.report",
    "FolderWriter": "ckpt.files.atomic",
    "Grid": "ckpt.layout.place",
    "IOCounter": "ckpt.files.boxio",
    "Layout": "ckpt.layout.model_layout",
    "PendingSave": "ckpt.training.checkpoint",
    "Piece": "ckpt.layout.pieces",
    "Place": "ckpt.layout.place",
    "Report": "ckpt.comparison.report",
    "Role": "ckpt.layout.families",
    "Shards": "ckpt.transfer.shards",
    "TrainingState": "ckpt.training.checkpoint",
    "agree": "ckpt.transfer.agreement",
    "all_gather_json": "ckpt.transfer.agreement",
    "capture_rng": "ckpt.training.rng",
    "copy_companions": "ckpt.files.written_files",
    "latest_step": "ckpt.training.runs",
    "layout_for": "ckpt.layout.model_layout",
    "load_hf": "ckpt.transfer.load",
    "load_shards": "ckpt.transfer.shards",
    "load_training": "ckpt.training.checkpoint",
    "merge": "ckpt.transfer.offline",
    "open_checkpoint": "ckpt.files.folder",
    "open_shards": "ckpt.transfer.shards",
    "redistribute": "ckpt.transfer.redistribute",
    "redistribute_optimizer": "ckpt.transfer.redistribute",
    "reshard": "ckpt.transfer.offline",
    "restore_rng": "ckpt.training.rng",
    "save_hf": "ckpt.transfer.save",
    "save_shards": "ckpt.transfer.shards",
    "save_training": "ckpt.training.checkpoint",
    "saved_steps": "ckpt.training.runs",
    "steps_of_latest": "ckpt.training.runs",
    "stream_hf": "ckpt.transfer.stream",
    "verify": "ckpt.comparison.compare",
    "verify_live": "ckpt.comparison.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
