"""`RoutingContext`: the inputs and reports of the routers in one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.data.packing import PackedSequence
from parallel_layers.moe.replay import RouterReplay


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Sums over a whole batch, for the auxiliary losses of micro-batches and of sharded tokens.

    Attributes:
        num_tokens: Tokens without padding, 0-dim.
        num_sequences: Sequences with at least one token, 0-dim.
        loads: Tokens per expert `[E]` fp32 by layer number; used by `load_balancing_loss`.
        context_group: Context-parallel group; None: each rank has whole packs.
    """

    num_tokens: Tensor
    num_sequences: Tensor
    loads: Mapping[int, Tensor] = field(default_factory=dict)
    context_group: ProcessGroup | None = None

    def load(self, layer: int) -> Tensor:
        """Return the loads of one layer; raise ValueError if there are none."""
        if layer not in self.loads:
            raise ValueError(
                f"the totals have no loads of layer {layer}, which its balance_loss needs; they have loads of "
                f"{sorted(self.loads)}"
            )
        return self.loads[layer]


@dataclass(kw_only=True)
class RoutingContext:
    """Argument of the MoE layers for one pack. A context per pack keeps recomputation and interleaved packs apart.

    Attributes:
        segments: Sequence of each token, `[T]` int64 (under context parallelism of this rank's tokens), -1 for padding;
            None: one sequence without padding.
        num_segments: The number of sequences.
        replay: Recorder or replay of the chosen experts; None: neither.
        loss_scale: Factor of the auxiliary losses' gradients: 1 / micro-batches, times a loss scale if any.
        totals: Sums over the batch of this pack; the losses are then the pack's shares of the batch's losses. None: the
            pack is the batch.
        loads: Output: tokens per expert `[E]` fp32 by layer number, of the whole pack (under context parallelism of
            this rank's tokens).
        losses: Output of a forward with gradients: by layer number the unweighted, detached losses by config name. The
            backward adds their gradients without a further call.
        routers: Output: `id` of the router by layer number.
    """

    segments: Tensor | None = None
    num_segments: int = 1
    replay: RouterReplay | None = None
    loss_scale: float = 1.0
    totals: BatchTotals | None = None
    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    routers: dict[int, int] = field(default_factory=dict, repr=False)

    def enter(self, layer: int, router: nn.Module) -> None:
        """Register a layer's router at the start of its forward or recomputation.

        Raises:
            ValueError: Another router has the same layer number.
        """
        if self.routers.setdefault(layer, id(router)) != id(router):
            raise ValueError(
                f"two routers of one batch have the layer number {layer}; give each MoE or DecoderLayer of a model a "
                "layer_number of its own, and each model a RoutingContext of its own"
            )

    @classmethod
    def of(
        cls,
        packed: PackedSequence,
        *,
        replay: RouterReplay | None = None,
        loss_scale: float = 1.0,
        totals: BatchTotals | None = None,
    ) -> RoutingContext:
        """Return the context of a packed batch, without its padding segment."""
        tokens = torch.arange(packed.num_tokens, device=packed.cu_seqlens.device, dtype=packed.cu_seqlens.dtype)
        segments = torch.searchsorted(packed.cu_seqlens, tokens, right=True) - 1
        segments = torch.where(segments < packed.num_sequences, segments, -1)
        return cls(
            segments=segments,
            num_segments=packed.num_sequences,
            replay=replay,
            loss_scale=loss_scale,
            totals=totals,
        )
