"""Open a checkpoint folder and check its configuration, its safetensors files and their index against each other."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.files.contents import (
    CONFIG,
    INDEX,
    LAYOUT,
    PICKLED,
    PICKLED_INDEX,
    SINGLE,
    refuse_adapter,
    refuse_distributed,
)
from ckpt.files.header import Header, TensorInfo, read_header
from ckpt.files.pickled import read_pickled
from ckpt.files.quantized import dequantized
from ckpt.layout.config import Config, is_weights, load_config, read_json_file

_PICKLED = (
    "pickled weights, which can run code when loaded",
    "`ckpt convert {path} OUT` writes them as safetensors, and runs no code",
)
# Weights in other formats: a description, and the way to convert them.
_FOREIGN = {
    "*.bin": _PICKLED,
    "*.pt": _PICKLED,
    "*.pth": _PICKLED,
    "*.ckpt": _PICKLED,
    "*.gguf": (
        "llama.cpp's quantized weights",
        "convert once: AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(OUT)",
    ),
}
# Pickled files beside weights that hold no weights.
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt"}


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder, of which only headers have been read.

    Attributes:
        path: The folder.
        headers: File name -> header.
        tensors: Tensor name -> (file name, where it lies). Weights of few bits have their plain names
            (`ckpt.files.quantized`).
    """

    path: Path
    headers: dict[str, Header]
    tensors: dict[str, tuple[str, TensorInfo]]

    @property
    def config(self) -> Config:
        """The folder's config.json."""
        return load_config(self.path)


def open_checkpoint(path: str | os.PathLike[str], *, pickled: bool = False) -> Checkpoint:
    """Open a folder of safetensors (one `model.safetensors`, or shards with an index), or a single file.

    `pickled` also opens a file of `torch.save`, and a folder that holds `pytorch_model.bin` or its shards alone.

    Raises:
        ValueError: The folder has no weights, pickled weights, a missing or broken file, or an index that disagrees
            with the headers; names the file, the tensor and the fix.
    """
    folder = Path(path)
    if folder.is_file():
        if not is_weights(folder):
            refuse_distributed(folder)
        if pickled and any(folder.match(pattern) for pattern, kind in _FOREIGN.items() if kind == _PICKLED):
            return _with_plain_names(_opened(folder.parent, {folder.name: read_pickled(folder)}))
        _refuse_foreign(folder, folder)
        return _with_plain_names(_opened(folder.parent, {folder.name: read_header(folder)}))
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; pass a checkpoint folder with safetensors files{_previous(folder)}")
    refuse_adapter(folder)
    single = (folder / SINGLE).exists() or (folder / SINGLE).is_symlink()
    if (folder / INDEX).is_file():
        checkpoint = _open_sharded(folder, INDEX, read_header)
        if single and SINGLE not in checkpoint.headers:
            raise ValueError(
                f"{folder} holds two checkpoints, {SINGLE} and the files of {INDEX}; remove one of the two"
            )
        return _with_plain_names(checkpoint)
    if single:
        return _with_plain_names(_opened(folder, {SINGLE: read_header(folder / SINGLE)}))
    shards = sorted(file.name for file in folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise ValueError(
            f"{folder} holds {len(shards)} shards, from {shards[0]} on, and no {INDEX}, which says where each tensor "
            "is; download or copy the index into the folder"
        )
    if pickled and (folder / PICKLED_INDEX).is_file():
        return _with_plain_names(_open_sharded(folder, PICKLED_INDEX, read_pickled))
    if pickled and (folder / PICKLED).is_file():
        return _with_plain_names(_opened(folder, {PICKLED: read_pickled(folder / PICKLED)}))
    refuse_distributed(folder)
    for pattern in _FOREIGN:
        foreign = sorted(file for file in folder.glob(pattern) if file.name not in _NO_WEIGHTS)
        if foreign:
            whole = any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX))
            _refuse_foreign(foreign[0], folder if whole else foreign[0])
    if (folder / LAYOUT).is_file():
        raise ValueError(f"{folder} is a sharded checkpoint, one file a rank; `ckpt merge` makes it a Hugging Face one")
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; pass a checkpoint folder with safetensors files")


def _refuse_foreign(file: Path, path: Path) -> None:
    """Refuse a file of weights in another format, by its name; `path` is what a command converts."""
    for pattern, (what, how) in _FOREIGN.items():
        if file.match(pattern):
            raise ValueError(f"{file} holds {what}; {how.format(path=path)}")


def _previous(folder: Path) -> str:
    kept = folder.with_name(f".{folder.name}.previous")
    return f"; an interrupted save left the last complete checkpoint in {kept}" if kept.is_dir() else ""


def _opened(folder: Path, headers: dict[str, Header]) -> Checkpoint:
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            if name in tensors:
                raise ValueError(f"tensor {name!r} is in both {tensors[name][0]} and {file} of {folder}; remove one")
            tensors[name] = (file, info)
    return Checkpoint(folder, headers, tensors)


def _with_plain_names(checkpoint: Checkpoint) -> Checkpoint:
    if not (checkpoint.path / CONFIG).is_file():
        return checkpoint
    return replace(checkpoint, tensors=dequantized(checkpoint.path, checkpoint.tensors, checkpoint.config))


def _open_sharded(folder: Path, index_file: str, read: Callable[[Path], Header]) -> Checkpoint:
    index = read_json_file(folder / index_file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / index_file} has no weight_map of tensor names to file names")
    files = sorted(set(weight_map.values()))
    for file in files:
        if file in ("", ".", "..") or Path(file).name != file or "\\" in file or "\0" in file:
            raise ValueError(
                f"{folder / index_file} names the file {file!r}, outside the folder; it must be a plain file name"
            )
        if not (folder / file).is_file():
            named = next(name for name, value in weight_map.items() if value == file)
            raise ValueError(
                f"{folder / file} is missing: the index names it for {named!r}; download or copy it into the folder"
            )
    checkpoint = _opened(folder, {file: read(folder / file) for file in files})
    for name, file in weight_map.items():
        if name not in checkpoint.tensors or checkpoint.tensors[name][0] != file:
            raise ValueError(f"{folder / index_file} says that {name!r} is in {file}, whose header does not have it")
    for name, (file, _) in checkpoint.tensors.items():
        if name not in weight_map:
            raise ValueError(f"{folder / file} holds {name!r}, which {index_file} does not name")
    return checkpoint
