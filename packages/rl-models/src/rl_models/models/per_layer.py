"""`PerLayerInputs`: the further input of every layer of Gemma 4 E2B and E4B.

Shape legend: T' this rank's tokens, H hidden size, L layers, P size of a layer's input, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel_layers import Placement, RMSNorm, VocabParallelEmbedding
from parallel_layers.linear.layers import ReplicatedLinear
from parallel_layers.model import ModelConfig


class PerLayerInputs(nn.Module):
    """Compute (norm(projection(e) / sqrt(H)) + embedding(ids) · sqrt(P)) / sqrt(2) for every layer.

    e are the embeddings that the first layer reads. The rows of the table `[V, L · P]` are sharded over the
    tensor-parallel group, which adds one reduction; projection and norm are whole on every rank.
    """

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
        width, sequence_parallel = config.num_layers * self.size, placement.sequence_parallel
        self.embedding = VocabParallelEmbedding(
            config.per_layer_vocab_size,
            width,
            group=placement.group,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.projection = ReplicatedLinear(hidden, width, placement=placement, dtype=dtype, device=device)
        self.norm = RMSNorm(
            self.size,
            eps=config.decoder.norm_eps,
            group=placement.group,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, ids: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        """Return the input `[T', P]` of every layer, for ids (all tokens of the group) and embeddings `[T', H]`."""
        table = self.embedding(ids)
        table = table * torch.tensor(self.size**0.5, dtype=table.dtype).item()
        projected = self.projection(embedded) * embedded.shape[-1] ** -0.5
        projected = self.norm(projected.unflatten(-1, (-1, self.size)))
        return ((projected + table.view_as(projected)) * 2**-0.5).unbind(1)
