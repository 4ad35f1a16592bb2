"""Read and write the header of a safetensors file.

A file is 8 bytes (little-endian header length), a JSON object `{name: {"dtype", "shape", "data_offsets"}}` with an
optional `"__metadata__"` of strings, and the tensors' bytes without holes. Offsets count from the end of the header.
Specification: https://huggingface.co/docs/safetensors (format).

The metadata entry `ckpt.checksums` is a JSON object: tensor name -> "CRC DTYPE SHAPE", such as "1c291ca3 BF16 32x48",
with the CRC-32 of the tensor's bytes in 8 hexadecimal digits. A save writes zeros first, and fills in the checksums of
the bytes in the file at the end. `read_header` compares names, dtypes and shapes with the entry;
`ckpt.files.tensor_bytes` compares the bytes on request.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from ckpt.files.contents import refuse_pointer
from ckpt.files.dtypes import DTYPES, dtype_name
from ckpt.layout.pieces import Box, Shape, exchanged, split_box

_MAX_HEADER_BYTES = 100_000_000
_CHECKSUMS = "ckpt.checksums"
_CHECKSUM = re.compile(r"([0-9a-f]{8}) (.*)")
_UNKNOWN = "0" * 8

Kinds = Mapping[str, tuple[torch.dtype, Shape]]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: its type, its shape and the file offset of its first byte."""

    dtype: torch.dtype
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self, box: Box, limit: int) -> Iterator[Box]:
        """Cut a box of the tensor into boxes of at most `limit` elements, along the order of the file."""
        return split_box(box, limit)


def prevailing_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Return the dtype of most elements."""
    elements: Counter[torch.dtype] = Counter()
    for info in infos:
        elements[info.dtype] += math.prod(info.shape)
    return elements.most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class Transposed(TensorInfo):
    """A stack of matrices `[..., N, K]`, stored as `[..., K, N]`; `shape` is `[..., N, K]`.

    Attributes:
        stored: The stored tensor.
    """

    stored: TensorInfo

    @classmethod
    def of(cls, stored: TensorInfo) -> Self:
        """Return the transposed view of a stored tensor."""
        return cls(stored.dtype, exchanged(stored.shape), stored.offset, stored)

    def parts(self, box: Box, limit: int) -> Iterator[Box]:
        """Cut a box along the stored order into boxes of at most `limit` elements."""
        return map(exchanged, split_box(exchanged(box), limit))


@dataclass(frozen=True)
class Header:
    """A file's header: where each tensor lies.

    Attributes:
        tensors: In the order of their bytes.
        length: Bytes before the tensors.
        modified_ns: The time of the file's last change, as `st_mtime_ns` (`ckpt.files.disk`).
        checksums: Tensor name -> CRC-32 of its bytes; empty where the file has no record.
    """

    tensors: dict[str, TensorInfo]
    length: int
    modified_ns: int
    checksums: dict[str, str]


def read_header(path: Path) -> Header:
    """Read a file's header; safetensors checks every number in the header against the file's size.

    Raises:
        ValueError: The file is missing, truncated or longer than its header says, or the header is inconsistent or
            disagrees with the recorded checksums; names the file and, where safetensors does, the tensor.
    """
    try:
        with open(path, "rb") as file:
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            start = file.read(32)
            refuse_pointer(path, start)
            with safe_open(path, "pt"):  # "np" would need numpy
                pass  # opening the file checks the header
            file.seek(8)
            raw = file.read(int.from_bytes(start[:8], "little"))
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
        raise ValueError(f"{path} {what}; download or copy the missing file into the folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated: {error!s:.300}; copy or download it again") from None
    try:
        entries = json.loads(raw, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy or download it again") from None
    metadata = entries.pop("__metadata__", None) or {}  # safetensors takes null, too
    length = 8 + len(raw)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has dtype {entry['dtype']!r}; known: {', '.join(DTYPES)}")
        tensors[name] = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]), length + entry["data_offsets"][0])
    return Header(tensors, length, modified_ns, _read_checksums(path, metadata, tensors))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def _read_checksums(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the recorded checksums by tensor name, after comparing names, dtypes and shapes with the file's."""
    if _CHECKSUMS not in metadata:
        return {}
    try:
        entry = json.loads(metadata[_CHECKSUMS])
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ValueError(
            f"{path}: {_CHECKSUMS} in its metadata is no map of names to checksums; restore the file from a copy"
        )
    sums: dict[str, str] = {}
    for name in {**tensors, **entry}:
        match = _CHECKSUM.fullmatch(str(entry.get(name)))
        kind = _kind(tensors[name].dtype, tensors[name].shape) if name in tensors else "not there"
        if match is None or match[2] != kind:
            raise ValueError(
                f"{path}: tensor {name!r} is {kind}, its recorded checksum {entry.get(name, 'is missing')!r:.200}; the "
                "header is damaged: restore the file from a copy"
            )
        sums[name] = match[1]
    return sums


def _kind(dtype: torch.dtype, shape: Shape) -> str:
    return f"{dtype_name(dtype)} {'x'.join(map(str, shape))}"


def build_header(tensors: Kinds, sums: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, TensorInfo], int]:
    """Lay out a file: its header, and the place of each tensor.

    Wider dtypes come first, so that every tensor is aligned to its dtype. Spaces pad the header to 8 bytes. Without
    `sums`, the checksum of each tensor, zeros stand in their place, in a header of the same length.

    Returns:
        The bytes before the tensors, each tensor's place in the file, and the size of the whole file.
    """
    texts = {name: f"{_UNKNOWN if sums is None else sums[name]} {_kind(*kind)}" for name, kind in tensors.items()}
    record = {_CHECKSUMS: json.dumps(texts, separators=(",", ":"), sort_keys=True)}
    # transformers reads files of the format "pt" alone.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **record}}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(raw)} bytes is over the limit of {_MAX_HEADER_BYTES}; use smaller shards")
    prefix = len(raw).to_bytes(8, "little") + raw
    infos = {
        name: TensorInfo(dtype, tuple(shape), len(prefix) + entries[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return prefix, infos, len(prefix) + position
