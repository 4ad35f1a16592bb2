"""Token embedding with the vocabulary sharded over a tensor-parallel group.

Shape suffixes: T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import reduce_from_tensor_parallel, reduce_scatter_to_sequence_parallel
from parallel_layers.initialization import fill_parameter_, normal, shared_seed
from parallel_layers.parallel_module import ParallelModule
from parallel_layers.sharding import Block, Sharding, set_sharding


class VocabParallelEmbedding(ParallelModule):
    """Look up rows of a table `[V, H]` whose rows are sharded over the group.

    Rank r holds the rows `r * n .. (r + 1) * n - 1` with `n = ceil(V / tp)`; rows from V on are padding and zero. Each
    rank looks up the ids that it holds and contributes zeros for the others, so the sum over the ranks is exact.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        group: The tensor-parallel group.
        sequence_parallel: Return only this rank's tokens.
        dtype: The dtype of the table.
        device: The device of the table.

    Forward: all-reduce; sequence parallel: reduce-scatter. Backward: none; sequence parallel: all-gather. The gradient
    of a row is complete on the rank that holds the row.

    Initial rows are drawn from N(0, 1), by one number from torch's default CPU generator: ranks with the same seed hold
    shards of one table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.first, self.last = vocab_range(num_embeddings, group)
        rows = -(-num_embeddings // (1 if group is None else group.size()))
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, dtype=dtype, device=device))
        if group is not None:
            set_sharding(self, "weight", Sharding(group, 0, num_embeddings, (Block(self.first, self.last),)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's rows from N(0, 1) and set the padding to 0."""
        fill_parameter_(self, "weight", shared_seed(), normal(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of all `ids` `[T, ...]`: `[T, ..., H]`, sequence parallel `[T/tp, ..., H]`.

        Raises:
            ValueError: An id is outside `0 .. V - 1`; on every rank. CUDA ids and compiled code are checked by an
                assertion on the device, because reading ids would stall the host in every step. Call `check_token_ids`
                before the copy to the GPU to get the ValueError.
        """
        check_token_ids(ids, self.num_embeddings)
        outside = (ids < self.first) | (ids >= self.last)
        rows = F.embedding((ids - self.first).masked_fill(outside, 0), self.weight)
        if self.group is None:
            return rows
        rows = rows.masked_fill(outside.unsqueeze(-1), 0.0)
        reduce = reduce_scatter_to_sequence_parallel if self.sequence_parallel else reduce_from_tensor_parallel
        # At most one addend is not zero, so the sum is exact in any dtype.
        return reduce(rows, self.group, reduce_dtype=rows.dtype)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {self.first}..{self.last - 1}"


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
    if ids.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"a {name} is outside the vocabulary 0..{vocab_size - 1}")
    elif not ids.is_meta and wrong.any():
        index = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} {ids[tuple(index)].item()} at index {index} is outside the vocabulary 0..{vocab_size - 1}; "
            "check that the tokenizer belongs to the model"
        )
