"""Hugging Face safetensors to and from any tensor-, pipeline- and expert-parallel grid: streaming, exact, verified."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.agreement import agree, all_gather_json
    from ckpt.atomic import FolderWriter
    from ckpt.boxio import IOCounter
    from ckpt.compare import verify, verify_live
    from ckpt.families import Role
    from ckpt.files import copy_companions
    from ckpt.folder import Checkpoint, open_checkpoint
    from ckpt.layout import Canonical, Layout, layout_for
    from ckpt.live import redistribute, redistribute_optimizer
    from ckpt.load import load_hf
    from ckpt.offline import merge, reshard
    from ckpt.pieces import Block, Piece
    from ckpt.place import Grid, Place
    from ckpt.report import Difference, Report
    from ckpt.rng import capture_rng, restore_rng
    from ckpt.runs import latest_step, saved_steps
    from ckpt.save import save_hf
    from ckpt.shards import Shards, load_shards, open_shards, save_shards
    from ckpt.stream import stream_hf
    from ckpt.training import PendingSave, TrainingState, load_training, save_training

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
    "stream_hf",
    "verify",
    "verify_live",
]

# Where each name lives. Imported when it is first asked for: `ckpt --help` need not wait for torch, and only training
# checkpoints for torch.distributed.checkpoint, which takes about as long to import as torch itself.
_HOME = {
    "Block": "ckpt.pieces",
    "Canonical": "ckpt.layout",
    "Checkpoint": "ckpt.folder",
    "Difference": "ckpt.report",
    "FolderWriter": "ckpt.atomic",
    "Grid": "ckpt.place",
    "IOCounter": "ckpt.boxio",
    "Layout": "ckpt.layout",
    "PendingSave": "ckpt.training",
    "Piece": "ckpt.pieces",
    "Place": "ckpt.place",
    "Report": "ckpt.report",
    "Role": "ckpt.families",
    "Shards": "ckpt.shards",
    "TrainingState": "ckpt.training",
    "agree": "ckpt.agreement",
    "all_gather_json": "ckpt.agreement",
    "capture_rng": "ckpt.rng",
    "copy_companions": "ckpt.files",
    "latest_step": "ckpt.runs",
    "layout_for": "ckpt.layout",
    "load_hf": "ckpt.load",
    "load_shards": "ckpt.shards",
    "load_training": "ckpt.training",
    "merge": "ckpt.offline",
    "open_checkpoint": "ckpt.folder",
    "open_shards": "ckpt.shards",
    "redistribute": "ckpt.live",
    "redistribute_optimizer": "ckpt.live",
    "reshard": "ckpt.offline",
    "restore_rng": "ckpt.rng",
    "save_hf": "ckpt.save",
    "save_shards": "ckpt.shards",
    "save_training": "ckpt.training",
    "saved_steps": "ckpt.runs",
    "stream_hf": "ckpt.stream",
    "verify": "ckpt.compare",
    "verify_live": "ckpt.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
