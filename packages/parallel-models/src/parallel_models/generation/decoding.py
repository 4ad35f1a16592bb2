"""`Decoding`: a model that generates, with its caches. N sequences, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import agree
from parallel_layers import PackedSequence
from parallel_layers.inference import PagedKVCache, SequenceCache
from parallel_models.engine.grid import Grid
from parallel_models.engine.vision import Visual
from parallel_models.generation.drafter import Drafter
from parallel_models.generation.options import Experts
from parallel_models.generation.stage_ring import StageRing

_SHARE_OF_FREE_MEMORY = 0.8

# Reports the progress of a long call: (unit, count done, total count; 0: unknown) -> nothing. Called on the host alone.
Progress = Callable[[str, int, int], None]


# (number of sequences, tokens of the longest sequence, number of blocks) -> the cache of a chunk
NewCache = Callable[[int, int, int], PagedKVCache]


def unwatched(unit: str, count: int, total: int) -> None:
    """Ignore the progress."""


class ForwardPass(Protocol):
    """A forward pass over the next tokens of the sequences of the caches."""

    def __call__(
        self, packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool, visual: Visual = ()
    ) -> Tensor | None:
        """Add the tokens to the caches.

        Args:
            packed: New tokens of each of the N sequences, with their positions; a sequence may bring none.
            caches: `Decoding.caches`, or the `DecodeSteps` of each.
            logits: Return the logits `[N, V]` fp32 after the last token of each sequence, or this rank's part of them
                (`Decoding.group`), on the last pipeline stage; the row of a sequence without tokens is arbitrary.
                Elsewhere, and for False: return anything.
            visual: The images of each of the N sequences, whose new tokens are then the whole prompt; empty without
                images. Positions in `packed` continue behind the positions of images (`Engine.prompt_images`).
        """
        ...


@dataclass(frozen=True)
class Decoding:
    """A model that continues sequences, while its parameters are gathered.

    Attributes:
        caches: The caches of this rank's chunks; all have the same sequences in the same blocks.
        forward: The forward pass.
        exact: See `CacheOptions`.
        capturable: A CUDA graph can capture `forward` with logits: the host waits for nothing, and only collectives of
            NCCL communicate.
        group: The ranks that have equal parts of the vocabulary's logits, in order, with -inf for padding; None: every
            rank has all.
        stages: The pipeline's stages, of which the last one has logits and draws; None: there is one.
        ring: Computes the steps of a pipeline instead of `forward`; None: `forward` passes through all stages.
        lasting: The decoding may stay entered between calls. Else every call enters and leaves it.
        independent: Ranks that divide experts have all of them now, and may run different forward passes.
        drafter: Drafts tokens, and computes prompts and steps instead of `forward`; None without drafts.
    """

    caches: Sequence[PagedKVCache]
    forward: ForwardPass
    exact: bool = False
    capturable: bool = False
    group: ProcessGroup | None = None
    stages: ProcessGroup | None = None
    ring: StageRing | None = None
    lasting: bool = False
    independent: bool = False
    drafter: Drafter | None = None


@dataclass(frozen=True)
class CacheOptions:
    """The size of the caches of a generation.

    Attributes:
        sequences: Maximum number of sequences that are continued at a time.
        max_length: Maximum number of tokens in a sequence.
        gib: Maximum memory of keys and values on this rank, in GiB; None: on a GPU 80 % of the free memory, on a CPU
            as much as `sequences` of `max_length` take.
        exact: Compute as `log_probs` does instead of by the faster kernels for one token.
        float8, float8_cache, drafts, experts: See `GenerationOptions`.
    """

    sequences: int
    max_length: int
    gib: float | None = None
    exact: bool = False
    float8: bool = False
    float8_cache: bool = False
    drafts: int = 0
    experts: Experts = "auto"

    @property
    def limit(self) -> int | None:
        """Return `gib` in bytes."""
        return None if self.gib is None else int(self.gib * 2**30)

    def require_parallel(self, backend: str) -> None:
        """Raise ValueError for options that another backend does not have."""
        for name in ("float8", "float8_cache", "drafts", "experts"):
            if (value := getattr(self, name)) not in (0, "auto"):
                raise ValueError(f"{name}={value} needs backend='parallel', not {backend!r}; leave {name} out")

    def fitting_blocks(self, size: int, block: int, memory: int | None) -> int:
        """Return the number of blocks that the sequences take, at most the blocks that fit beside the block of padding.

        A block has `size` tokens and `block` bytes; `memory` are the bytes for all, None: no limit.
        """
        blocks = max(1, self.sequences * -(-self.max_length // size))
        return blocks if memory is None else min(blocks, max(0, memory // block - 1))

    def require_room(self, blocks: int, size: int, block: int, memory: int | None) -> None:
        """Raise ValueError if a sequence needs more than `blocks`; see `fitting_blocks`."""
        longest = -(-self.max_length // size)
        if self.sequences and blocks < longest:
            raise ValueError(
                f"a sequence of {self.max_length} tokens takes {longest} blocks of {block / 2**20:.1f} MiB of keys "
                f"and values, and {blocks} fit into {(memory or 0) / 2**30:.2f} GiB; give more memory by "
                "cache_gib, or generate shorter responses"
            )

    @staticmethod
    def _block(new_cache: Sequence[NewCache]) -> tuple[int, int]:
        """Return the tokens and the bytes of a block of all chunks."""
        samples = [make(1, 1, 1) for make in new_cache]
        return samples[0].block_size, sum(sample.block_bytes for sample in samples)

    def wanted_bytes(self, new_cache: Sequence[NewCache]) -> int:
        """Return the bytes of caches that hold all sequences, or `gib`; see `build`."""
        size, block = self._block(new_cache)
        return (1 + self.fitting_blocks(size, block, self.limit)) * block

    def build(self, new_cache: Sequence[NewCache], grid: Grid) -> list[PagedKVCache]:
        """Return a cache of each chunk, with the largest number of blocks that fits on all ranks of a model.

        `new_cache` makes a chunk's cache for a number of sequences, the longest sequence, and a number of blocks.

        Raises:
            ValueError: The memory does not suffice for one sequence.
        """
        size, block = self._block(new_cache)
        memory = free_memory(grid.device) if self.gib is None else self.limit
        blocks = torch.tensor(self.fitting_blocks(size, block, memory), device=grid.device)
        for axis in ("tp", "pp"):
            if (group := grid.group(axis)) is not None:
                dist.all_reduce(blocks, dist.ReduceOp.MIN, group=group)

        def check() -> None:
            self.require_room(int(blocks), size, block, memory)

        # Ranks that share experts would wait for a rank that raises.
        agree(check, grid.data_mesh.get_group() if grid.dims.ep > 1 and grid.data_mesh is not None else None)
        return [make(self.sequences, self.max_length, max(1, int(blocks))) for make in new_cache]


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a cache may take by default; None: no limit."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE_OF_FREE_MEMORY * (torch.cuda.mem_get_info(device)[0] + unused))
