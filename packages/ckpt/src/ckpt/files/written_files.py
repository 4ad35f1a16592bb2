"""Lay out a checkpoint's files before any tensor is written: shards, headers, index, configuration, tokenizer files."""

import errno
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt.files.block_fp8 import SCALE, is_quantized, quantization_config
from ckpt.files.contents import COMPANIONS, CONFIG, INDEX, SINGLE, entries, matches
from ckpt.files.disk import sync
from ckpt.files.header import TensorInfo, Transposed, build_header, prevailing_dtype
from ckpt.files.tensor_bytes import sync_and_sum
from ckpt.layout.config import OTHER_NAMES, PREDICTION_LAYERS, Config, classifies_sequences, with_plain_weights
from ckpt.layout.families.table import Role
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Shape, exchanged

# How the name of transformers' class of a model ends. A model with both heads is saved as a causal language model.
CLASSES: dict[Role, str] = {
    "causal_lm": "ForCausalLM",
    "value": "ForTokenClassification",
    "causal_lm_with_value": "ForCausalLM",
}
# The content of tokenizer, processor and generation files, by name.
Companions = Mapping[str, bytes]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class FilePlan:
    """The layout of files before they are written.

    Attributes:
        contents: File name -> the tensors in it.
        transposed: The tensors that the files hold with their last two dimensions exchanged.
        prefixes: File name -> the bytes before its tensors.
        sizes: File name -> its size.
        tensors: Tensor name -> (file name, where it lies).
    """

    contents: dict[str, dict[str, tuple[torch.dtype, Shape]]]
    transposed: Collection[str] = ()
    prefixes: dict[str, bytes] = field(init=False, default_factory=dict)
    sizes: dict[str, int] = field(init=False, default_factory=dict)
    tensors: dict[str, tuple[str, TensorInfo]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for file, shard in self.contents.items():
            self.prefixes[file], infos, self.sizes[file] = build_header(self._stored(shard))
            for name, info in infos.items():
                self.tensors[name] = file, Transposed.of(info) if name in self.transposed else info

    def _stored(self, shard: Mapping[str, tuple[torch.dtype, Shape]]) -> dict[str, tuple[torch.dtype, Shape]]:
        """Return the dtypes and shapes of a file's tensors as the file holds them."""
        return {
            name: (dtype, exchanged(shape) if name in self.transposed else shape)
            for name, (dtype, shape) in shard.items()
        }

    def record_checksums(self, folder: Path, sums: Mapping[str, str]) -> None:
        """Write the checksums into the headers of files that are otherwise complete, and sync the files."""
        for file, shard in self.contents.items():
            with open(folder / file, "r+b", buffering=0) as opened:
                os.pwrite(opened.fileno(), build_header(self._stored(shard), sums)[0], 0)
                os.fsync(opened.fileno())

    def complete(self, folder: Path) -> None:
        """Sync the files, after all tensors are written, and record the checksums."""
        self.record_checksums(folder, sync_and_sum(folder, self.contents, self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())


def parse_size(size: int | str) -> int:
    """Return bytes from a number or a text such as "5GB" or "512MiB"."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?I?)B?", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise ValueError(
            f"max_shard_size={size!r} must be a positive number of bytes or a text such as '5GB' or '512MiB'"
        )
    return int(match[1]) * _UNITS[match[2]]


def plan_files(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], max_shard_size: int | str, transposed: Collection[str] = ()
) -> FilePlan:
    """Spread tensors over files in order, at most `max_shard_size` bytes a file; a larger tensor has its own file."""
    limit = parse_size(max_shard_size)
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
    return FilePlan(dict(zip(names, shards, strict=True)), transposed)


def create_files(folder: Path, plan: FilePlan) -> None:
    """Create the files with their headers at full size: a full disk shows before any tensor is written."""
    for file, prefix in plan.prefixes.items():
        with open(folder / file, "xb", buffering=0) as opened:
            fd = opened.fileno()
            try:
                os.posix_fallocate(fd, 0, plan.sizes[file])
            except OSError as error:
                # Some file systems cannot reserve blocks.
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(fd, plan.sizes[file])
            os.pwrite(fd, prefix, 0)
            os.fsync(fd)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file and sync it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_companions(source: str | os.PathLike[str]) -> Companions:
    """Return the content of tokenizer, processor and generation files (`ckpt.files.contents.COMPANIONS`) by name.

    A program that reads them when it loads a model can save the model after the folder is gone.

    Raises:
        ValueError: The source is no folder.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"copy_from={folder} is no folder; pass the checkpoint whose tokenizer files are to be copied")
    names = [name for name in entries(folder) if matches(name, COMPANIONS) and (folder / name).is_file()]
    return {name: (folder / name).read_bytes() for name in names}


def copy_companions(source: str | os.PathLike[str] | Companions, destination: str | os.PathLike[str]) -> None:
    """Write the files of `read_companions` into a folder, which is created if it is absent; code is not copied.

    Raises:
        ValueError: The source is no folder.
    """
    out, contents = Path(destination), source if isinstance(source, Mapping) else read_companions(source)
    for name, content in contents.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
        sync(out / name)
    for parent in {(out / name).parent for name in contents}:
        sync(parent)


def saved_config(layout: Layout, config: Config, plan: FilePlan) -> Config:
    """Return the config.json of a save.

    `dtype` names the stored dtype, in the text and vision parts, too; multi-token-prediction layers are counted. A
    language model without a class gets the family's. A value head has its labels in `id2label`: the class is token
    classification for a value model (sequence classification stays), and a causal language model with both heads.
    """
    config = with_plain_weights(config)
    stored = {name: info for name, (_, info) in plan.tensors.items()}
    in_fp8 = any(name.endswith(SCALE) for name in stored)
    # The dtype of the tensors that are not quantized.
    infos = {
        name: info for name, info in stored.items() if not in_fp8 or not is_quantized(name.removesuffix(SCALE), (1, 1))
    }
    tower = {name for name in infos if layout.canonical[name].carried}
    count = layout.prediction_layers
    saved = _as_stored(config if config.get("torch_dtype") else {**config, "dtype": ""}, infos.values(), count)
    if in_fp8:
        shapes = {name: info.shape for name, info in stored.items() if not name.endswith(SCALE)}
        saved["quantization_config"] = quantization_config(shapes)
    for section, names in (("text_config", infos.keys() - tower), ("vision_config", tower)):
        if names and isinstance(saved.get(section), Mapping):
            saved[section] = _as_stored(saved[section], [infos[name] for name in names], count)
    class_name = layout.family.class_prefix + CLASSES[layout.role]
    if layout.role == "causal_lm":
        if not saved.get("architectures") and not layout.family.carried:
            saved["architectures"] = [class_name]
        return saved
    if not (layout.role == "value" and classifies_sequences(config)):
        saved["architectures"] = [class_name]
    labels = config.get("id2label") or {}
    if len(labels) != layout.num_labels:
        labels = {str(number): f"LABEL_{number}" for number in range(layout.num_labels)}
    saved["id2label"] = labels
    saved["label2id"] = {label: int(number) for number, label in labels.items()}
    saved.pop("num_labels", None)
    return saved


def _as_stored(section: Mapping[str, Any], infos: Iterable[TensorInfo], prediction_layers: int) -> Config:
    """Return a part of a configuration with the dtype of most of its elements, and this count of prediction layers."""
    dtype = str(prevailing_dtype(infos)).removeprefix("torch.")
    changed: Config = {field: dtype for field in ("dtype", "torch_dtype") if section.get(field) is not None}
    counts = (PREDICTION_LAYERS, *OTHER_NAMES[PREDICTION_LAYERS])
    changed |= {field: prediction_layers for field in counts if section.get(field)}
    return {**section, **changed}


def write_companions(
    folder: Path,
    plan: FilePlan,
    layout: Layout,
    config: Config,
    copy_from: str | os.PathLike[str] | Companions | None,
) -> None:
    """Write everything beside the weights: tokenizer files, config.json and the index."""
    if copy_from is not None:
        copy_companions(copy_from, folder)
    write_json(folder / CONFIG, saved_config(layout, config, plan))
    if len(plan.prefixes) > 1:
        infos = [info for _, info in plan.tensors.values()]
        sizes = {
            "total_parameters": sum(math.prod(info.shape) for info in infos),
            "total_size": sum(info.nbytes for info in infos),
        }
        weight_map = {name: file for name, (file, _) in sorted(plan.tensors.items())}
        write_json(folder / INDEX, {"metadata": sizes, "weight_map": weight_map})
