"""`StageRing`: decoding steps over the stages of a pipeline, each of which works on another group of sequences.

The next token of a sequence starts at the first stage when the last one has drawn the token before. So sequences go
through the S stages in S groups, and no stage waits (DeepSpeed Inference, https://arxiv.org/abs/2207.00032).

Shape legend: S stages, M sequences of a group, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache

# (number of the chunk, batch, cache of each chunk, hidden states in front of the chunk or None for tokens)
# -> the hidden states behind the chunk, or the logits behind the last one.
ChunkForward = Callable[[int, PackedSequence, Sequence[SequenceCache], Tensor | None], Tensor]

# (number of the chunk, M, whether behind the chunk) -> an empty tensor for the hidden states there.
NewStates = Callable[[int, int, bool], Tensor]


class StageRing:
    """One rank's part in decoding steps over a pipeline.

    In each tick a rank computes one of its chunks for one group, a *visit*, and every rank exchanges with its
    neighbours first: rank r makes its n-th visit, of group n mod S, in tick n + r. N tokens of all groups take
    N S C + S - 1 ticks for C chunks a rank. Between ticks, hidden states go to the next rank in the ring, and what the
    last chunk has drawn goes to all other ranks.

    Args:
        group: The stages, in order.
        chunks: C.
        forward: Computes one chunk.
        new_states: Makes the memory of hidden states, which stays for CUDA graphs.
    """

    def __init__(self, group: ProcessGroup, chunks: int, forward: ChunkForward, new_states: NewStates) -> None:
        self.group, self.chunks, self._forward, self._new_states = group, chunks, forward, new_states
        self.size, self._rank = group.size(), group.rank()
        self._states: dict[tuple[int, int, bool], Tensor] = {}

    def compute(self, chunk: int, packed: PackedSequence, caches: Sequence[SequenceCache]) -> Tensor | None:
        """Compute a chunk, from and to the memory that `run` exchanges; return the logits behind the last chunk."""
        hidden = None if self._begins(chunk) else self._memory(chunk, packed.num_tokens, behind=False)
        result = self._forward(chunk, packed, caches, hidden)
        if self._ends(self._rank, chunk):
            return result
        self._memory(chunk, packed.num_tokens, behind=True).copy_(result)
        return None

    def run(
        self,
        steps: int,
        draws: Sequence[Tensor],
        visit: Callable[[int, int], None],
        finish: Callable[[int], None],
    ) -> None:
        """Draw `steps` tokens of every sequence.

        Args:
            steps: The number of tokens.
            draws: The memory of the draws of each of the S groups, `[M, 2 + K]` int32.
            visit: Computes a chunk for a group by `compute`, and writes the draws behind the last chunk.
            finish: Adds the draws of a group, which its memory has on every rank by then.
        """
        rows, visits = len(draws[0]), steps * self.chunks * self.size
        for tick in range(visits + self.size):
            # What this rank computes now and has computed last, and what the last rank has computed last.
            present, before, drawn = tick - self._rank, tick - self._rank - 1, tick - self.size
            operations = []
            if 0 <= before < visits and not self._ends(self._rank, self._chunk(before)):
                states = self._memory(self._chunk(before), rows, behind=True)
                operations.append(self._operation(dist.isend, states, (self._rank + 1) % self.size))
            if 0 <= present < visits and not self._begins(self._chunk(present)):
                states = self._memory(self._chunk(present), rows, behind=False)
                operations.append(self._operation(dist.irecv, states, (self._rank - 1) % self.size))
            finished = drawn >= 0 and self._ends(self.size - 1, self._chunk(drawn))
            if finished:
                table, last = draws[drawn % self.size], self.size - 1
                if self._rank == last:
                    operations += [self._operation(dist.isend, table, rank) for rank in range(last)]
                else:
                    operations.append(self._operation(dist.irecv, table, last))
            for request in dist.batch_isend_irecv(operations) if operations else ():
                request.wait()
            if finished:
                finish(drawn % self.size)
            if 0 <= present < visits:
                visit(present % self.size, self._chunk(present))

    def _operation(self, operation: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self.group, group_peer=peer)

    def _chunk(self, visit: int) -> int:
        """Return the chunk of a rank's visit."""
        return visit // self.size % self.chunks

    def _begins(self, chunk: int) -> bool:
        """Return whether a chunk of this rank takes tokens."""
        return self._rank == 0 and chunk == 0

    def _ends(self, rank: int, chunk: int) -> bool:
        """Return whether a chunk of a rank is the last of the model."""
        return rank == self.size - 1 and chunk == self.chunks - 1

    def _memory(self, chunk: int, rows: int, *, behind: bool) -> Tensor:
        key = chunk, rows, behind
        if key not in self._states:
            with torch.inference_mode(False):
                self._states[key] = self._new_states(*key)
        return self._states[key]
