"""Read many boxes at once: a few threads, each with its own open file, read straight into the destinations.

`preadv` runs without Python's lock, so the threads read, and touch fresh memory for the first time, in parallel.
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

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return volume(self.box) * self.info.dtype.itemsize

    def cut(self) -> Iterator["Read"]:
        """Yield parts of this read, each of at most a batch."""
        for part in split_box(self.box, max(1, BATCH_BYTES // self.info.dtype.itemsize)):
            yield replace(self, box=part, destination=part_of(self.destination, part, self.box))


def read_all(
    reads: Iterable[Read],
    *,
    threads: int,
    counter: IOCounter,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read all boxes, in the order of their bytes in the files; return when all are complete.

    Memory: one staging buffer of 16 MiB a thread, for tensors that are cast or on a GPU.

    Args:
        reads: The boxes to read.
        threads: The number of threads.
        counter: Counts the bytes and calls.
        progress: Called in the calling thread with the bytes read so far and the bytes in all.

    Raises:
        ValueError: A file ended early, or a value is too large for the dtype of the cast.
        OSError: A file cannot be read.
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
    """Yield lists of neighbouring reads in one file, of about `BATCH_BYTES` each."""
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
        ended: Whether the remaining reads are cancelled.
    """

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream], threads: int) -> None:
        self.ended = False
        self._streams = streams
        self._inference = torch.is_inference_mode_enabled()
        self._stagings: SimpleQueue[StagingPool] = SimpleQueue()
        for _ in range(threads):
            self._stagings.put(StagingPool())

    def run(self, batch: list[Read]) -> IOCounter:
        """Read a batch; return the count of its bytes and calls."""
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
