"""Many reads at once: a few threads, each with a file of its own, straight into the destinations.

`preadv` runs without Python's lock, so that threads read, and first touch fresh memory, side by side.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from ckpt.files.boxio import IOCounter, StagingPool, part_of, read_box
from ckpt.files.header import TensorInfo
from ckpt.layout.pieces import Box, split_box, volume

# What one thread reads at a time: enough to make its file and its place in the queue cheap.
BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Read:
    """A box of a file's tensor `name`, and the view of equal extents that it is to fill."""

    name: str
    path: Path
    info: TensorInfo
    box: Box
    destination: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return volume(self.box) * self.info.dtype.itemsize

    def cut(self) -> Iterator["Read"]:
        """The read in parts of at most a batch."""
        for part in split_box(self.box, max(1, BATCH_BYTES // self.info.dtype.itemsize)):
            yield replace(self, box=part, destination=part_of(self.destination, part, self.box))


def read_all(
    reads: Iterable[Read],
    *,
    threads: int,
    counter: IOCounter,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read all boxes, in the order of their bytes in the files; returns when every one is in its place.

    Memory: one staging buffer of 16 MiB a thread, for what is cast, strided or on a GPU.

    Args:
        reads: what to read.
        threads: how many at once.
        counter: is given the bytes and calls.
        progress: called, in this thread, with the bytes that are read and those that will have been.

    Raises:
        ValueError: a file ended early, or a value is too large for the type that it is cast to.
        OSError: a file cannot be read.
    """
    ordered = sorted(reads, key=lambda read: (read.path, read.info.offset, read.box))
    total, done = sum(read.nbytes for read in ordered), 0
    devices = {read.destination.device for read in ordered if read.destination.device.type == "cuda"}
    worker = _Worker({device: torch.cuda.current_stream(device) for device in devices}, threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
        try:
            for future in as_completed([pool.submit(worker.run, batch) for batch in _batches(ordered)]):
                count = future.result()
                counter.data_bytes += count.data_bytes
                counter.calls += count.calls
                done += count.data_bytes
                if progress is not None:
                    progress(done, total)
        finally:
            worker.ended = True


def _batches(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Neighbouring reads of one file, about `BATCH_BYTES` together."""
    batch: list[Read] = []
    nbytes = 0
    for read in (part for whole in reads for part in whole.cut()):
        if batch and (nbytes + read.nbytes > BATCH_BYTES or read.path != batch[0].path):
            yield batch
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += read.nbytes
    if batch:
        yield batch


class _Worker:
    """Reads batches in a thread; CUDA copies run on the caller's streams.

    Attributes:
        ended: whether what is still to be read is wanted no more.
    """

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream], threads: int) -> None:
        self.ended = False
        self._streams = streams
        self._inference = torch.is_inference_mode_enabled()
        self._stagings: SimpleQueue[StagingPool] = SimpleQueue()
        for _ in range(threads):
            self._stagings.put(StagingPool())

    def run(self, batch: list[Read]) -> IOCounter:
        """Read a batch; returns the bytes and calls that it took."""
        counter = IOCounter()
        if self.ended:
            return counter
        stagings = self._stagings.get()
        try:
            with open(batch[0].path, "rb", buffering=0) as file, torch.inference_mode(self._inference):
                for read in batch:
                    device = read.destination.device
                    with self._on_stream(device):
                        staging = stagings.on(device)
                        name = f"{read.name} in {read.path}"
                        read_box(file.fileno(), read.info, read.box, read.destination, staging, counter, name)
        except BaseException:
            self.ended = True
            raise
        finally:
            self._stagings.put(stagings)
        return counter

    def _on_stream(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[device]) if device in self._streams else contextlib.nullcontext()
