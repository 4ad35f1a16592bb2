"""The n largest logits of each token, in tiles of the vocabulary: in descending order, equal logits by the lowest id.

Entries of -inf have probability zero and are left out; a row with fewer entries ends with ids of -1 and -inf.

Shape suffixes: T tokens, N entries of a token, V entries of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TopEntries(NamedTuple):
    """Logits and their ids, both `[T, N]`, the ids int64."""

    logits: Tensor
    ids: Tensor

    @classmethod
    def empty(cls, num_tokens: int, n: int, like: Tensor) -> TopEntries:
        """Return rows without entries, with the dtype and the device of `like`."""
        return cls(like.new_full((num_tokens, n), -math.inf), torch.full((num_tokens, n), -1, device=like.device))

    def of_tokens(self, tokens: slice) -> TopEntries:
        """Return views of the rows of some tokens."""
        return TopEntries(self.logits[tokens], self.ids[tokens])

    def select(self, ids_TV: Tensor) -> TopEntries:
        """Return the entries with the ids that stand in the columns `self.ids`."""
        return TopEntries(self.logits, ids_TV.gather(1, self.ids.clamp(min=0)).masked_fill(self.ids < 0, -1))

    def update_(self, other: TopEntries) -> None:
        """Keep the N largest of both; entries of `self` come before equal entries of `other`."""
        merged = top_of(torch.cat((self.logits, other.logits), dim=1), self.logits.shape[1])
        merged = merged.select(torch.cat((self.ids, other.ids), dim=1))
        self.logits.copy_(merged.logits)
        self.ids.copy_(merged.ids)


def top_of(logits_TV: Tensor, n: int) -> TopEntries:
    """Return the n largest logits (at most V), by columns; of equal logits the first ones."""
    n = min(n, logits_TV.shape[1])
    logits, columns = logits_TV.topk(n)
    if n == 0:
        return TopEntries(logits, columns)
    # topk orders equal logits in any way, and takes any of those that equal the last one.
    columns = columns.sort().values
    logits, order = logits_TV.gather(1, columns).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    last = logits[:, -1:]
    cuts = (logits_TV == last).sum(dim=1) > (logits == last).sum(dim=1)
    rows = (cuts & (last[:, 0] > -math.inf)).nonzero()[:, 0]
    if len(rows):
        columns[rows] = logits_TV[rows].sort(dim=1, descending=True, stable=True).indices[:, :n]
    return TopEntries(logits, columns.masked_fill(logits == -math.inf, -1))
