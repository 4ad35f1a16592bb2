"""`Boundary`: the tensor that a chunk of a pipeline passes to the next chunk.

Shape legend: T' this rank's tokens, H hidden size, L' layers behind the boundary, P size of a layer's further input,
K key-value heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_layers import ModelConfig
from parallel_layers.attention import KeptKeysValues


@dataclass(frozen=True)
class Boundary:
    """The columns of the tensor `[T', columns]` that layers pass on: everything that later layers read.

    These are the hidden states `[T', H]`; with per-layer inputs their projections `[T', L' · P]`; and for each window
    the keys and values `[T, K, D]` that later layers reuse. One tensor brings the gradients of all parts back. Under
    sequence parallelism keys and values have tp times as many tokens, so a row of the tensor holds the keys and values
    of tp tokens.

    Attributes:
        hidden: H.
        inputs: L' · P.
        kept: K and D of the keys and values of each window.
        tokens: The tokens of keys and values in a row.
    """

    hidden: int
    inputs: int
    kept: dict[int | None, tuple[int, int]]
    tokens: int = 1

    @classmethod
    def before(cls, layer: int, config: ModelConfig, tp: int, *, sequence_parallel: bool) -> Boundary:
        """Return the boundary in front of a layer."""
        earlier, later = (map(config.layer, part) for part in (range(layer), range(layer, config.num_layers)))
        reused = {of_layer.window for of_layer in later if of_layer.shared_kv == "reuse"}
        kept = {}
        for of_layer in earlier:
            if of_layer.shared_kv == "store" and of_layer.window in reused:
                assert of_layer.head_dim is not None
                kept[of_layer.window] = max(1, of_layer.num_kv_heads // tp), of_layer.head_dim
        inputs = (config.num_layers - layer) * config.decoder.per_layer_size
        return cls(config.decoder.hidden_size, inputs, kept, tp if sequence_parallel else 1)

    @property
    def columns(self) -> int:
        """The number of columns."""
        return sum(self._widths)

    @property
    def kept_columns(self) -> int:
        """The columns of keys and values."""
        return self.columns - self.hidden - self.inputs

    @property
    def _widths(self) -> list[int]:
        sizes = (2 * (self.tokens * heads * head_dim,) for heads, head_dim in self.kept.values())
        return [self.hidden, self.inputs, *(width for pair in sizes for width in pair)]

    def join(self, hidden: Tensor, inputs: Tensor | None, kept: KeptKeysValues) -> Tensor:
        """Return the tensor: `[T', columns]`."""
        parts = [hidden] if inputs is None else [hidden, inputs]
        parts += [each.reshape(len(hidden), -1) for window in self.kept for each in kept.of(window)]
        return torch.cat(parts, 1) if len(parts) > 1 else hidden

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor | None, KeptKeysValues]:
        """Return the parts of the tensor; inputs are None for a model without."""
        if joined.shape[1] == self.hidden:
            return joined, None, KeptKeysValues()
        hidden, inputs, *each = joined.split(self._widths, 1)
        kept = KeptKeysValues()
        for number, (window, shape) in enumerate(self.kept.items()):
            keys, values = (part.reshape(-1, *shape) for part in each[2 * number : 2 * number + 2])
            kept.store(window, keys, values)
        return hidden.contiguous(), inputs if self.inputs else None, kept
