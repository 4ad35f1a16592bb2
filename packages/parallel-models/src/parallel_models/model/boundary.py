"""`Boundary`: the tensor that a chunk of a pipeline passes to the next chunk.

Shape legend: T' this rank's tokens, H hidden size, L' layers behind the boundary, P size of a layer's further input,
K key-value heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_layers import ModelConfig
from parallel_layers.attention import SharedKeysValues


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
        earlier, later = (map(config.layer, numbers) for numbers in (range(layer), range(layer, config.num_layers)))
        reused = {layer_config.window for layer_config in later if layer_config.shared_kv == "reuse"}
        shapes = {}
        for layer_config in earlier:
            if layer_config.shared_kv == "store" and layer_config.window in reused:
                assert layer_config.head_dim is not None
                shapes[layer_config.window] = max(1, layer_config.num_kv_heads // tp), layer_config.head_dim
        inputs = (config.num_layers - layer) * config.decoder.per_layer_size
        return cls(config.decoder.hidden_size, inputs, shapes, tp if sequence_parallel else 1)

    @property
    def columns(self) -> int:
        """The number of columns."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        sizes = (2 * (self.tokens * heads * head_dim,) for heads, head_dim in self.kept.values())
        return [self.hidden, self.inputs, *(width for pair in sizes for width in pair)]

    def join(self, hidden: Tensor, inputs: Tensor | None, shared_kv: SharedKeysValues) -> Tensor:
        """Return the tensor: `[T', columns]`."""
        columns = [hidden] if inputs is None else [hidden, inputs]
        columns += [tensor.reshape(len(hidden), -1) for window in self.kept for tensor in shared_kv.of(window)]
        return torch.cat(columns, 1) if len(columns) > 1 else hidden

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor | None, SharedKeysValues]:
        """Return the parts of the tensor; inputs are None for a model without."""
        if joined.shape[1] == self.hidden:
            return joined, None, SharedKeysValues()
        hidden, inputs, *shared_columns = joined.split(self._widths, 1)
        shared_kv = SharedKeysValues()
        for number, (window, shape) in enumerate(self.kept.items()):
            keys, values = (tensor.reshape(-1, *shape) for tensor in shared_columns[2 * number : 2 * number + 2])
            shared_kv.store(window, keys, values)
        return hidden.contiguous(), inputs if self.inputs else None, shared_kv
