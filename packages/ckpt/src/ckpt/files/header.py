"""The header of a safetensors file, read strictly and written.

A file is 8 bytes (little-endian header length), a JSON object `{name: {"dtype", "shape", "data_offsets"}}` with an
optional `"__metadata__"` of strings, and the tensors' bytes without holes. Offsets count from the end of the header.
Specification: https://huggingface.co/docs/safetensors (format).

The reader checks every number against the file's size before it reads at that offset.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt.files.checksums import read_checksums
from ckpt.files.contents import refuse_pointer
from ckpt.files.dtypes import DTYPES, dtype_name
from ckpt.layout.pieces import Shape

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64
_MAX_NUMEL = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its type, its shape and the file offset of its first byte."""

    dtype: torch.dtype
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """A file's header: where each tensor lies.

    Attributes:
        tensors: In the order of their bytes.
        metadata: Strings by name.
        length: Bytes before the tensors.
        modified_ns: The time of the file's last change, as `st_mtime_ns` (`ckpt.files.unchanged`).
        checksums: Tensor name -> CRC-32 of its bytes; empty where the file has no record.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    length: int
    modified_ns: int
    checksums: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check a file's header.

    Raises:
        ValueError: The file is missing, truncated or longer than its header says, or the header is inconsistent or
            disagrees with the recorded checksums; names the file, the tensor and the values.
    """
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            size = stat.st_size
            if size < 8:
                raise ValueError(f"{path} is truncated: {size} bytes hold no safetensors header")
            start = file.read(32)
            refuse_pointer(path, start)
            length = int.from_bytes(start[:8], "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(
                    f"{path} is truncated or no safetensors file: its header claims {length} bytes, the file has {size}"
                )
            file.seek(8)
            raw = file.read(length)
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
        raise ValueError(f"{path} {what}; download or copy the missing file into the folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return parse_header(raw, size, str(path), stat.st_mtime_ns)


def parse_header(raw: bytes, size: int, path: str, modified_ns: int) -> Header:
    """Check a header's JSON against the size of its file.

    Raises:
        ValueError: As `read_header`.
    """
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is not valid JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: its header is {type(entries).__name__}, not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must map strings to strings, found {metadata!r:.200}")
    start = 8 + len(raw)
    tensors = {name: _tensor_info(path, name, entry, start) for name, entry in entries.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = start
    for name, info in ordered.items():
        if info.offset != end:
            what = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
            raise ValueError(
                f"{path}: tensor {name!r} {what}: it begins at {info.offset - start}, expected {end - start}"
            )
        end += info.nbytes
    if end != size:
        what = "truncated" if end > size else "longer than its header says"
        raise ValueError(
            f"{path} is {what}: its tensors end at byte {end}, the file has {size}; copy or download it again"
        )
    kinds = {name: (info.dtype, info.shape) for name, info in ordered.items()}
    return Header(ordered, metadata, start, modified_ns, read_checksums(path, metadata, kinds))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice")
        result[key] = value
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not allowed")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMEL


def _tensor_info(path: str, name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{path}: tensor {name!r} must have dtype, shape and data_offsets, found {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path}: tensor {name!r} has dtype {dtype!r:.100}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(size) for size in shape):
        raise ValueError(f"{path}: tensor {name!r} has shape {shape!r:.200}; it must be a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise ValueError(f"{path}: tensor {name!r} has data_offsets {offsets!r:.200}; they must be [begin, end]")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if not _is_size(needed):
        raise ValueError(f"{path}: tensor {name!r} of shape {shape} has more elements than any file can hold")
    if offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} needs {needed} bytes, "
            f"its data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return TensorInfo(DTYPES[dtype], tuple(shape), start + offsets[0])


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo], int]:
    """Lay out a file: its header, and the place of each tensor.

    Wider dtypes come first, so that every tensor is aligned to its dtype. Spaces pad the header to 8 bytes.

    Returns:
        The bytes before the tensors, each tensor's place in the file, and the size of the whole file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        end = position + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(raw)} bytes is over the limit of {MAX_HEADER_BYTES}; use smaller shards")
    prefix = len(raw).to_bytes(8, "little") + raw
    infos = {
        name: TensorInfo(dtype, tuple(shape), len(prefix) + entries[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return prefix, infos, len(prefix) + position
