"""Compute the checksums of tensors in files, and compare their bytes."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckpt.files.disk import sync
from ckpt.files.header import Header, TensorInfo
from ckpt.files.mirror import open_weights

# Small enough for the processor's cache: the checksum then reads from the cache.
_CHUNK_BYTES = 1 << 20
_THREADS = 4


def _chunks(path: Path, info: TensorInfo) -> Iterator[bytes]:
    """Yield the bytes of one tensor of a file, all chunks but the last of one length."""
    with open_weights(path) as file:
        file.seek(info.offset)
        left = info.nbytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ValueError(f"{path} ended inside a tensor; it was truncated while in use")
            yield chunk
            left -= len(chunk)


def crc32(path: Path, info: TensorInfo) -> str:
    """Return the checksum of one tensor of a file."""
    value = 0
    for chunk in _chunks(path, info):
        value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def same_bytes(a: tuple[Path, TensorInfo], b: tuple[Path, TensorInfo]) -> bool:
    """Return whether two tensors in files have the same dtype, shape and bytes."""
    if (a[1].dtype, a[1].shape) != (b[1].dtype, b[1].shape):
        return False
    return all(x == y for x, y in zip(_chunks(*a), _chunks(*b), strict=True))


def sync_and_sum(folder: Path, files: Iterable[str], tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, str]:
    """Sync files of a folder while computing the checksums of `tensors`: name -> (file, offset, dtype and shape)."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-sum") as pool:
        syncs = [pool.submit(sync, folder / file) for file in files]
        sums = {name: pool.submit(crc32, folder / file, info) for name, (file, info) in tensors.items()}
        for done in syncs:
            done.result()
        return {name: value.result() for name, value in sums.items()}


def check_bytes(headers: Mapping[Path, Header], rank: int = 0, size: int = 1) -> None:
    """Compare the bytes of all tensors with their recorded checksums; each of `size` ranks compares a share.

    Raises:
        ValueError: A file has no checksums, or a tensor's bytes differ from its checksum; names the first.
    """
    bare = next((path for path, header in headers.items() if header.tensors and not header.checksums), None)
    if bare is not None:
        raise ValueError(
            f"{bare} has no recorded checksums, which every save of ckpt writes; leave out the check, or write the "
            "checkpoint anew (`ckpt merge`)"
        )
    check_recorded(headers, rank, size)


def check_recorded(headers: Mapping[Path, Header], rank: int = 0, size: int = 1) -> None:
    """Compare the bytes of tensors with their checksums in the files that record checksums; errors as `check_bytes`."""
    tensors = [(path, name) for path, header in headers.items() for name in header.checksums][rank::size]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-sum") as pool:
        sums = pool.map(lambda item: crc32(item[0], headers[item[0]].tensors[item[1]]), tensors)
        for (path, name), value in zip(tensors, sums, strict=True):
            recorded = headers[path].checksums[name]
            if value != recorded:
                pool.shutdown(cancel_futures=True)
                raise ValueError(
                    f"{name} in {path} is damaged: its checksum is {value}, recorded was {recorded}; restore the file "
                    "from a copy"
                )
