"""The teacher's rows that belong to a student's rows, where both heads are sharded over groups of their own.

Shape suffixes: H hidden, V this rank's rows of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.names import GPU
from parallel_layers.distributed import async_collectives
from parallel_layers.head.vocabulary import vocab_range
from parallel_layers.kernels.runtime import device_type

EXCHANGE_ELEMENTS = {"cpu": 1 << 21, GPU: 1 << 26}
"""Largest gathered part of a teacher's head, in elements, by device type; other devices take the CUDA value."""

Rows = tuple[slice | Tensor, Tensor]
"""Some of this rank's rows of the student, and the teacher's rows `[n, H]` of the same entries."""


def paired_rows(
    weight_VH: Tensor,
    vocab_size: int,
    group: ProcessGroup | None,
    teacher_VH: Tensor,
    teacher_group: ProcessGroup | None,
    student_ids: Tensor | None,
) -> Iterator[Rows]:
    """Yield all rows of this rank that have a teacher's row, each once, with the teacher's rows.

    `student_ids` `[teacher's rows of all ranks]` are the entries of the student's vocabulary, -1 for none (None: equal
    ids). Heads sharded alike, and a teacher's head that each rank holds whole, are paired without communication.
    Otherwise the ranks of the teacher's group gather the head in parts that take every n-th row of each rank, so that
    every part has work for every rank; the next part is sent during the work on this part.
    """
    first, last = vocab_range(vocab_size, group, len(weight_VH))
    if student_ids is None and (is_local(weight_VH, group, teacher_VH, teacher_group)):
        start = 0 if async_collectives.is_sharded(teacher_group) else first
        yield slice(0, last - first), teacher_VH[start : start + last - first]
        return
    for begin, step, part in _gathered_parts(teacher_VH, teacher_group):
        if student_ids is None:
            low, high = (min(max(0, -(-(bound - begin) // step)), len(part)) for bound in (first, last))
            if low < high:
                yield slice(begin + low * step - first, begin + (high - 1) * step - first + 1, step), part[low:high]
            continue
        rows = student_ids[begin : begin + (len(part) - 1) * step + 1 : step] - first
        local = ((rows >= 0) & (rows < last - first)).nonzero()[:, 0]
        yield rows[local], part[local]


def is_local(
    weight_VH: Tensor, group: ProcessGroup | None, teacher_VH: Tensor, teacher_group: ProcessGroup | None
) -> bool:
    """Return whether each rank has the teacher's rows of its own entries."""
    if not async_collectives.is_sharded(teacher_group):
        return True
    if not async_collectives.is_sharded(group):
        return False
    ranks = [dist.get_process_group_ranks(g) for g in (group, teacher_group)]
    return len(weight_VH) == len(teacher_VH) and ranks[0] == ranks[1]


def _gathered_parts(teacher_VH: Tensor, group: ProcessGroup | None) -> Iterator[tuple[int, int, Tensor]]:
    """Yield `(first id, step, rows)` of each rank's rows, some of them at a time."""
    size = group.size() if async_collectives.is_sharded(group) else 1
    limit = EXCHANGE_ELEMENTS.get(device_type(teacher_VH.device), EXCHANGE_ELEMENTS[GPU])
    steps = max(1, min(len(teacher_VH), -(-size * teacher_VH.numel() // limit)))

    def start(first: int) -> Tensor:
        rows = teacher_VH[first::steps]
        return async_collectives.start_all_gather(rows, group) if async_collectives.is_sharded(group) else rows

    pending = start(0)
    for first in range(steps):
        gathered = async_collectives.wait(pending) if size > 1 else pending
        if first + 1 < steps:
            pending = start(first + 1)
        for rank, part in enumerate(gathered.chunk(size)):
            yield rank * len(teacher_VH) + first, steps, part
