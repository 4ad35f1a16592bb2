"""A checkpoint's files, laid out before anything is written: shards, headers, index, configuration, tokenizer files."""

import errno
import fnmatch
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt.boxio import FileForWriting
from ckpt.checksums import checksum_entry, reserved
from ckpt.config import Config, classifies_sequences
from ckpt.families import Role
from ckpt.folder import INDEX, SINGLE
from ckpt.header import TensorInfo, build_header
from ckpt.layout import Layout
from ckpt.pieces import Shape

# What stands beside the weights and belongs to the tokenizer, the processor or generation.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
# How transformers' class of a model with a value head ends; one with both heads is read as either, and says the first.
CLASSES: dict[Role, str] = {"value": "ForTokenClassification", "causal_lm_with_value": "ForCausalLM"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class FilePlan:
    """Files as they will be.

    Attributes:
        contents: file name -> the tensors in it.
        metadata: the strings of every header.
        checksums: whether the headers have room for a checksum of every tensor.
        prefixes: file name -> the bytes before its tensors.
        sizes: file name -> its size.
        tensors: tensor name -> (file name, where it lies).
    """

    contents: dict[str, dict[str, tuple[torch.dtype, Shape]]]
    metadata: dict[str, str]
    checksums: bool
    prefixes: dict[str, bytes] = field(init=False, default_factory=dict)
    sizes: dict[str, int] = field(init=False, default_factory=dict)
    tensors: dict[str, tuple[str, TensorInfo]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for file, shard in self.contents.items():
            room = reserved(shard) if self.checksums else {}
            self.prefixes[file], infos, self.sizes[file] = build_header(shard, {**self.metadata, **room})
            self.tensors.update({name: (file, info) for name, info in infos.items()})

    def record_checksums(self, folder: Path, sums: Mapping[str, str]) -> None:
        """Fill the checksums in, in files that are otherwise complete, and sync them."""
        for file, shard in self.contents.items():
            filled = {**self.metadata, **checksum_entry({name: sums[name] for name in shard})}
            with FileForWriting(folder / file) as fd:
                os.pwrite(fd, build_header(shard, filled)[0], 0)

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
    checksums: bool = False,
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
    return FilePlan(dict(zip(names, shards, strict=True)), {"format": "pt", **metadata}, checksums)


def create_files(folder: Path, plan: FilePlan) -> None:
    """Create the files at their full size with their headers, so that a full disk shows before any tensor is written.

    Raises:
        OSError: there is no room.
    """
    for file, prefix in plan.prefixes.items():
        fd = os.open(folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
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


def copy_companions(source: Path, destination: Path) -> None:
    """Copy the tokenizer's, the processor's and generation's files.

    Raises:
        ValueError: the source is no folder.
    """
    if not source.is_dir():
        raise ValueError(f"copy_from={source} is no folder; pass the checkpoint whose tokenizer files are to be copied")
    for entry in sorted(source.iterdir()):
        if entry.is_file() and any(fnmatch.fnmatch(entry.name, pattern) for pattern in COMPANIONS):
            shutil.copyfile(entry, destination / entry.name)
            with FileForWriting(destination / entry.name):
                pass  # leaving it syncs the copy


def saved_config(layout: Layout, config: Config, dtype: torch.dtype) -> Config:
    """The config.json of a save: the type that is stored, and where there is a value head transformers' one label; the
    class is that of token classification for a value model, and of a causal language model where there are both heads.
    A value model that came as one for sequence classification stays one.
    """
    saved = dict(config)
    field = "torch_dtype" if "torch_dtype" in saved and "dtype" not in saved else "dtype"
    saved[field] = str(dtype).removeprefix("torch.")
    if layout.role in CLASSES:
        if not (layout.role == "value" and classifies_sequences(config)):
            saved["architectures"] = [layout.family.class_prefix + CLASSES[layout.role]]
        saved["id2label"] = {"0": "LABEL_0"}
        saved["label2id"] = {"LABEL_0": 0}
        saved.pop("num_labels", None)
    return saved


def write_companions(
    folder: Path, plan: FilePlan, layout: Layout, config: Config, dtype: torch.dtype, copy_from: Path | None
) -> None:
    """Write everything beside the weights: tokenizer files, config.json and the index."""
    if copy_from is not None:
        copy_companions(copy_from, folder)
    write_json(folder / "config.json", saved_config(layout, config, dtype))
    if len(plan.prefixes) > 1:
        write_json(folder / INDEX, plan.index())
