"""Modules that replace Megatron-Core's own in a layer, so that packed input works without CUDA kernels.

Shape suffixes: T tokens, Q query heads, K key-value heads, D head size, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence
from parallel_layers.attention.context_parallel import Layout, ring_attention, split_sequence, ulysses_attention
from parallel_layers.inference import SequenceCache
from parallel_layers.norm.rms_norm import RMSNorm
from parallel_layers.rotary import RotaryEmbedding, apply_rotary

# Megatron's `cp_comm_type`: how attention goes over the context-parallel group, and which tokens each rank then holds.
CONTEXT_PARALLEL: dict[str, tuple[Any, Layout]] = {
    "p2p": (ring_attention, "zigzag"),
    "a2a": (ulysses_attention, "contiguous"),
}


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed batch, with cos and sin of this rank's tokens."""

    rotary: tuple[Tensor, ...] | None = None
    """`RotaryEmbedding.tables` `[T / cp, D]` fp32, made once per micro-batch."""
    cache: SequenceCache | None = None
    """Keys and values of earlier tokens in the layers of this chunk."""
    first_layer: int = 1
    """Megatron's number, from 1, of the chunk's first layer."""

    @classmethod
    def of(
        cls,
        packed: PackedSequence,
        rotary: RotaryEmbedding,
        cp: ProcessGroup | None,
        layout: Layout,
        *,
        cache: SequenceCache | None = None,
        first_layer: int = 1,
    ) -> PackedParams:
        """Describe a whole packed batch, of which this rank of `cp` holds a part."""
        # Some rotations depend on the length of the sequence, so make cos and sin for the whole batch first.
        tables = rotary.tables(packed.position_ids)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
            rotary=tuple(split_sequence(table, cp, layout=layout) for table in tables),
            cache=cache,
            first_layer=first_layer,
        )


class PackedCoreAttention(nn.Module):
    """Packed attention of `parallel_layers` in place of Megatron's core attention: rotary, then causal attention.

    This module rotates instead of Megatron's `rope_utils`, so every rope type of the Hugging Face config works, from
    explicit positions, in fp32, without reading `cu_seqlens` on the host. The module has no parameters and communicates
    over the context-parallel group only. With a cache in the batch's description the tokens follow what it holds, all
    of them on every context-parallel rank.

    Args:
        cp_comm_type: "p2p": ring attention over the context-parallel group; "a2a": Ulysses.
        rotates: False where the module around it has rotated queries and keys already (latent attention).
        scale: The factor of the scores; None: Megatron's `softmax_scale`.
    """

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
        rotates: bool = True,
        scale: float | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.rotates = rotates
        self.attend, _ = CONTEXT_PARALLEL[cp_comm_type or "p2p"]
        self.cp = None if pg_collection is None else pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.scale = softmax_scale if scale is None else scale

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
        if self.rotates:
            assert packed_seq_params.rotary is not None
            cos, sin, *scale = packed_seq_params.rotary
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
            for factors in scale:
                query = query * factors.to(query.dtype)[:, None, None]
        bounds = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        out: Tensor
        if packed_seq_params.cache is None:
            out = self.attend(query, key, value, *bounds, group=self.cp, window=self.window, scale=self.scale)
        else:
            past = packed_seq_params.cache.layer(self.layer_number - packed_seq_params.first_layer)
            out = past.attend(query, key, value, *bounds, window=self.window, scale=self.scale)
        return out.flatten(1)


class Norm(RMSNorm):
    """RMSNorm with Megatron's constructor and Megatron's rule for its gradient.

    Under sequence parallelism each rank sees different tokens. The weight is marked, and `finalize_model_grads` sums
    marked gradients over the tensor-parallel group once per step. (It knows QK-norms by their names.)
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if not config.use_cpu_initialization:
            self.weight.data = self.weight.data.cuda()


class ValueHead(nn.Module):
    """One number per token in place of Megatron's output layer: `hidden @ weight^T (+ bias)`, fp32.

    The weight `[1, H]` is replicated over the tensor-parallel group. Under sequence parallelism the hidden states are
    gathered first (backward: split), so every rank computes all values and the whole, equal gradient of the weight.
    """

    def __init__(self, config: TransformerConfig, *, bias: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if bias else None

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Turn `[T / tp, 1, H]` into (`[T, 1, 1]` fp32, None), a pair like Megatron's linears return."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias), None
