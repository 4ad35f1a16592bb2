"""Modules that replace Megatron-Core's own in a layer, so that packed input works without CUDA kernels.

Shape suffixes: T tokens, Q query heads, K key-value heads, D head size, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_utils.gpt.config import parameter_device
from parallel_layers import ModelConfig
from parallel_layers.attention import AttentionOptions, Layout, ring_attention, ulysses_attention
from parallel_layers.inference import SequenceCache
from parallel_layers.rotary import apply_rotary

# Megatron's `cp_comm_type`: how attention goes over the context-parallel group, and which tokens each rank then holds.
CONTEXT_PARALLEL: dict[str, tuple[Any, Layout]] = {
    "p2p": (ring_attention, "zigzag"),
    "a2a": (ulysses_attention, "contiguous"),
}


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed batch, with cos and sin of this rank's tokens."""

    rotary: Sequence[tuple[Tensor, ...] | None] = ()
    """For each layer of the chunk `RotaryEmbedding.tables` `[T / cp, D]` fp32, None where the layer does not rotate."""
    cache: SequenceCache | None = None
    """Keys and values of earlier tokens in the layers of this chunk."""
    first_layer: int = 1
    """Megatron's number, from 1, of the chunk's first layer."""

    def rotary_of(self, layer_number: int) -> tuple[Tensor, ...] | None:
        """Return the tables of a layer, by Megatron's number."""
        return self.rotary[layer_number - self.first_layer]


class PackedCoreAttention(nn.Module):
    """Packed attention of `parallel_layers` in place of Megatron's core attention: rotary, then causal attention.

    This module rotates instead of Megatron's `rope_utils`, so every rope type of the Hugging Face config works, from
    explicit positions, in fp32, without reading `cu_seqlens` on the host. Its one parameter is `softmax_offset`, the
    attention sinks of this rank's heads, where the model has them. It communicates only over the context group.
    With a cache the tokens follow the cached tokens, and every context-parallel rank has all tokens.

    Args:
        cp_comm_type: "p2p": ring attention over the context-parallel group; "a2a": Ulysses.
        model: The description of the model, which has the window, scale, soft-cap and rotation of each layer.
    """

    softmax_offset: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        model: ModelConfig,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        layer = model.layer(layer_number - 1)
        self.options, self.interleaved = layer.attention_options, layer.rotary_interleaved
        # `LatentAttention` has rotated queries and keys already.
        self.rotates = layer.latent is None
        self.attend, _ = CONTEXT_PARALLEL[cp_comm_type or "p2p"]
        self.cp = None if pg_collection is None else pg_collection.cp
        self.register_parameter("softmax_offset", None)
        if layer.attention_sinks:
            heads = layer.num_heads // config.tensor_model_parallel_size
            sinks = torch.empty(heads, dtype=config.params_dtype, device=parameter_device(config))
            self.softmax_offset = nn.Parameter(sinks)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> Tensor:
        """Return causal attention `[T / cp, Q * D']` of query `[T / cp, Q, D]`, key `[., K, D]`, value `[., K, D']`."""
        if not isinstance(packed_seq_params, PackedParams):
            raise ValueError("packed attention needs a packed batch; call the model with a PackedSequence")
        rotary = packed_seq_params.rotary_of(self.layer_number) if self.rotates else None
        if rotary is not None:
            query, key = (apply_rotary(x, *rotary[:2], interleaved=self.interleaved) for x in (query, key))
            for factors in rotary[2:]:
                query = query * factors.to(query.dtype)[:, None, None]
        bounds = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        options: AttentionOptions = {**self.options, "sinks": self.softmax_offset}
        out: Tensor
        if packed_seq_params.cache is None:
            out = self.attend(query, key, value, *bounds, group=self.cp, **options)
        else:
            past = packed_seq_params.cache.layer(self.layer_number - packed_seq_params.first_layer)
            out = past.attend(query, key, value, *bounds, **options)
        return out.flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Describe the sinks for Megatron's distributed checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )


class ValueHead(nn.Module):
    """Give L numbers per token in place of Megatron's output layer: `hidden @ weight^T (+ bias)`, fp32.

    The weight `[L, H]` is replicated over the tensor-parallel group. Under sequence parallelism the hidden states are
    gathered first (backward: split), so every rank computes all values and the whole, equal gradient of the weight.
    """

    def __init__(self, config: TransformerConfig, num_labels: int = 1, *, bias: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(num_labels, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(num_labels, dtype=config.params_dtype)) if bias else None

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Turn `[T / tp, 1, H]` into (`[T, 1, L]` fp32, None), a pair like Megatron's linears return."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias), None
