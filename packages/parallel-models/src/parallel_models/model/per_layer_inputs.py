"""The further input of every layer of Gemma 4 E2B and E4B.

    input_i = (norm(projection_i(e) / sqrt(H)) + table_i(ids) · sqrt(P)) / sqrt(2)

e are the embeddings that the first layer reads. The first stage of a pipeline has the projections of all layers, and
every stage the tables of its layers.

Shape legend: T' this rank's tokens, H hidden size, L layers, P size of a layer's input, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel_layers import ModelConfig, Placement, RMSNorm, VocabParallelEmbedding
from parallel_layers.linear import ReplicatedLinear


class PerLayerProjection(nn.Module):
    """Compute norm(projection(e) / sqrt(H)) for all layers; projection and norm are whole on every rank."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hidden, self.size = config.decoder.hidden_size, config.decoder.per_layer_size
        width = config.num_layers * self.size
        self.projection = ReplicatedLinear(hidden, width, placement=placement, dtype=dtype, device=device)
        self.norm = RMSNorm(
            self.size,
            eps=config.decoder.norm_eps,
            group=placement.group,
            sequence_parallel=placement.sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, embedded: Tensor) -> Tensor:
        """Return `[T', L · P]` for the embeddings `[T', H]`."""
        projected = self.projection(embedded) * embedded.shape[-1] ** -0.5
        normed: Tensor = self.norm(projected.unflatten(-1, (-1, self.size)))
        return normed.flatten(1)


class PerLayerTable(VocabParallelEmbedding):
    """The tables of `layers` consecutive layers, side by side: `[V, layers · P]`, with rows sharded over the group.

    Communication: one reduction of the rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        placement: Placement,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.size = config.decoder.per_layer_size
        super().__init__(
            config.per_layer_vocab_size,
            layers * self.size,
            group=placement.group,
            sequence_parallel=placement.sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def inputs(self, ids: Tensor, projected: Tensor) -> tuple[Tensor, ...]:
        """Return the input `[T', P]` of each layer, for the ids of all tokens of the group.

        `projected` `[T', layers · P]` is these layers' part of the projection.
        """
        table = self(ids)
        table = table * torch.tensor(self.size**0.5, dtype=table.dtype).item()
        return ((projected + table) * 2**-0.5).split(self.size, 1)
