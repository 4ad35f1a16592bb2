"""Hugging Face safetensors to and from any tensor-, pipeline- and expert-parallel grid: streaming, exact, verified."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    # torch.distributed.checkpoint takes about as long to import as torch itself: only training checkpoints wait for it.
    if name in ("PendingSave", "TrainingState", "load_training", "save_training"):
        from ckpt import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
