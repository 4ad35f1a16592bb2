"""Write one file for each rank; another rank writes the file of a rank that does not reach the folder.

Where the ranks share no file system, each rank looks whether it sees the folder. A rank that does not sends its tensors
to a rank that does, point to point and in buckets of at most `BUCKET_BYTES`, the extra memory on either side.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.boxio import IOCounter, StagingPool, view_of, write_box
from ckpt.files.disk import room_for
from ckpt.files.dtypes import DTYPES, dtype_name
from ckpt.files.header import TensorInfo
from ckpt.files.written_files import FilePlan, create_files
from ckpt.layout.pieces import Box, Shape, extents, full_box, split_box
from ckpt.transfer.agreement import all_gather_json, group_device

BUCKET_BYTES = 64 << 20

T = TypeVar("T")
Tensors = Mapping[str, Tensor]


def reaches(folder: Path) -> bool:
    """Return whether this rank sees a folder that another rank has just created, and may write in it."""
    return os.access(folder, os.W_OK | os.X_OK)


def write_own_file(
    folder: Path, file: str | None, tensors: Tensors, group: ProcessGroup | None, counter: IOCounter
) -> FilePlan | None:
    """Write this rank's safetensors file, here or on another rank; every rank of the group calls this.

    An error is raised only on the rank that finds it, after all data is received: call `agree` afterwards.

    Args:
        folder: A folder in which at least rank 0 can write.
        file: The name of this rank's file; None: this rank has no file.
        tensors: The tensors of the file.
        group: The ranks; None: this process alone.
        counter: Counts the bytes that this rank writes.

    Returns:
        The layout of the file; None without a file.

    Raises:
        ValueError: A tensor's type cannot be stored.
        OSError: The disk is full, or a file cannot be written.
    """
    errors: list[ValueError | OSError] = []
    plan = None if file is None else _attempt(errors, lambda: _plan(file, tensors))
    facts = all_gather_json([reaches(folder), 0 if plan is None else plan.nbytes], group)
    here = [bool(can) for can, _ in facts]
    writers = [rank for rank, can in enumerate(here) if can]
    rank = 0 if group is None else group.rank()
    remote = None if plan is None or here[rank] else _describe(plan)
    described = [None] * len(here) if all(here) else all_gather_json(remote, group)
    if here[rank] and plan is not None:
        _attempt(errors, lambda: _write(folder, plan, tensors, counter))
    for number, (sender, message) in enumerate((r, m) for r, m in enumerate(described) if m is not None):
        writer = writers[number % len(writers)]
        if rank == sender:
            assert plan is not None
            assert group is not None
            _send(plan, tensors, writer, group)
        elif rank == writer:
            assert group is not None
            _receive(folder, _plan_of(message), sender, group, counter, errors)
    if errors:
        with room_for(sum(nbytes for _, nbytes in facts), folder.parent):
            raise errors[0]
    return plan


def _attempt(errors: list[ValueError | OSError], step: Callable[[], T]) -> T | None:
    """Run a step unless an earlier step has failed; keep the error, because the other ranks need this rank to go on."""
    if not errors:
        try:
            return step()
        except (ValueError, OSError) as error:
            errors.append(error)
    return None


def _plan(file: str, tensors: Tensors) -> FilePlan:
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for dtype, _ in shapes.values():
        dtype_name(dtype)
    return FilePlan({file: shapes}, {})


def _describe(plan: FilePlan) -> dict[str, Any]:
    return {
        file: [[name, dtype_name(dtype), list(shape)] for name, (dtype, shape) in shard.items()]
        for file, shard in plan.contents.items()
    }


def _plan_of(message: Mapping[str, Any]) -> FilePlan:
    contents = {
        file: {name: (DTYPES[dtype], tuple(shape)) for name, dtype, shape in shard} for file, shard in message.items()
    }
    return FilePlan(contents, {})


def _write(folder: Path, plan: FilePlan, tensors: Tensors, counter: IOCounter) -> None:
    create_files(folder, plan)
    stagings = StagingPool()
    for file in plan.contents:
        with open(folder / file, "r+b", buffering=0) as opened:
            for name, (_, info) in plan.tensors.items():
                if math.prod(info.shape):
                    staging = stagings.on(tensors[name].device)
                    write_box(opened.fileno(), info, full_box(info.shape), tensors[name], staging, counter)
    plan.complete(folder)


def _buckets(plan: FilePlan) -> Iterator[tuple[str, TensorInfo, Box]]:
    """Yield the boxes to send, in the same order on both sides."""
    for name, (_, info) in plan.tensors.items():
        if math.prod(info.shape):
            for box in split_box(full_box(info.shape), max(1, BUCKET_BYTES // info.dtype.itemsize)):
                yield name, info, box


def _send(plan: FilePlan, tensors: Tensors, writer: int, group: ProcessGroup) -> None:
    device = group_device(group)
    for name, _, box in _buckets(plan):
        values = view_of(tensors[name].detach(), box).to(device).contiguous()
        dist.send(values.view(-1).view(torch.uint8), group=group, group_dst=writer)


def _receive(
    folder: Path,
    plan: FilePlan,
    sender: int,
    group: ProcessGroup,
    counter: IOCounter,
    errors: list[ValueError | OSError],
) -> None:
    """Receive a whole file, even after an error here: the sender must not wait for ever."""
    device = group_device(group)
    staging = StagingPool().on(device)
    _attempt(errors, lambda: create_files(folder, plan))
    (file,) = plan.contents
    fds: list[int] = []
    _attempt(errors, lambda: fds.append(os.open(folder / file, os.O_WRONLY | os.O_CLOEXEC)))
    try:
        for _, info, box in _buckets(plan):
            shape: Shape = extents(box)
            buffer = torch.empty(math.prod(shape) * info.dtype.itemsize, dtype=torch.uint8, device=device)
            dist.recv(buffer, group=group, group_src=sender)
            if fds:
                values = buffer.view(info.dtype).view(shape)
                _attempt(errors, partial(write_box, fds[0], info, box, values, staging, counter))
        _attempt(errors, lambda: plan.complete(folder))
    finally:
        for fd in fds:
            os.close(fd)
