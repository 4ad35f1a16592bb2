"""Planners and storage for torch.distributed.checkpoint: boxes are its shards, safetensors files its storage.

torch finds replicas, divides the writing, and finds the stored chunks of a wanted box. The planners here describe boxes
of canonical tensors to torch. The storage keeps a safetensors file for each rank and `metadata.json`; nothing is
pickled.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckpt.files.boxio import BoxOf, IOCounter, StagingPool, read_box, view_of
from ckpt.files.contents import METADATA
from ckpt.files.disk import bytes_in, room_for
from ckpt.files.dtypes import DTYPES, dtype_name
from ckpt.files.header import Header, read_header
from ckpt.files.written_files import write_json
from ckpt.layout.config import read_json_file
from ckpt.layout.pieces import Shape, extents, volume
from ckpt.transfer.relay import write_own_file


def _chunk(box: BoxOf) -> ChunkStorageMetadata:
    """Return the box as torch describes a chunk."""
    return ChunkStorageMetadata(torch.Size(start for start, _ in box.box), torch.Size(extents(box.box)))


def _key(name: str, offsets: torch.Size) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


class BoxSavePlanner(DefaultSavePlanner):
    """Plans the writing of boxes; one of the ranks with the same box writes the box."""

    def __init__(self, boxes: list[BoxOf]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {_key(box.name, _chunk(box).offsets): box for box in boxes}

    def create_local_plan(self) -> SavePlan:
        """Return a plan with one shard for each box."""
        items = [
            WriteItem(
                index=MetadataIndex(box.name, _chunk(box).offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(box), TensorProperties(dtype=box.memory.dtype), torch.Size(box.shape)
                ),
            )
            for box in self._boxes.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the memory of a box."""
        offset = write_item.index.offset
        return self._boxes[_key(write_item.index.fqn, torch.Size() if offset is None else offset)].memory


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of boxes from the stored chunks."""

    def __init__(self, boxes: list[BoxOf]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {_key(box.name, _chunk(box).offsets): box for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        """Return a plan with the parts of stored chunks that fill each box."""
        items: list[ReadItem] = []
        assert self.metadata is not None
        for box in self._boxes.values():
            stored = self.metadata.state_dict_metadata.get(box.name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != box.shape:
                there = "is not in it" if stored is None else f"has shape {tuple(getattr(stored, 'size', ()))} in it"
                raise ValueError(f"the training checkpoint is of another model: {box.name} {box.shape} {there}")
            parts = create_read_items_for_chunk_list(box.name, stored, [_chunk(box)])
            if sum(math.prod(part.lengths) for part in parts) != volume(box.box):
                raise ValueError(f"the training checkpoint does not hold every element of {box.name} once; restore it")
            items += parts
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view that a part fills."""
        offset = read_item.dest_index.offset
        box = self._boxes[_key(read_item.dest_index.fqn, torch.Size() if offset is None else offset)]
        wanted = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return view_of(box.memory, tuple((start, start + length) for start, length in wanted))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: a part is read straight into its place."""


class SafetensorsWriter(StorageWriter):
    """Writes a safetensors file for each rank; the coordinator writes `metadata.json`."""

    def __init__(self, folder: Path, group: ProcessGroup | None, counter: IOCounter) -> None:
        self._folder = folder
        self._group = group
        self._counter = counter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor takes the folder."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank its file."""
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank:05d}.safetensors") for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's file, here or on another rank (`ckpt.transfer.relay`)."""
        tensors = {_key(item.index.fqn, item.index.offset or torch.Size()): item for item in plan.items}
        resolved = {key: planner.resolve_data(item) for key, item in tensors.items()}
        memory = {key: tensor for key, tensor in resolved.items() if isinstance(tensor, Tensor)}
        layout = write_own_file(self._folder, plan.storage_data, memory, self._group, self._counter)
        assert layout is not None
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, layout.tensors[key][1].nbytes, (plan.storage_data, key))
                for key, item in tensors.items()
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the file and the key of each chunk to `metadata.json`."""
        placed = {_key(r.index.fqn, r.index.offset or torch.Size()): r.storage_data for rank in results for r in rank}
        tensors: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = []
            for chunk in stored.chunks:
                file, key = placed[_key(name, chunk.offsets)]
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "key": key})
            dtype = dtype_name(stored.properties.dtype)
            tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
        with room_for(bytes_in(self._folder), self._folder.parent):
            write_json(self._folder / METADATA, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any folder will do."""
        return True


class SafetensorsReader(StorageReader):
    """Reads the files of a `SafetensorsWriter`."""

    def __init__(self, folder: Path, counter: IOCounter) -> None:
        self._folder = folder
        self._counter = counter
        self._placed: Mapping[str, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor takes the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Parse `metadata.json`.

        Raises:
            ValueError: The file is missing or malformed.
        """
        return _metadata(self._folder)[0]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Read the file and the key of each chunk."""
        self._placed = _metadata(self._folder)[1]

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every part, file by file, straight into its place."""
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            file, key = self._placed[_key(item.storage_index.fqn, torch.Size() if offset is None else offset)]
            by_file.setdefault(file, []).append((key, item))
        stagings = StagingPool()
        for file, items in by_file.items():
            header = read_header(self._folder / file)
            fd = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for key, item in items:
                    if key not in header.tensors:
                        raise ValueError(f"{self._folder / file} does not hold {key}, which {METADATA} says it does")
                    ranges = zip(item.storage_offsets, item.lengths, strict=True)
                    box = tuple((start, start + length) for start, length in ranges)
                    into = planner.resolve_tensor(item)
                    read_box(fd, header.tensors[key], box, into, stagings.on(into.device), self._counter, key)
                    planner.commit_tensor(item, into)
            finally:
                os.close(fd)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a folder has `metadata.json`."""
        return (Path(checkpoint_id) / METADATA).is_file()


def stored_tensors(folder: Path) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return the tensors of a checkpoint folder: name -> type and full shape.

    Raises:
        ValueError: Its metadata is missing or malformed.
    """
    stored = _metadata(folder)[0].state_dict_metadata
    return {
        name: (entry.properties.dtype, tuple(entry.size))
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def check_headers(folder: Path, rank: int, size: int) -> dict[Path, Header]:
    """Compare `metadata.json` with the headers of this rank's share of the files; `size` ranks divide the files.

    Returns:
        The headers of the share.

    Raises:
        ValueError: A file is missing or broken, or its tensors differ from `metadata.json`; names the first.
    """
    metadata, placed = _metadata(folder)
    said: dict[str, dict[str, tuple[torch.dtype, Shape]]] = {
        path.name: {} for path in folder.glob("rank-*.safetensors")
    }
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            file, key = placed[_key(name, chunk.offsets)]
            said.setdefault(file, {})[key] = (entry.properties.dtype, tuple(chunk.sizes))
    headers = {}
    for file in sorted(said)[rank::size]:
        headers[folder / file] = header = read_header(folder / file)
        held = {key: (info.dtype, info.shape) for key, info in header.tensors.items()}
        odd = next((key for key in {**held, **said[file]} if held.get(key) != said[file].get(key)), None)
        if odd is not None:
            there, here = (f"{tensors[odd]}" if odd in tensors else "nothing" for tensors in (held, said[file]))
            raise ValueError(
                f"{folder / file} and {METADATA} disagree about {odd!r}: the file holds {there}, {METADATA} says "
                f"{here}; one of the two is damaged: restore the folder from a copy, or load another step"
            )
    return headers


def _metadata(folder: Path) -> tuple[Metadata, dict[str, tuple[str, str]]]:
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a folder that save_training has written")
    tensors: dict[str, Any] = {}
    placed: dict[str, tuple[str, str]] = {}
    try:
        for name, entry in read_json_file(path).items():
            chunks = []
            shape = entry["shape"]
            for chunk in entry["chunks"]:
                if not _fits(chunk["offsets"], chunk["sizes"], shape):
                    raise ValueError(f"{path}: a chunk of {name} is not within its shape: {chunk!r:.200}")
                if Path(chunk["file"]).name != chunk["file"]:
                    raise ValueError(f"{path} names the file {chunk['file']!r}, outside the folder")
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                key = _key(name, offsets)
                if key in placed or chunk["key"] != key:
                    raise ValueError(
                        f"{path}: a chunk of {name} has the key {chunk['key']!r}; it must be {key!r}, once"
                    )
                placed[key] = (chunk["file"], key)
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is malformed: {error!r}") from None
    return Metadata(tensors), placed


def _fits(offsets: Any, sizes: Any, shape: Any) -> bool:
    """Return whether a chunk's entries are lists of numbers, and the chunk is within the shape."""
    lists = (offsets, sizes, shape)
    if any(not isinstance(held, list) or any(type(number) is not int for number in held) for held in lists):
        return False
    return len(offsets) == len(sizes) == len(shape) and all(
        0 <= start <= start + length <= total < 1 << 62
        for start, length, total in zip(offsets, sizes, shape, strict=True)
    )
