"""A vocabulary sharded over ranks: its ranges and ids, its size, and the checks that the ranks agree."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from parallel_layers.device.gpus import on_gpu
from parallel_layers.distributed import async_collectives

IGNORE_INDEX = -100
"""The label of tokens without a label, as in torch and transformers."""


def group_name(group: ProcessGroup | None) -> str:
    """Return the name by which `group_of` finds the group; "" for no group."""
    return "" if group is None else group.group_name


def group_of(name: str) -> ProcessGroup | None:
    """Return the group of that name; arguments of custom operators are tensors, numbers and strings."""
    # torch's own functional collectives use this private function; there is no public one.
    return _resolve_process_group(name) if name else None  # type: ignore[arg-type]


def gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the ranks' `x` concatenated along dim 0."""
    return async_collectives.all_gather(x, group) if group is not None and async_collectives.is_sharded(group) else x


def vocab_range(vocab_size: int, group: ProcessGroup | None, rows: int | None = None) -> tuple[int, int]:
    """Return `(first, last)`: this rank holds the ids `first .. last - 1`.

    `rows` are the rows of each rank, padding included (default: `ceil(V / tp)`).
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    rows = -(-vocab_size // size) if rows is None else rows
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


def check_token_ids(ids: Tensor, vocab_size: int, *, ignore_index: int | None = None) -> None:
    """Raise ValueError if an id is outside `0 .. vocab_size - 1` (CUDA or compiled: assert on the device).

    With `ignore_index` the ids are labels, and this label is allowed.
    """
    name = "token id" if ignore_index is None else "label"
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if on_gpu(ids) or torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"a {name} is outside the vocabulary 0..{vocab_size - 1}")
    elif not ids.is_meta and wrong.any():
        index = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} {ids[tuple(index)].item()} at index {index} is outside the vocabulary 0..{vocab_size - 1}; "
            "check that the tokenizer belongs to the model"
        )


def true_vocab_size(rows: int, vocab_size: int | None, group: ProcessGroup | None) -> int:
    """Return the size of the vocabulary; the default on a single rank is `rows`.

    Raises:
        ValueError: The size is missing for several ranks. `check_rows` checks a size that is given.
    """
    size = 1 if group is None else group.size()
    if vocab_size is None and size > 1:
        raise ValueError(
            f"vocab_size is left out, but {size} ranks of {rows} rows each may hold a vocabulary of "
            f"{(rows - 1) * size + 1} to {rows * size} entries and padding; pass vocab_size, or use VocabParallelHead"
        )
    return rows if vocab_size is None else vocab_size


# The rows and vocabulary sizes that the ranks of each group have already compared.
_compared: WeakKeyDictionary[ProcessGroup, set[tuple[int, int]]] = WeakKeyDictionary()


def check_rows(rows: int, vocab_size: int, group: ProcessGroup | None, device: torch.device) -> None:
    """Raise ValueError on every rank unless all ranks hold equally many rows, enough for one vocabulary.

    Communication: an all-gather of two numbers, once for each group and pair of numbers.
    """
    size = 1 if group is None else group.size()
    compared = set() if group is None else _compared.setdefault(group, set())
    if group is not None and size > 1 and device.type != "meta" and (rows, vocab_size) not in compared:
        sizes = async_collectives.all_gather(torch.tensor([[rows, vocab_size]], device=device), group).tolist()
        if any(pair != sizes[0] for pair in sizes):
            text = "; ".join(f"rank {rank}: {pair[0]} rows, vocab_size={pair[1]}" for rank, pair in enumerate(sizes))
            raise ValueError(
                f"the ranks disagree ({text}); give each rank ceil(vocab_size / tp) rows of one vocabulary, the "
                "last rows padded, as VocabParallelHead does"
            )
        compared.add((rows, vocab_size))
    if not 0 < vocab_size <= rows * size:
        raise ValueError(f"vocab_size={vocab_size} must be in 1..{rows * size}, the rows that {size} rank(s) hold")
