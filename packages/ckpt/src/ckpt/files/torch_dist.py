"""Read and write the files of torch's distributed checkpoints, the format `torch_dist` of Megatron-Core.

A folder has an index, `.metadata`, and data files, `__RANK_0.distcp`. A tensor is divided into chunks. Each chunk is an
archive of `torch.save`, and lies at an offset of a data file. The index is a pickle of
`torch.distributed.checkpoint.metadata.Metadata`: the dtype, the shape and the chunks of each tensor, and the place of
each chunk. Specification: torch.distributed.checkpoint, `metadata.py` and `filesystem.py`.

Nothing that is read here can run code: the index is unpickled with plain records of torch's alone, and a chunk with
`weights_only=True`.
"""

import dataclasses
import enum
import io
import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from ckpt.files.disk import sync
from ckpt.files.header import TensorInfo
from ckpt.files.mirror import open_weights
from ckpt.layout.pieces import Box, Shape, extents

METADATA = ".metadata"
_RECORDS = {f"torch.distributed.checkpoint.{module}" for module in ("metadata", "filesystem", "planner")}
_OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}


class Chunk(NamedTuple):
    """A chunk of a stored tensor: its box, and the archive of `length` bytes at `offset` of `path`."""

    box: Box
    path: Path
    offset: int
    length: int


class StoredTensor(NamedTuple):
    """An entry of the index."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Chunk]


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name; entries that are pickled objects are left out.

    Raises:
        ValueError: The index is missing or damaged, or asks for a class that could run code.
    """
    path = folder / METADATA
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        places = {(at.fqn, tuple(at.offset or ())): place for at, place in index.storage_data.items()}
        return {
            name: _stored(folder, name, entry, places)
            for name, entry in index.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle raises errors of nearly any type
        raise ValueError(
            f"{path} is no index of a distributed checkpoint: {error!s:.200}; copy the file again"
        ) from None


def _stored(folder: Path, name: str, entry: Any, places: Mapping[tuple[str, Shape], Any]) -> StoredTensor:
    chunks = []
    for chunk in entry.chunks:
        start = tuple(chunk.offsets)
        box = tuple((low, low + size) for low, size in zip(start, chunk.sizes, strict=True))
        place = places[name, start]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{name} is compressed ({place.transform_descriptors}); save it without an extension")
        # The name comes from the file: it must not lead out of the folder.
        chunks.append(Chunk(box, folder / Path(place.relative_path).name, int(place.offset), int(place.length)))
    return StoredTensor(entry.properties.dtype, tuple(entry.size), chunks)


class _Properties:
    """The properties of a stored tensor: the dtype, and more with each version of torch."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _IndexUnpickler(pickle.Unpickler):
    """Load an index; refuse every class and function that is no plain record of torch's checkpoints."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or a dtype; the folder of the save may be a path."""
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePath
        if (module, name) == ("torch.distributed.checkpoint.metadata", "TensorProperties"):
            return _Properties
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in _RECORDS:
            record = super().find_class(module, name)
            plain = isinstance(record, type) and (dataclasses.is_dataclass(record) or issubclass(record, enum.Enum))
            if plain and record.__module__ == module:
                return record
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")


class ChunkReader:
    """Find the tensors in the archives of chunks, without reading their values."""

    def __init__(self) -> None:
        # The pickle of an archive holds the dtype, the shape and the strides: most chunks share a few pickles.
        self._kinds: dict[bytes, tuple[torch.dtype, Shape, int]] = {}

    def locate(self, name: str, tensor: StoredTensor, chunk: Chunk) -> TensorInfo:
        """Return where the values of a chunk lie in its file.

        Raises:
            ValueError: The file is missing or damaged, or holds something else than the index says.
        """
        try:
            with open_weights(chunk.path) as file:
                archive = _Section(file, chunk.offset, chunk.length)
                with zipfile.ZipFile(cast(BinaryIO, archive)) as entries:
                    by_name = {entry.filename.partition("/")[2]: entry for entry in entries.infolist()}
                    raw = entries.read(by_name["data.pkl"])
                if raw not in self._kinds:
                    self._kinds[raw] = _kind(archive)
                values = by_name["data/0"]
                archive.seek(values.header_offset + 26)
                lengths = archive.read(4)
        except OSError as error:
            raise ValueError(f"{chunk.path} cannot be read: {error.strerror}; copy the missing file") from None
        except Exception as error:  # a damaged archive raises errors of nearly any type
            raise ValueError(f"{chunk.path}: {name} is damaged ({error!s:.200}); copy the file again") from None
        dtype, shape, first = self._kinds[raw]
        expected = (tensor.dtype, extents(chunk.box))
        if (dtype, shape) != expected or values.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{chunk.path}: {name} is {dtype} {shape}, and the index says {expected}; copy it again")
        # The header of an entry has 30 bytes, then its name and its padding.
        start = values.header_offset + 30 + int.from_bytes(lengths[:2], "little")
        start += int.from_bytes(lengths[2:], "little") + first
        return TensorInfo(dtype, shape, chunk.offset + start)


def _kind(archive: "_Section") -> tuple[torch.dtype, Shape, int]:
    """Return the dtype and shape of the tensor of an archive, and its first byte in its storage."""
    # Fake tensors have no values. The import takes as long as torch.
    from torch._subclasses.fake_tensor import FakeTensorMode

    archive.seek(0)
    with FakeTensorMode():
        tensor = torch.load(cast(BinaryIO, archive), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or not tensor.is_contiguous():
        raise pickle.UnpicklingError("it holds no contiguous tensor")
    return tensor.dtype, tuple(tensor.shape), int(tensor.storage_offset()) * tensor.element_size()


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        content = self._file.read(left if size < 0 else min(size, left))
        self._position += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class ChunkWriter:
    """Write data files, one after another, and then the index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, StoredTensor] = {}

    def write_file(self, rank: int, chunks: Iterable[tuple[str, Shape, Box, Tensor]]) -> None:
        """Write the chunks of a rank, in this order: (name, shape of the whole tensor, box, values on the CPU)."""
        path = self._folder / f"__{rank}_0.distcp"
        with open(path, "wb") as file:
            for name, shape, box, values in chunks:
                start = file.tell()
                torch.save(values, file)
                entry = self._tensors.setdefault(name, StoredTensor(values.dtype, shape, []))
                entry.chunks.append(Chunk(box, path, start, file.tell() - start))
        sync(path)

    def write_index(self) -> None:
        """Write the index of all files."""
        from torch.distributed.checkpoint import filesystem, metadata

        index = metadata.Metadata({}, storage_data={}, storage_meta=metadata.StorageMeta(), version="1.0.0")
        for name, tensor in self._tensors.items():
            chunks = []
            for box, path, start, length in tensor.chunks:
                offsets = torch.Size(low for low, _ in box)
                chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size(extents(box))))
                place = filesystem._StorageInfo(path.name, start, length)
                index.storage_data[metadata.MetadataIndex(name, offsets)] = place
            properties = metadata.TensorProperties(tensor.dtype)
            index.state_dict_metadata[name] = metadata.TensorStorageMetadata(
                properties, torch.Size(tensor.shape), chunks
            )
        with open(self._folder / METADATA, "wb") as file:
            pickle.dump(index, file)
        sync(self._folder / METADATA)
