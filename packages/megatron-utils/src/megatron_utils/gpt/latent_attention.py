"""`LatentAttention`: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) on packed batches.

Megatron-Core's own module counts positions from `cu_seqlens` on the host. If its down-projection is split over tensor
parallelism (the local spec), the gradient of the shared rotated key covers only the heads of each rank. This module
takes the rotation from the batch, as every family does, and completes the gradient.

Shape suffixes: T tokens, t this rank's tokens under sequence parallelism (else T), n this rank's heads, C latent size,
P position part of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_utils.gpt.modules import PackedParams
from megatron_utils.gpt.norms import Norm
from parallel_layers.rotary import apply_rotary

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents in DeepSeek's own code and in transformers; `rms_norm_eps` does not change it."""


def _pairs_to_halves(x: Tensor) -> Tensor:
    """Reorder neighbouring pairs (x0, x1), (x2, x3), ... of checkpoints into the two halves of `apply_rotary`."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with its own path from hidden states to queries, keys and values.

    Args:
        fused_norms: The up-projections contain the norms of the latents (Transformer Engine); False: this module does.
    """

    def __init__(self, config: TransformerConfig, *args: Any, fused_norms: bool, **options: Any) -> None:
        super().__init__(config, *args, **options)
        if not fused_norms:
            self.kv_layernorm = Norm(config, config.kv_lora_rank, LATENT_NORM_EPS)
            if config.q_lora_rank is not None:
                self.q_layernorm = Norm(config, config.q_lora_rank, LATENT_NORM_EPS)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, ...]:
        """Turn `[t, 1, H]` into queries and keys `[T, n, D + P]`, values `[T, n, D']`, and two latents `[t, C]`."""
        if not isinstance(packed_seq_params, PackedParams):
            raise ValueError("latent attention needs a packed batch; call the model with a PackedSequence")
        rotary = packed_seq_params.rotary_of(self.layer_number)
        assert rotary is not None  # by `require_expressible`
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            query_latent = hidden_states[:, 0]
            query = self.linear_q_proj(query_latent)[0]
        else:
            query_latent = self.q_layernorm(
                self._own_tokens(*self._compressed(self.linear_q_down_proj, hidden_states, config.q_lora_rank))
            )
            query = self.linear_q_up_proj(query_latent)[0]
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        compressed, has_all_tokens = self._compressed(self.linear_kv_down_proj, hidden_states, width)
        latent, key_position = compressed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        latent = self.kv_layernorm(self._own_tokens(latent, has_all_tokens))
        if not has_all_tokens:
            key_position = gather_from_sequence_parallel_region(key_position, group=self.tp_group)
        elif self.tp_group.size() > 1:
            # The heads of all ranks share this key: its gradient is the sum over the ranks.
            key_position = copy_to_tensor_model_parallel_region(key_position, group=self.tp_group)
        key_value = self.linear_kv_up_proj(latent)[0].unflatten(-1, (heads, -1))
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        query, query_position = query.unflatten(-1, (heads, -1)).split(
            [config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1
        )
        query_position = apply_rotary(_pairs_to_halves(query_position), *rotary)
        key_position = apply_rotary(_pairs_to_halves(key_position)[:, None], *rotary)
        query = torch.cat((query, query_position), dim=-1)
        key = torch.cat((key, key_position.expand(-1, heads, -1)), dim=-1)
        return query, key, value.contiguous(), query_latent, latent

    def _run_core_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Attend with values of their own head size; newer versions of Megatron-Core pad them to the keys' size."""
        out: Tensor = self.core_attention(query, key, value, attention_mask, **options)
        return out

    def _compressed(self, projection: torch.nn.Module, hidden: Tensor, width: int) -> tuple[Tensor, bool]:
        """Return a down-projection `[., width]`, and whether it holds all T tokens.

        The local spec splits the columns and then holds all tokens. Transformer Engine's projection is whole, and holds
        this rank's tokens under sequence parallelism.
        """
        out = projection(hidden)[0][:, 0]
        if out.shape[-1] != width:
            return gather_from_tensor_model_parallel_region(out, group=self.tp_group), True
        return out, self.tp_group.size() == 1 or not self.config.sequence_parallel

    def _own_tokens(self, x: Tensor, has_all_tokens: bool) -> Tensor:
        """Return this rank's tokens `[t, .]`, the input of up-projections that gather under sequence parallelism."""
        if has_all_tokens and self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(x, group=self.tp_group)
        return x
