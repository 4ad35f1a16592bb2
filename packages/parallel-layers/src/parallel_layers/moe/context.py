"""`RoutingContext`: what the routers of one forward pass are told, and what they report."""

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
    """Sums over a whole batch that the auxiliary losses of its parts need: of micro-batches, and of each rank's tokens.

    Attributes:
        num_tokens: 0-dim, without padding.
        num_sequences: 0-dim, those with a token.
        loads: Layer number -> tokens that chose each expert, `[E]` fp32; for `load_balancing_loss` alone.
        context_group: The ranks that hold a pack's other tokens (context parallelism); None: each has whole packs.
    """

    num_tokens: Tensor
    num_sequences: Tensor
    loads: Mapping[int, Tensor] = field(default_factory=dict)
    context_group: ProcessGroup | None = None

    def load(self, layer: int) -> Tensor:
        """The loads of one layer.

        Raises:
            ValueError: There are none.
        """
        if layer not in self.loads:
            raise ValueError(
                f"the totals have no loads of layer {layer}, which its balance_loss needs; there are some for "
                f"{sorted(self.loads)}"
            )
        return self.loads[layer]


@dataclass(kw_only=True)
class RoutingContext:
    """Handed to the MoE layers of one batch as an argument, so recomputation and interleaved batches see their own.

    Attributes:
        segments: `[T]` int64, the sequence that each token of the pack belongs to (under context parallelism: of this
            rank's tokens), -1 for padding; None: one sequence, no padding.
        num_segments: How many sequences there are.
        replay: Records the choice of experts, or replays one; None: neither.
        loss_scale: What the gradients of the auxiliary losses are multiplied by: 1 / micro-batches, and the loss scale
            where there is one.
        totals: Of the batch of which this pack is a part: the losses are then the pack's shares, which add up to the
            batch's. None: the pack is the batch.
        loads: Filled by the forward: layer number -> tokens that chose each expert, `[E]` fp32, of the whole pack
            (under context parallelism: of this rank's tokens).
        losses: Filled by a forward with gradients (under recomputation by the second): layer number -> the auxiliary
            losses with a weight in the config, by their config names, unweighted and detached. Their gradients need no
            further step.
        routers: Filled by the forward: layer number -> `id` of the router that has this number.
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
        """A layer's router begins, in the first run or in a recomputation.

        Raises:
            ValueError: Another router has the same number: it would overwrite what this one records and reports.
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
        """The context of a packed batch; its padding segment does not count."""
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
