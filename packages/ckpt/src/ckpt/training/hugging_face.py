"""A step of a training run as a Hugging Face checkpoint, without its optimizer state."""

import dataclasses
import os
from pathlib import Path

import torch

from ckpt.files.dtypes import check_cast
from ckpt.training.saved_step import open_training
from ckpt.transfer.offline import Progress, write_whole
from ckpt.transfer.tensor_files import Source

_WEIGHTS = "model/"


def training_to_hf(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    copy_from: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the weights of a step of a training run (`save_training`) as a Hugging Face checkpoint, atomically.

    Memory is bounded by two buffers of 16 MiB.

    Args:
        source: The run's folder (its latest step), or a step's folder.
        destination: The folder to write; see `ckpt.merge`.
        dtype: Cast floating-point weights.
        max_shard_size: See `ckpt.merge`.
        copy_from: The folder of the model before training, whose tokenizer and generation files are copied.
        progress: See `ckpt.merge`.

    Raises:
        ValueError: The step is broken, or holds adapters alone.
        OSError: The disk is full; what was at `destination` is intact.
    """
    check_cast(dtype)
    opened = open_training(source)
    pieces = {
        name.removeprefix(_WEIGHTS): [
            (key, dataclasses.replace(piece, name=name.removeprefix(_WEIGHTS))) for key, piece in held
        ]
        for name, held in opened.files.pieces.items()
        if name.startswith(_WEIGHTS)
    }
    if any(".lora_" in name for name in pieces):
        raise ValueError(
            f"{opened.folder} holds adapters, and the weights of their model are elsewhere; `rl-train export` merges "
            "them, and save_adapter of a loaded model writes them for PEFT"
        )
    files = opened.files
    weights = Source(files.headers, files.tensors, pieces, layout=opened.layout)
    companions = opened.folder if copy_from is None else Path(copy_from)
    write_whole(weights, Path(destination), companions, dtype, max_shard_size=max_shard_size, progress=progress)
