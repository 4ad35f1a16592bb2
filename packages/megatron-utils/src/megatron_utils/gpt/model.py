"""`PackedGPTModel` and `build_gpt`: a Megatron-Core GPTModel that takes packed batches.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_utils.gpt.config import family_of, head_dim, hf_config, transformer_config
from megatron_utils.gpt.modules import BiasedRowParallelLinear, Norm, PackedCoreAttention, PackedParams, ValueHead
from megatron_utils.grid import MegatronGrid
from parallel_layers import LogProbs, PackedSequence, linear_log_probs
from parallel_layers.rotary import RotaryEmbedding

Role = Literal["causal_lm", "value"]
LayerSpec = Literal["local", "transformer_engine"]


class PackedGPTModel(GPTModel):
    """One pipeline stage (or chunk of one) of a decoder, called with a packed batch.

    What `forward` returns depends on the stage: hidden states `[T / tp, 1, H]` before the last; on the last,
    `LogProbs` when labels are given, else logits `[T, V]` (this rank's columns); `[T]` fp32 values for a value model.
    """

    def __init__(
        self, config: TransformerConfig, hf: dict[str, Any], spec: Any, role: Role, padded_vocab: int, **kwargs: Any
    ) -> None:
        self.role = role
        self.true_vocab_size = hf["vocab_size"]
        super().__init__(
            config,
            spec,
            vocab_size=padded_vocab,
            max_sequence_length=hf["max_position_embeddings"],
            position_embedding_type="none",
            share_embeddings_and_output_weights=role == "causal_lm" and bool(hf.get("tie_word_embeddings")),
            **kwargs,
        )
        self.rotary = RotaryEmbedding.from_config({**hf, "head_dim": head_dim(hf)})
        if role == "value" and self.post_process:
            self.output_layer = ValueHead(config, bias=bool(hf.get("score_bias")))

    def forward(
        self,
        packed: PackedSequence,
        labels: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
    ) -> Tensor | LogProbs:
        """Run this stage on a packed batch; a stage that is not the first takes `set_input_tensor`'s hidden states.

        Args:
            packed: the batch, its number of tokens a multiple of tp under sequence parallelism.
            labels: `[T]`, already shifted, -100 for none; the last stage then returns log-probs.
            temperature: divides the logits; a number or `[T]`.
            entropy: whether to return the entropy with the log-probs.
        """
        hidden = self.embedding(packed.input_ids[None], None) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=None, packed_seq_params=PackedParams.of(packed, self.rotary)
        )
        if not self.post_process:
            return hidden
        if self.role == "value":
            return self.output_layer(hidden)[0][:, 0, 0]
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if labels is None:
            return self.output_layer(hidden, weight=tied)[0][:, 0]
        group = self.pg_collection.tp
        return linear_log_probs(
            hidden[:, 0],
            self.output_layer.weight if tied is None else tied,
            labels,
            group=group if group.size() > 1 else None,
            temperature=temperature,
            entropy=entropy,
            sequence_parallel=self.config.sequence_parallel,
            vocab_size=self.true_vocab_size,
        )


def build_gpt(
    config: Any,
    grid: MegatronGrid,
    *,
    role: Role = "causal_lm",
    dtype: torch.dtype = torch.float32,
    layer_spec: LayerSpec = "local",
    **options: Any,
) -> list[PackedGPTModel]:
    """Build this rank's chunks of a model from a Hugging Face config: one, or one for each virtual stage.

    The weights are uninitialised memory (norms: ones); load them before use, by the names of Megatron's state dict:
    `embedding.word_embeddings.weight`, `decoder.layers.{i}...` with i counting inside the chunk, `output_layer.weight`
    (for a value model `[1, H]`, zeros). The embedding has `ceil(V / tp)` rows a rank.

    Args:
        config: a mapping, an object with `.to_dict()`, or a checkpoint folder.
        grid: the active grid.
        role: "causal_lm", or "value" for one fp32 number a token.
        dtype: of the parameters.
        layer_spec: "local": nothing but torch; "transformer_engine": its linears and norms. Attention is
            `parallel_layers.packed_attention` in both.
        options: `sequence_parallel`, `layers_per_stage`, or any field of `TransformerConfig`.

    Raises:
        ValueError: as `transformer_config`.
        ImportError: Transformer Engine is asked for and not installed.
    """
    hf = hf_config(config)
    made = transformer_config(
        hf, grid.dims, dtype=dtype, virtual_stages=grid.virtual_stages, expert_tp=grid.expert_tp, **options
    )
    padded_vocab = -(-hf["vocab_size"] // grid.dims.tp) * grid.dims.tp
    stages = range(grid.virtual_stages) if grid.virtual_stages else [None]
    chunks = []
    for stage in stages:
        first = grid.is_first_stage and stage in (None, 0)
        last = grid.is_last_stage and stage in (None, (grid.virtual_stages or 1) - 1)
        spec = _block_spec(made, hf, layer_spec, stage)
        chunk = PackedGPTModel(
            made,
            hf,
            spec,
            role,
            padded_vocab,
            pre_process=first,
            post_process=last,
            pg_collection=grid.groups,
            vp_stage=stage,
        )
        _mark_shards(chunk)
        chunks.append(chunk.cuda() if torch.cuda.is_available() else chunk)
    return chunks


def _mark_shards(chunk: PackedGPTModel) -> None:
    """Say which parameters are shards. Megatron does that when it initialises weights, which we never ask for.

    What is not marked counts as a replica: on every tensor-parallel rank but the first, gradient norms would leave
    it out.
    """
    for module in chunk.modules():
        for kinds, name, dim in _SHARDED:
            parameter = getattr(module, name, None) if isinstance(module, kinds) else None
            if parameter is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)


_SHARDED = (
    ((ColumnParallelLinear, VocabParallelEmbedding), "weight", 0),
    (ColumnParallelLinear, "bias", 0),
    (RowParallelLinear, "weight", 1),
)


def _block_spec(
    config: TransformerConfig, hf: dict[str, Any], layer_spec: LayerSpec, stage: int | None
) -> TransformerBlockSubmodules:
    """The specs of this chunk's layers, dense and mixture in their places."""
    if config.num_moe_experts and not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 leaves the name undefined where Transformer Engine is missing, and then tests it against None.
        moe_utils.te_general_gemm = None
    is_moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: _layer_spec(config, hf, layer_spec, bool(kind)) for kind in set(is_moe)}
    if config.pipeline_model_parallel_layout is not None:
        layers = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=stage)
    else:
        offset = get_transformer_layer_offset(config, vp_stage=stage)
        layers = range(offset, offset + get_num_layers_to_build(config, vp_stage=stage))
    return TransformerBlockSubmodules(layer_specs=[specs[is_moe[i]] for i in layers], layer_norm=Norm)


def _layer_spec(config: TransformerConfig, hf: dict[str, Any], layer_spec: LayerSpec, moe: bool) -> ModuleSpec:
    options = {"num_experts": config.num_moe_experts if moe else None, "qk_layernorm": config.qk_layernorm}
    if layer_spec == "transformer_engine":
        spec = copy.deepcopy(
            get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=config.moe_grouped_gemm, **options)
        )
    else:
        spec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm", **options))
        attention = spec.submodules.self_attention.submodules
        for holder, name in (
            (spec.submodules, "input_layernorm"),
            (spec.submodules, "pre_mlp_layernorm"),
            (attention, "q_layernorm"),
            (attention, "k_layernorm"),
        ):
            if getattr(holder, name) is not IdentityOp:
                setattr(holder, name, Norm)
        if family_of(hf).output_bias(hf):
            attention.linear_proj = BiasedRowParallelLinear
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    return spec
