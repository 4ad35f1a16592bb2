"""Read many boxes at once: a few threads, each with its own open file, read straight into the destinations."""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ckpt.device import GPU, gpu
from ckpt.files.boxio import Staging, part_of, read_box
from ckpt.files.header import TensorInfo
from ckpt.files.mirror import open_weights
from ckpt.layout.pieces import Box, volume

# The bytes that a thread reads at a time: large enough that opening the file costs little.
BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Read:
    """A box of a file's tensor `name`, and the view of equal extents to fill."""

    name: str
    path: Path
    info: TensorInfo
    box: Box
    destination: Tensor

    def cut(self) -> Iterator["Read"]:
        """Yield parts of this read, each of at most a batch."""
        for box in self.info.parts(self.box, max(1, BATCH_BYTES // self.info.dtype.itemsize)):
            yield replace(self, box=box, destination=part_of(self.destination, box, self.box))

    def fill(self, fd: int, staging: Staging) -> None:
        """Read the box from the open file."""
        read_box(fd, self.info, self.box, self.destination, staging, f"{self.name} in {self.path}")


def read_all(reads: Iterable[Read], *, threads: int = 4) -> None:
    """Read all boxes, in the order of their bytes in the files; return when all are complete.

    Each thread has one staging buffer of 16 MiB, for tensors that are cast or on a GPU.

    Raises:
        ValueError: A file ended early, or a value is too large for the dtype of the cast.
        OSError: A file cannot be read.
    """
    ordered = sorted(reads, key=lambda read: (read.path, read.info.offset, read.box))
    devices = {read.destination.device for read in ordered if read.destination.device.type == GPU}
    # CUDA copies run on the caller's streams.
    streams = {device: gpu.current_stream(device) for device in devices}
    inference, local, ended = torch.is_inference_mode_enabled(), threading.local(), threading.Event()

    def run(batch: list[Read]) -> None:
        if ended.is_set():
            return
        if not hasattr(local, "staging"):
            local.staging = Staging()
        try:
            with open_weights(batch[0].path) as file, torch.inference_mode(inference):
                for read in batch:
                    device = read.destination.device
                    with gpu.stream(streams[device]) if device in streams else contextlib.nullcontext():
                        read.fill(file.fileno(), local.staging)
        except BaseException:
            ended.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
        try:
            for future in as_completed([pool.submit(run, batch) for batch in _batches(ordered)]):
                future.result()
        finally:
            ended.set()


def _batches(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield lists of neighbouring reads in one file, of about `BATCH_BYTES` each."""
    batch: list[Read] = []
    nbytes = 0
    for read in itertools.chain.from_iterable(whole.cut() for whole in reads):
        size = volume(read.box) * read.info.dtype.itemsize
        if batch and (nbytes + size > BATCH_BYTES or read.path != batch[0].path):
            yield batch
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += size
    if batch:
        yield batch
