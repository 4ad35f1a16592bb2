"""`Decoding`: a model that generates, with its caches. N sequences, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import agree
from parallel_layers import PackedSequence
from parallel_layers.device import GPU, gpu
from parallel_layers.inference import PagedKVCache, SequenceCache
from parallel_models.engine.grid import Grid
from parallel_models.engine.vision import Visual
from parallel_models.generation.drafter import Drafter
from parallel_models.generation.options import Experts
from parallel_models.generation.scorer import Scorer
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
        recurrent: Layers have linear attention, on this stage or another one.
        scorer: Gives the log-probs of drawn tokens in place of the draws' own; None: the draws' own stay.
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
    recurrent: bool = False
    scorer: Scorer | None = None


class CacheSizes(NamedTuple):
    """The tokens and the bytes of a block of all chunks of a rank, and the bytes of a sequence's states."""

    block_size: int
    block_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, caches: Sequence[PagedKVCache]) -> CacheSizes:
        """Return the sizes of the chunks' caches."""
        states = sum(cache.state_bytes for cache in caches)
        return cls(caches[0].block_size, sum(cache.block_bytes for cache in caches), states)


class CacheCounts(NamedTuple):
    """The numbers of blocks, and of checkpoints of states, that caches have room for."""

    blocks: int
    checkpoints: int


@dataclass(frozen=True)
class CacheOptions:
    """The size of the caches of a generation.

    Attributes:
        sequences: Maximum number of sequences that are continued at a time.
        max_length: Maximum number of tokens in a sequence.
        gib: Maximum memory of keys, values and states of linear attention on this rank, in GiB; None: on a GPU 80 % of
            the free memory, on a CPU as much as `sequences` of `max_length` take.
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

    def counts(self, sizes: CacheSizes, memory: int | None) -> CacheCounts:
        """Return the numbers of blocks and checkpoints that the sequences take, at most those that fit.

        The states of all sequences come first, then two checkpoints for each, of its prompt and of its end, in at most
        an eighth of the memory. `memory` are the bytes for all, None: no limit.
        """
        blocks, checkpoints = max(1, self.sequences * -(-self.max_length // sizes.block_size)), 2 * self.sequences
        if memory is not None:
            # One more block and one more state take padding.
            memory -= sizes.block_bytes + (self.sequences + 1) * sizes.state_bytes
            if sizes.state_bytes:
                checkpoints = min(checkpoints, max(0, memory // 8 // sizes.state_bytes))
                memory -= checkpoints * sizes.state_bytes
            if sizes.block_bytes or memory < 0:
                blocks = min(blocks, max(0, memory) // max(1, sizes.block_bytes))
        return CacheCounts(blocks, checkpoints)

    def bytes_of(self, counts: CacheCounts, sizes: CacheSizes) -> int:
        """Return the bytes of caches with these numbers of blocks and checkpoints."""
        states = self.sequences + 1 + counts.checkpoints
        return (counts.blocks + 1) * sizes.block_bytes + states * sizes.state_bytes

    def require_room(self, counts: CacheCounts, sizes: CacheSizes, memory: int | None) -> None:
        """Raise ValueError if a sequence needs more blocks; see `counts`."""
        longest = -(-self.max_length // sizes.block_size)
        if self.sequences and counts.blocks < longest:
            fitting, beside, fewer = f"{(memory or 0) / 2**30:.2f} GiB", "", ""
            if sizes.state_bytes:
                beside = (
                    f" beside the states of linear attention of {self.sequences} sequences, of "
                    f"{sizes.state_bytes / 2**20:.1f} MiB each"
                )
                fewer = "draw fewer responses at a time by max_sequences, "
            raise ValueError(
                f"a sequence of {self.max_length} tokens takes {longest} blocks of {sizes.block_bytes / 2**20:.1f} MiB "
                f"of keys and values, and {counts.blocks} fit into {fitting}{beside}; give more memory by cache_gib, "
                f"{fewer}or generate shorter responses"
            )

    def bytes_of_stages(self, samples: Sequence[PagedKVCache]) -> list[int]:
        """Return the bytes of the caches of each pipeline stage, from a cache of any size of each.

        Raises:
            ValueError: `gib` does not suffice for one sequence.
        """
        sizes = [CacheSizes.of([sample]) for sample in samples]
        counts = CacheCounts(*map(min, zip(*(self.counts(stage, self.limit) for stage in sizes), strict=True)))
        self.require_room(counts, max(sizes, key=lambda stage: self.bytes_of(counts, stage)), self.limit)
        return [self.bytes_of(counts, stage) for stage in sizes]

    def wanted_bytes(self, new_cache: Sequence[NewCache]) -> int:
        """Return the bytes of caches that hold all sequences, or `gib`; see `build`."""
        sizes = CacheSizes.of([make(1, 1, 1) for make in new_cache])
        return self.bytes_of(self.counts(sizes, self.limit), sizes)

    def build(self, new_cache: Sequence[NewCache], grid: Grid) -> list[PagedKVCache]:
        """Return a cache of each chunk, with the largest number of blocks that fits on all ranks of a model.

        `new_cache` makes a chunk's cache for a number of sequences, the longest sequence, and a number of blocks.

        Raises:
            ValueError: The memory does not suffice for one sequence.
        """
        sizes = CacheSizes.of([make(1, 1, 1) for make in new_cache])
        memory = free_memory(grid.device) if self.gib is None else self.limit
        fitting = torch.tensor(self.counts(sizes, memory), device=grid.device)
        for axis in ("tp", "pp"):
            if (group := grid.group(axis)) is not None:
                dist.all_reduce(fitting, dist.ReduceOp.MIN, group=group)
        counts = CacheCounts(*fitting.tolist())

        def check() -> None:
            self.require_room(counts, sizes, memory)

        # Ranks that share experts would wait for a rank that raises.
        agree(check, grid.data_mesh.get_group() if grid.dims.ep > 1 and grid.data_mesh is not None else None)
        caches = [make(self.sequences, self.max_length, max(1, counts.blocks)) for make in new_cache]
        for cache in caches:
            cache.allocate_checkpoints(counts.checkpoints)
        return caches


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a cache may take by default; None: no limit."""
    if device.type != GPU:
        return None
    unused = gpu.memory_reserved(device) - gpu.memory_allocated(device)
    return int(_SHARE_OF_FREE_MEMORY * (gpu.mem_get_info(device)[0] + unused))
