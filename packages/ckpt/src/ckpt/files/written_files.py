"""A checkpoint's files, laid out before anything is written: shards, headers, index, configuration, tokenizer files."""

import errno
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt.files.atomic import sync_folder
from ckpt.files.boxio import FileForWriting
from ckpt.files.checksums import checksum_entry
from ckpt.files.contents import COMPANIONS, CONFIG, INDEX, SINGLE, matching
from ckpt.files.header import TensorInfo, build_header
from ckpt.files.tensor_bytes import sync_and_sum
from ckpt.layout.config import PREDICTION_LAYERS, Config, classifies_sequences
from ckpt.layout.families import Role
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Shape

# How transformers' class of a model ends; one with both heads is read as either, and says the first.
CLASSES: dict[Role, str] = {
    "causal_lm": "ForCausalLM",
    "value": "ForTokenClassification",
    "causal_lm_with_value": "ForCausalLM",
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class FilePlan:
    """Files as they will be.

    Attributes:
        contents: file name -> the tensors in it.
        metadata: the strings of every header.
        prefixes: file name -> the bytes before its tensors.
        sizes: file name -> its size.
        tensors: tensor name -> (file name, where it lies).
    """

    contents: dict[str, dict[str, tuple[torch.dtype, Shape]]]
    metadata: dict[str, str]
    prefixes: dict[str, bytes] = field(init=False, default_factory=dict)
    sizes: dict[str, int] = field(init=False, default_factory=dict)
    tensors: dict[str, tuple[str, TensorInfo]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for file, shard in self.contents.items():
            room = {**self.metadata, **checksum_entry(shard)}
            self.prefixes[file], infos, self.sizes[file] = build_header(shard, room)
            self.tensors.update({name: (file, info) for name, info in infos.items()})

    def record_checksums(self, folder: Path, sums: Mapping[str, str]) -> None:
        """Fill the checksums in, in files that are otherwise complete and synced, and sync them."""
        for file, shard in self.contents.items():
            filled = {**self.metadata, **checksum_entry(shard, sums)}
            with FileForWriting(folder / file) as fd:
                os.pwrite(fd, build_header(shard, filled)[0], 0)

    def complete(self, folder: Path) -> None:
        """Sync the files, whose tensors are all written, and record their checksums.

        Raises:
            OSError: the disk is full.
        """
        self.record_checksums(folder, sync_and_sum(folder, self.contents, self.tensors))

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for _, info in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def index(self) -> dict[str, Any]:
        """The index of a sharded checkpoint."""
        parameters = sum(math.prod(info.shape) for _, info in self.tensors.values())
        return {
            "metadata": {"total_parameters": parameters, "total_size": self.data_bytes},
            "weight_map": {name: file for name, (file, _) in sorted(self.tensors.items())},
        }


def parse_size(size: int | str) -> int:
    """Bytes from a number or a text such as "5GB" or "512MiB".

    Raises:
        ValueError: it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?I?)B?", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise ValueError(
            f"max_shard_size={size!r} must be a positive number of bytes or a text such as '5GB' or '512MiB'"
        )
    return int(match[1]) * _UNITS[match[2]]


def plan_files(
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    max_shard_size: int | str,
    metadata: Mapping[str, str],
) -> FilePlan:
    """Spread tensors over files in their order, each file up to `max_shard_size` (a larger tensor has one of its
    own)."""
    limit = parse_size(max_shard_size)
    odd = {key: value for key, value in metadata.items() if not isinstance(key, str) or not isinstance(value, str)}
    if odd:
        raise ValueError(f"metadata={odd!r:.200} must map strings to strings, which is all that a header may hold")
    shards: list[dict[str, tuple[torch.dtype, Shape]]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += nbytes
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return FilePlan(dict(zip(names, shards, strict=True)), {"format": "pt", **metadata})


def create_files(folder: Path, plan: FilePlan) -> None:
    """Create the files at their full size with their headers, so that a full disk shows before any tensor is written.

    Raises:
        OSError: there is no room.
    """
    for file, prefix in plan.prefixes.items():
        fd = os.open(folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            _reserve(fd, plan.sizes[file])
            os.pwrite(fd, prefix, 0)
            os.fsync(fd)
        finally:
            os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Give a file its size, and its blocks where the file system can reserve them."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file and sync it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def copy_companions(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Copy the tokenizer's, the processor's and generation's files (`ckpt.files.contents.COMPANIONS`), and no code.

    Args:
        source: a checkpoint folder.
        destination: the folder to copy to; it is made if it is not there.

    Raises:
        ValueError: the source is no folder.
    """
    folder, out = Path(source), Path(destination)
    if not folder.is_dir():
        raise ValueError(f"copy_from={folder} is no folder; pass the checkpoint whose tokenizer files are to be copied")
    copies = {folder / name: out / name for name in matching(folder, COMPANIONS) if (folder / name).is_file()}
    for file, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        with FileForWriting(copy):
            pass  # leaving it syncs the copy
    for parent in {copy.parent for copy in copies.values()}:
        sync_folder(parent)


def saved_config(layout: Layout, config: Config, plan: FilePlan) -> Config:
    """The config.json of a save: the types that are stored, of the whole and of its text and vision parts; no
    multi-token-prediction layers, which are not saved; a class where a language model's names none.

    Where there is a value head it has transformers' one label; the class is that of token classification for a value
    model, and of a causal language model where there are both heads. A value model that came as one for sequence
    classification stays one.
    """
    infos = {name: info for name, (_, info) in plan.tensors.items()}
    tower = {name for name in infos if layout.canonical[name].carried}
    saved = _as_stored(config if config.get("torch_dtype") else {**config, "dtype": ""}, infos.values())
    for part, names in (("text_config", infos.keys() - tower), ("vision_config", tower)):
        if names and isinstance(saved.get(part), Mapping):
            saved[part] = _as_stored(saved[part], [infos[name] for name in names])
    class_name = layout.family.class_prefix + CLASSES[layout.role]
    if layout.role == "causal_lm":
        if not saved.get("architectures") and not layout.family.carried:
            saved["architectures"] = [class_name]
        return saved
    if not (layout.role == "value" and classifies_sequences(config)):
        saved["architectures"] = [class_name]
    saved["id2label"] = {"0": "LABEL_0"}
    saved["label2id"] = {"LABEL_0": 0}
    saved.pop("num_labels", None)
    return saved


def _as_stored(part: Mapping[str, Any], infos: Iterable[TensorInfo]) -> Config:
    """A part of a configuration with the type of most elements of its tensors where it names one, and no prediction
    layers."""
    elements: Counter[torch.dtype] = Counter()
    for info in infos:
        elements[info.dtype] += math.prod(info.shape)
    dtype = str(elements.most_common(1)[0][0]).removeprefix("torch.")
    changed = {field: dtype for field in ("dtype", "torch_dtype") if part.get(field) is not None}
    return {**part, **changed, **({PREDICTION_LAYERS: 0} if part.get(PREDICTION_LAYERS) else {})}


def write_companions(folder: Path, plan: FilePlan, layout: Layout, config: Config, copy_from: Path | None) -> None:
    """Write everything beside the weights: tokenizer files, config.json and the index."""
    if copy_from is not None:
        copy_companions(copy_from, folder)
    write_json(folder / CONFIG, saved_config(layout, config, plan))
    if len(plan.prefixes) > 1:
        write_json(folder / INDEX, plan.index())
