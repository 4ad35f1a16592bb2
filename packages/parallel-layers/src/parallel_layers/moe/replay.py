"""Router replay: send every token to the experts that it went to before.

In reinforcement learning the engine that generates and the trainer that scores differ by rounding, and a router near a
tie then picks another expert: log-probs jump. Replaying the recorded choice removes that (https://arxiv.org/abs/2510.11370).
Weights are still computed from the router's own scores, so the gradient reaches the router.

A `RouterReplay` is a plain object that the caller makes for one batch and hands to the forward: nothing is global.
Entries are kept by layer number, so recomputation reads the same entry again, and pipeline stages read theirs. Any
backend can use it: a router calls `select(layer, experts)` between choosing and weighing.

Shape suffixes: T tokens, L layers, k experts a token goes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class RouterReplay:
    """Records the experts that each layer chooses, or replays recorded ones.

    Args:
        experts: Layer number -> experts `[T, k]` to replay; None: record. A row of -1 lets the router choose for that
            token itself (an engine reports nothing for a token that it did not process, and nothing for padding).
        num_experts: E; needed to replay.

    Raises:
        ValueError: An expert outside 0..E-1, or twice for one token; the message names layer and token.
    """

    def __init__(self, experts: Mapping[int, Tensor] | None = None, *, num_experts: int | None = None) -> None:
        self.recording = experts is None
        self.experts = dict(experts or {})
        for layer, chosen in self.experts.items():
            if num_experts is None:
                raise ValueError("num_experts is needed to check the experts to replay; pass num_experts=...")
            _check(layer, chosen, num_experts)

    @classmethod
    def from_tensor(cls, experts_TLk: Tensor, layers: Iterable[int], *, num_experts: int) -> RouterReplay:
        """Replay what an inference engine reports: `[T, L, k]`, for the layers that have routers, in order.

        Raises:
            ValueError: The number of layers differs from L, or as for `RouterReplay`.
        """
        numbers = list(layers)
        if experts_TLk.dim() != 3 or experts_TLk.shape[1] != len(numbers):
            raise ValueError(
                f"experts of shape {list(experts_TLk.shape)} must be [T, {len(numbers)}, k] for layers {numbers}"
            )
        return cls(dict(zip(numbers, experts_TLk.unbind(1), strict=True)), num_experts=num_experts)

    def as_tensor(self) -> Tensor:
        """What was recorded, layers in order of number: `[T, L, k]`."""
        return torch.stack([self.experts[layer] for layer in sorted(self.experts)], dim=1)

    def replaying(self) -> RouterReplay:
        """A replay of what this object has recorded."""
        replay = RouterReplay()
        replay.recording = False
        replay.experts = dict(self.experts)
        return replay

    def select(self, layer: int, experts_Tk: Tensor, *, first_token: int = 0, num_tokens: int | None = None) -> Tensor:
        """The experts to use.

        Args:
            layer: The layer's number in the model.
            experts_Tk: What the router has chosen, for tokens first_token .. first_token + T - 1.
            first_token: Where these tokens begin among those of the entry (ranks that hold a part of the tokens).
            num_tokens: How many tokens the entry must be of; None: these alone.

        Returns:
            `experts_Tk` itself when recording, else the entry's rows.

        Raises:
            ValueError: Nothing to replay for this layer, or an entry of another shape.
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
    """Raise ValueError for an entry that no router could have chosen."""
    if experts_Tk.dim() != 2 or experts_Tk.is_floating_point() or experts_Tk.dtype == torch.bool:
        raise ValueError(
            f"layer {layer}: experts to replay must be [T, k] integers, not {experts_Tk.dtype} {list(experts_Tk.shape)}"
        )
    experts_Tk = experts_Tk.long()  # a byte cannot be compared with 256
    left_out = (experts_Tk == -1).all(1)
    outside = ((experts_Tk < 0) | (experts_Tk >= num_experts)).any(1) & ~left_out
    ordered = experts_Tk.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1) & ~left_out
    for bad, what in ((outside, f"outside 0..{num_experts - 1}"), (twice, "twice")):
        if bad.any():
            token = int(bad.nonzero()[0])
            raise ValueError(
                f"layer {layer}, token {token}: experts {experts_Tk[token].tolist()} name an expert {what}"
            )
