"""`Chunks`: packed sequences cut into chunks of equal size, none over a border, without a read on the host.

Shape legend: T tokens, N sequences, M chunks, C tokens of a chunk; `...` any further dims.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Chunks(NamedTuple):
    """The chunks of every sequence, one sequence after another.

    There are M = max((T + N (C - 1)) // C, 1) chunks, the largest number that N sequences of T tokens can need, so that
    M does not depend on the lengths. Spare chunks come last and are empty.

    Attributes:
        sequences: The sequence of each chunk, `[M]`; of a spare chunk the last one.
        numbers: The number of each chunk in its sequence, `[M]`.
        first, last: The first and the last chunk of each sequence, `[N]`; `last` is -1 for an empty sequence.
        tokens: The token at each place of the chunks, `[M C]`; T where the place is empty.
        places: The place of each token in the chunks, `[T]`.
    """

    sequences: Tensor
    numbers: Tensor
    first: Tensor
    last: Tensor
    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, num_tokens: int, size: int) -> "Chunks":
        """Cut the sequences of `cu_seqlens [N+1]` into chunks of `size` tokens."""
        device, num_sequences = cu_seqlens.device, len(cu_seqlens) - 1
        num_chunks = max((num_tokens + num_sequences * (size - 1)) // size, 1)
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        counts = (lengths + size - 1) // size
        ends = counts.cumsum(0)
        chunk = torch.arange(num_chunks, device=device)
        sequences = torch.searchsorted(ends, chunk, right=True).clamp(max=num_sequences - 1)
        numbers = chunk - (ends - counts)[sequences]
        offsets = numbers[:, None] * size + torch.arange(size, device=device)
        tokens = torch.where(offsets < lengths[sequences, None], starts[sequences, None] + offsets, num_tokens)
        token = torch.arange(num_tokens, device=device)
        owner = sequence_of_tokens(cu_seqlens, num_tokens)
        places = (ends - counts)[owner] * size + token - starts[owner]
        first, last = (ends - counts).clamp(max=num_chunks - 1), torch.where(counts > 0, ends - 1, -1)
        return cls(sequences, numbers, first, last, tokens.flatten(), places)

    def of_slices(self, count: int) -> "Chunks":
        """Return the chunks of `count` slices, of N / count sequences each, as if a slice were one sequence.

        `numbers` stay: a sequence that begins inside a slice still begins anew.
        """
        per_slice = len(self.first) // count
        last = self.last.cummax(0).values[per_slice - 1 :: per_slice]
        return self._replace(sequences=self.sequences // per_slice, first=self.first[::per_slice], last=last)

    def cut(self, x: Tensor) -> Tensor:
        """Lay tokens out in chunks, `[T, ...]` -> `[M, C, ...]`; empty places are zero. Without a gradient."""
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))
        return padded[self.tokens].unflatten(0, (len(self.sequences), -1))

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`, `[M, C, ...]` -> `[T, ...]`. Without a gradient."""
        return x.flatten(0, 1)[self.places]


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the sequence of each token, `[T]`."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp(max=len(cu_seqlens) - 2)
