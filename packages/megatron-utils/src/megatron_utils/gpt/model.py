"""`PackedGPTModel` and `build_gpt`: a Megatron-Core GPTModel that takes packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_utils.gpt.config import transformer_config
from megatron_utils.gpt.latent_attention import LatentAttention
from megatron_utils.gpt.layer_spec import LayerSpec, block_spec
from megatron_utils.gpt.packed_model import PackedModel, Role, build_chunks, padded_vocabulary
from megatron_utils.grid import MegatronGrid
from parallel_layers import ModelConfig
from parallel_layers.attention import CacheShape
from parallel_layers.inference import PagedKVCache
from parallel_layers.linear import RECIPES


class PackedGPTModel(PackedModel, GPTModel):
    """A `PackedModel` of decoder layers, each of attention and an MLP or a mixture of experts."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        spec: Any,
        role: Role,
        padded_vocab: int,
        value_bias: bool = False,
        num_labels: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, spec, **self.core_arguments(model, role, padded_vocab), **kwargs)
        ropes = [model.ropes[layer.layer_number - 1] for layer in self.decoder.layers]
        self.take_packed_batches(model, role, ropes, value_bias=value_bias, num_labels=num_labels)

    def new_cache(self, num_sequences: int, max_length: int, num_blocks: int | None = None) -> PagedKVCache:
        """Return an empty cache for N sequences, of this chunk's layers and key-value heads on this rank.

        For multi-head latent attention the cache holds the keys and values of the heads instead of the latent.
        """
        attention, config = self.decoder.layers[0].self_attention, self.config
        latent = isinstance(attention, LatentAttention)
        shape = CacheShape(
            attention.num_query_groups_per_partition,
            config.qk_head_dim + config.qk_pos_emb_head_dim if latent else config.kv_channels,
            config.v_head_dim if latent else config.kv_channels,
        )
        return PagedKVCache(
            [shape] * len(self.decoder.layers),
            num_sequences,
            max_length,
            num_blocks=num_blocks,
            dtype=config.params_dtype,
            device=next(self.parameters()).device,
        )


def build_gpt(
    config: Any,
    grid: MegatronGrid,
    *,
    role: Role = "causal_lm",
    dtype: torch.dtype = torch.float32,
    layer_spec: LayerSpec = "local",
    value_bias: bool = False,
    num_labels: int = 1,
    **options: Any,
) -> list[PackedGPTModel]:
    """Build this rank's chunks of a model from a Hugging Face config: one chunk, or one for each virtual stage.

    Weights are uninitialised memory (norms: ones). Load them before use by the names of Megatron's state dict:
    `embedding.word_embeddings.weight`, `decoder.layers.{i}...` with i counting inside the chunk, `output_layer.weight`
    (for a value model `[num_labels, H]`, zeros). The embedding has `ceil(V / tp)` rows per rank.

    Args:
        config: The input of `ModelConfig.from_hf`: a mapping, an object with `.to_dict()`, or a checkpoint folder.
        grid: The active grid.
        role: "causal_lm", or "value" for fp32 numbers of each token, one for each label.
        dtype: The dtype of the parameters.
        layer_spec: "local" for layers of torch only; "transformer_engine" for its linears and norms. Attention is
            `parallel_layers.packed_attention` in both.
        value_bias: The head of a value model has a bias.
        num_labels: The rows of the head of a value model.
        options: `sequence_parallel`, `layers_per_stage`, or any field of `TransformerConfig`, such as `cp_comm_type`.

    Raises:
        ValueError: As `transformer_config`.
        ImportError: Transformer Engine is requested but not installed.
    """
    model = ModelConfig.from_hf(config)
    if model.decoder.latent is not None and layer_spec == "transformer_engine":
        options = {"qk_layernorm": True} | options  # the up-projections contain the norms of the latents
    megatron_config = transformer_config(
        model, grid.dims, dtype=dtype, virtual_stages=grid.virtual_stages, expert_tp=grid.expert_tp, **options
    )

    def make(stage: int | None, pre_process: bool, post_process: bool) -> PackedGPTModel:
        return PackedGPTModel(
            megatron_config,
            model,
            block_spec(megatron_config, model, layer_spec, grid.groups, stage=stage),
            role,
            padded_vocabulary(model.vocab_size, grid),
            value_bias,
            num_labels,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=grid.groups,
            vp_stage=stage,
        )

    return build_chunks(grid, make)


def require_multiples(chunks: Sequence[PackedGPTModel], recipe: str) -> None:
    """Raise ValueError unless all products of the layers can be in FP8."""
    multiple = RECIPES[recipe].multiple
    for name, weight in (named_parameter for chunk in chunks for named_parameter in chunk.decoder.named_parameters()):
        if weight.dim() == 2 and "router" not in name and any(size % multiple for size in weight.shape):
            raise ValueError(
                f"float8={recipe!r} needs weights whose sizes are multiples of {multiple}, and decoder.{name} of this "
                f"rank has {list(weight.shape)}; use another recipe or tp, or backend='parallel', which leaves such a "
                "weight in its dtype"
            )
