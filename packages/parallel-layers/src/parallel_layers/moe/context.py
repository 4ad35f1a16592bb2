"""`RoutingContext`: the inputs and reports of the routers in one forward, with `RouterReplay` and `BatchTotals`.

Shape suffixes: T tokens, L layers, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.data.packing import PackedSequence


class RouterReplay:
    """Record the experts that each layer chooses, or send every token to recorded experts.

    The inference engine and the trainer differ by rounding, so a router near a tie can choose different experts in the
    two, and log-probs jump. Replaying the engine's choice removes the difference (https://arxiv.org/abs/2510.11370).
    Weights come from the router's own scores, so the gradient reaches the router. Make one `RouterReplay` for each
    batch.

    Args:
        experts: Experts `[T, k]` to replay by layer number; None: record. The router chooses for tokens with a row of
            -1, such as padding and tokens that the engine did not process.
        num_experts: E; required for a replay.

    Raises:
        ValueError: An expert is outside 0..E-1 or appears twice for a token.
    """

    def __init__(self, experts: Mapping[int, Tensor] | None = None, *, num_experts: int | None = None) -> None:
        self.recording = experts is None
        self.experts = dict(experts or {})
        for layer, chosen in self.experts.items():
            if num_experts is None:
                raise ValueError("a replay needs num_experts to check the experts; pass num_experts=...")
            _check(layer, chosen, num_experts)

    @classmethod
    def from_tensor(cls, experts_TLk: Tensor, layers: Iterable[int], *, num_experts: int) -> RouterReplay:
        """Replay the experts `[T, L, k]` of an inference engine, for the L layers with routers in order."""
        numbers = list(layers)
        if experts_TLk.dim() != 3 or experts_TLk.shape[1] != len(numbers):
            raise ValueError(
                f"experts of shape {list(experts_TLk.shape)} must be [T, {len(numbers)}, k] for layers {numbers}"
            )
        return cls(dict(zip(numbers, experts_TLk.unbind(1), strict=True)), num_experts=num_experts)

    def as_tensor(self) -> Tensor:
        """Return the recorded experts `[T, L, k]`, ordered by layer number."""
        return torch.stack([self.experts[layer] for layer in sorted(self.experts)], dim=1)

    def replaying(self) -> RouterReplay:
        """Return a replay of the recorded experts."""
        replay = RouterReplay()
        replay.recording = False
        replay.experts = dict(self.experts)
        return replay

    def select(self, layer: int, experts_Tk: Tensor, *, first_token: int = 0, num_tokens: int | None = None) -> Tensor:
        """Record the router's experts and return them, or return the experts to replay.

        A rank with a part of the tokens has the tokens from `first_token` on, of `num_tokens` in the entry.

        Raises:
            ValueError: The layer has no entry, or an entry of a different shape.
        """
        if self.recording:
            self.experts[layer] = experts_Tk.detach()
            return experts_Tk
        if layer not in self.experts:
            raise ValueError(f"no experts to replay for layer {layer}; there are entries for {sorted(self.experts)}")
        entry = self.experts[layer]
        tokens, top_k = experts_Tk.shape
        num_tokens = first_token + tokens if num_tokens is None else num_tokens
        if entry.shape != (num_tokens, top_k):
            raise ValueError(
                f"layer {layer}: experts to replay have shape {list(entry.shape)}, but tokens {first_token}.."
                f"{first_token + tokens - 1} of {num_tokens} with {top_k} experts each are asked for; give every token "
                "a row, of -1 where the router is to choose"
            )
        rows = entry[first_token : first_token + tokens].to(experts_Tk)
        return torch.where(rows < 0, experts_Tk, rows)


def _check(layer: int, experts_Tk: Tensor, num_experts: int) -> None:
    if experts_Tk.dim() != 2 or experts_Tk.is_floating_point() or experts_Tk.dtype == torch.bool:
        raise ValueError(
            f"layer {layer}: experts to replay must be [T, k] integers, not {experts_Tk.dtype} {list(experts_Tk.shape)}"
        )
    experts_Tk = experts_Tk.long()  # uint8 cannot be compared with 256
    left_out = (experts_Tk == -1).all(1)
    outside = ((experts_Tk < 0) | (experts_Tk >= num_experts)).any(1) & ~left_out
    ordered = experts_Tk.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1) & ~left_out
    for bad, mistake in ((outside, f"outside 0..{num_experts - 1}"), (twice, "twice")):
        if bad.any():
            token = int(bad.nonzero()[0])
            raise ValueError(
                f"layer {layer}, token {token}: experts {experts_Tk[token].tolist()} name an expert {mistake}"
            )


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
        totals: Sums over the batch of this pack; the losses are then the pack's shares of the batch's losses. None: the
            pack is the batch.
        loads: Output: tokens per expert `[E]` fp32 by layer number, of the whole pack (under context parallelism of
            this rank's tokens).
        losses: Output of a forward with gradients: by layer number the unweighted, detached losses by config name.
        routers: Output: `id` of the router by layer number.
    """

    segments: Tensor | None = None
    num_segments: int = 1
    replay: RouterReplay | None = None
    totals: BatchTotals | None = None
    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    routers: dict[int, int] = field(default_factory=dict, repr=False)

    def enter(self, layer: int, router: nn.Module) -> None:
        """Register a layer's router; raise ValueError if another router has the same layer number."""
        if self.routers.setdefault(layer, id(router)) != id(router):
            raise ValueError(
                f"two routers of one batch have the layer number {layer}; give each MoE or DecoderLayer of a model "
                "another layer_number, and each model another RoutingContext"
            )

    @classmethod
    def of(
        cls, packed: PackedSequence, *, replay: RouterReplay | None = None, totals: BatchTotals | None = None
    ) -> RoutingContext:
        """Return the context of a packed batch, without its padding segment."""
        tokens = torch.arange(packed.num_tokens, device=packed.cu_seqlens.device, dtype=packed.cu_seqlens.dtype)
        segments = torch.searchsorted(packed.cu_seqlens, tokens, right=True) - 1
        segments = torch.where(segments < packed.num_sequences, segments, -1)
        return cls(segments=segments, num_segments=packed.num_sequences, replay=replay, totals=totals)
