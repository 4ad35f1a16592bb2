"""A checksum for every tensor, kept in the header of its file.

The metadata entry `ckpt.crc32` is a JSON object: tensor name -> CRC-32 of its bytes, 8 hexadecimal digits. The entry is
laid out with zeros before the data is written and filled in afterwards from the bytes that are in the file; its length
stays. Of two tensors in files the bytes themselves are compared.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpt.files.folder import Checkpoint
from ckpt.files.header import TensorInfo

KEY = "ckpt.crc32"
_CHUNK_BYTES = 8 << 20


def checksum_entry(sums: Mapping[str, str]) -> dict[str, str]:
    """The metadata entry for a file's tensors."""
    return {KEY: json.dumps(dict(sums), separators=(",", ":"), sort_keys=True)}


def reserved(names: Iterable[str]) -> dict[str, str]:
    """An entry of the final length, to be filled in later."""
    return checksum_entry(dict.fromkeys(names, "0" * 8))


def _chunks(path: Path, info: TensorInfo) -> Iterator[bytes]:
    """The bytes of one tensor of a file, all chunks but the last of one length."""
    with open(path, "rb") as file:
        file.seek(info.offset)
        left = info.nbytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ValueError(f"{path} ended inside a tensor; it was truncated while in use")
            yield chunk
            left -= len(chunk)


def crc32(path: Path, info: TensorInfo) -> str:
    """The checksum of one tensor of a file."""
    value = 0
    for chunk in _chunks(path, info):
        value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def same_bytes(a: tuple[Path, TensorInfo], b: tuple[Path, TensorInfo]) -> bool:
    """Whether two tensors of files, as long as each other, have the same bytes."""
    return all(one == other for one, other in zip(_chunks(*a), _chunks(*b), strict=True))


def share_of_checksums(
    folder: Path, tensors: Mapping[str, tuple[str, TensorInfo]], rank: int, ranks: Sequence[int]
) -> dict[str, str]:
    """This rank's share of all tensors' checksums, when `ranks` divide them among themselves."""
    if rank not in ranks:
        return {}
    mine = list(tensors.items())[ranks.index(rank) :: len(ranks)]
    return {name: crc32(folder / file, info) for name, (file, info) in mine}


def recorded(checkpoint: Checkpoint) -> dict[str, str]:
    """The checksums in a checkpoint's headers; empty where none were recorded.

    Raises:
        ValueError: an entry is not what this module writes.
    """
    sums: dict[str, str] = {}
    for file, header in checkpoint.headers.items():
        if KEY in header.metadata:
            try:
                loaded = json.loads(header.metadata[KEY])
            except ValueError:
                loaded = None
            if not isinstance(loaded, dict) or not all(isinstance(value, str) for value in loaded.values()):
                raise ValueError(f"{checkpoint.path / file}: {KEY} in its metadata is no map of names to checksums")
            sums |= loaded
    return sums


def check_share(checkpoint: Checkpoint, rank: int, size: int) -> None:
    """Compare this rank's share of a checkpoint's tensors with the recorded checksums.

    Raises:
        ValueError: none were recorded, or a tensor's bytes are not those that were saved; names the first.
    """
    sums = recorded(checkpoint)
    if not sums:
        raise ValueError(
            f"{checkpoint.path} has no recorded checksums; save with checksums=True, or load without check"
        )
    held = share_of_checksums(checkpoint.path, checkpoint.tensors, rank, range(size))
    for name, value in held.items():
        if sums.get(name) != value:
            file = checkpoint.path / checkpoint.tensors[name][0]
            raise ValueError(
                f"{name} in {os.fspath(file)} is damaged: its checksum is {value}, "
                f"recorded was {sums.get(name, 'none')}; restore the file from a copy"
            )
