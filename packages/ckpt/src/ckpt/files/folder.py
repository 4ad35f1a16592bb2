"""Open a checkpoint folder and check its configuration, its safetensors files and their index against each other."""

import copy
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

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
from ckpt.files.header import Header, TensorInfo, Transposed, prevailing_dtype, read_header
from ckpt.files.pickled import read_pickled
from ckpt.files.quantized import dequantized
from ckpt.layout.config import Config, is_weights, load_config, read_json_file, text_config
from ckpt.layout.pieces import Shape

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


class Checkpoint:
    """A Hugging Face checkpoint: what config.json, the index and the headers of its files say, each read once.

    `Checkpoint.open` reads the headers at once, and checks them against the index. `Checkpoint(path)` reads a file when
    it is first needed: a folder with a config.json alone has a `config`, and no `tensors`.

    Args:
        path: A folder of safetensors (one `model.safetensors`, or shards with an index), or a single file.
        pickled: Read a file of `torch.save`, and a folder that holds `pytorch_model.bin` or its shards alone, too.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike[str], *, pickled: bool = False) -> None:
        self._source, self._pickled = Path(path), pickled
        self.path = self._source.parent if self._source.is_file() else self._source

    def __str__(self) -> str:
        return str(self._source)

    @classmethod
    def open(cls, path: "str | os.PathLike[str] | Checkpoint", *, pickled: bool = False) -> "Checkpoint":
        """Read and check the headers of a checkpoint; return an opened checkpoint as it is.

        Raises:
            ValueError: The folder has no weights, pickled weights, a missing or broken file, or an index that disagrees
                with the headers; names the file, the tensor and the fix.
        """
        checkpoint = path if isinstance(path, Checkpoint) else cls(path, pickled=pickled)
        _ = checkpoint.tensors
        return checkpoint

    @functools.cached_property
    def config(self) -> Config:
        """The folder's config.json."""
        return load_config(self.path)

    @functools.cached_property
    def text(self) -> Config:
        """The language model's fields of config.json, with their defaults (`ckpt.layout.text_config`)."""
        return text_config(self.config)

    @functools.cached_property
    def headers(self) -> dict[Path, Header]:
        """The header of each file."""
        return _read_headers(self._source, self._pickled)

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[Path, TensorInfo]]:
        """Tensor name -> (file, where the tensor lies); weights of few bits by plain names (`ckpt.files.quantized`)."""
        tensors = {name: (file, info) for file, header in self.headers.items() for name, info in header.tensors.items()}
        return dequantized(tensors, self.config) if (self.path / CONFIG).is_file() else tensors

    @property
    def shapes(self) -> dict[str, Shape]:
        """Tensor name -> shape."""
        return {name: info.shape for name, (_, info) in self.tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        return prevailing_dtype(info for _, info in self.tensors.values())

    def transposed(self, names: Iterable[str]) -> "Checkpoint":
        """Return this checkpoint with the last two dimensions of some tensors exchanged, as values of these tensors."""
        other = copy.copy(self)
        views = {name: (file, Transposed.of(info)) for name in names for file, info in (self.tensors[name],)}
        other.tensors = {**self.tensors, **views}
        return other


def _read_headers(path: Path, pickled: bool) -> dict[Path, Header]:
    """Find the files of a checkpoint and read their headers; see `Checkpoint`."""
    if path.is_file():
        if not is_weights(path):
            refuse_distributed(path)
        if pickled and any(path.match(pattern) for pattern, kind in _FOREIGN.items() if kind == _PICKLED):
            return {path: read_pickled(path)}
        _refuse_foreign(path, path)
        return {path: read_header(path)}
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; pass a checkpoint folder with safetensors files{_previous(path)}")
    refuse_adapter(path)
    single = (path / SINGLE).exists() or (path / SINGLE).is_symlink()
    if (path / INDEX).is_file():
        headers = _read_sharded(path, INDEX, read_header)
        if single and path / SINGLE not in headers:
            raise ValueError(f"{path} holds two checkpoints, {SINGLE} and the files of {INDEX}; remove one of the two")
        return headers
    if single:
        return {path / SINGLE: read_header(path / SINGLE)}
    shards = sorted(file.name for file in path.glob("model-*-of-*.safetensors"))
    if shards:
        raise ValueError(
            f"{path} holds {len(shards)} shards, from {shards[0]} on, and no {INDEX}, which says where each tensor "
            "is; download or copy the index into the folder"
        )
    if pickled and (path / PICKLED_INDEX).is_file():
        return _read_sharded(path, PICKLED_INDEX, read_pickled)
    if pickled and (path / PICKLED).is_file():
        return {path / PICKLED: read_pickled(path / PICKLED)}
    refuse_distributed(path)
    for pattern in _FOREIGN:
        foreign = sorted(file for file in path.glob(pattern) if file.name not in _NO_WEIGHTS)
        if foreign:
            whole = any((path / name).is_file() for name in (PICKLED, PICKLED_INDEX))
            _refuse_foreign(foreign[0], path if whole else foreign[0])
    if (path / LAYOUT).is_file():
        raise ValueError(f"{path} is a sharded checkpoint, one file a rank; `ckpt merge` makes it a Hugging Face one")
    raise ValueError(f"{path} has neither {SINGLE} nor {INDEX}; pass a checkpoint folder with safetensors files")


def _refuse_foreign(file: Path, path: Path) -> None:
    """Refuse a file of weights in another format, by its name; `path` is what a command converts."""
    for pattern, (what, how) in _FOREIGN.items():
        if file.match(pattern):
            raise ValueError(f"{file} holds {what}; {how.format(path=path)}")


def _previous(folder: Path) -> str:
    kept = folder.with_name(f".{folder.name}.previous")
    return f"; an interrupted save left the last complete checkpoint in {kept}" if kept.is_dir() else ""


def _read_sharded(folder: Path, index_file: str, read: Callable[[Path], Header]) -> dict[Path, Header]:
    """Read the headers of the files that an index names, and check them against the index."""
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
    headers = {folder / file: read(folder / file) for file in files}
    held: dict[str, str] = {}
    for file in files:
        for name in headers[folder / file].tensors:
            if held.setdefault(name, file) != file:
                raise ValueError(f"tensor {name!r} is in both {held[name]} and {file} of {folder}; remove one")
    for name, file in weight_map.items():
        if held.get(name) != file:
            raise ValueError(f"{folder / index_file} says that {name!r} is in {file}, whose header does not have it")
    for name, file in held.items():
        if name not in weight_map:
            raise ValueError(f"{folder / file} holds {name!r}, which {index_file} does not name")
    return headers
