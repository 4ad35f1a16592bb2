"""`PackedHybridModel`: Megatron-Core's `HybridModel` on packed batches. Importing it needs Megatron-Core 0.18."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_utils.gpt.layer_spec import LayerSpec, one_layer
from megatron_utils.gpt.norms import Norm
from megatron_utils.gpt.packed_model import PackedModel, Role
from parallel_layers import ModelConfig, PackedSequence

ATTENTION = "*"


class PackedStack(HybridStack):
    """A `HybridStack` whose last norm needs no Transformer Engine."""

    def __init__(
        self, config: TransformerConfig, submodules: HybridStackSubmodules, *, post_process: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, post_process=post_process, post_layer_norm=False, **kwargs)
        self.post_layer_norm = True
        if post_process:
            self.final_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)


class PackedHybridModel(PackedModel, HybridModel):
    """A `PackedModel` of layers of several kinds. It decodes without a cache only."""

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        spec: ModuleSpec,
        role: Role,
        padded_vocab: int,
        value_bias: bool = False,
        num_labels: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, spec, **self.core_arguments(model, role, padded_vocab), **kwargs)
        kinds = self.decoder.layer_type_list
        ropes = [
            model.ropes[layer.layer_number - 1] if kind == ATTENTION else None
            for kind, layer in zip(kinds, self.decoder.layers, strict=True)
        ]
        self.take_packed_batches(model, role, ropes, value_bias=value_bias, num_labels=num_labels)

    def new_cache(self, *_: Any, **__: Any) -> None:
        """Raise ValueError: there is no cache of states."""
        raise ValueError(
            "hybrid models on Megatron-Core keep no states between tokens; draw with vLLM, or use backend='parallel'"
        )

    def further_params(self, packed: PackedSequence) -> dict[str, Any]:
        """Return the number of each token's sequence, `[1, T]` int32, at whose borders Mamba's state begins anew."""
        tokens = torch.arange(packed.num_tokens, dtype=packed.cu_seqlens.dtype, device=packed.cu_seqlens.device)
        return {"seq_idx": torch.searchsorted(packed.cu_seqlens[1:], tokens, right=True, out_int32=True)[None]}


def stack_spec(
    config: TransformerConfig,
    model: ModelConfig,
    layer_spec: LayerSpec,
    groups: ProcessGroupCollection,
    *,
    mixture: bool,
) -> ModuleSpec:
    """Return the specs of all kinds of layers, whose linears and norms are those of `one_layer`."""
    layer = one_layer(config, model, layer_spec, groups, moe=False).submodules
    attention = layer.self_attention.submodules
    # Transformer Engine's projections contain the norm before them.
    projections = {"in_proj": attention.linear_qkv, "out_proj": attention.linear_proj}
    names = {"sharded_state_dict_keys_map": layer.sharded_state_dict_keys_map}

    def half(kind: type, **submodules: Any) -> ModuleSpec:
        return ModuleSpec(module=kind, submodules=TransformerLayerSubmodules(**submodules, **names))

    def with_mlp(kind: type, spec: Any) -> ModuleSpec:
        return half(kind, pre_mlp_layernorm=spec.pre_mlp_layernorm, mlp=spec.mlp, mlp_bda=spec.mlp_bda)

    gated_delta_net = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**projections, out_norm=Norm))
    norm, residual = layer.input_layernorm, layer.self_attn_bda
    kinds: dict[str, ModuleSpec] = {
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=norm,
                mixer=ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(**projections)),
                mamba_bda=residual,
            ),
        ),
        "gdn_layer": half(
            TransformerLayer, input_layernorm=norm, self_attention=gated_delta_net, self_attn_bda=residual
        ),
        "attention_layer": half(
            TransformerLayer, input_layernorm=norm, self_attention=layer.self_attention, self_attn_bda=residual
        ),
        "mlp_layer": with_mlp(MLPLayer, layer),
    }
    if mixture:
        spec = one_layer(config, model, layer_spec, groups, moe=True)
        kinds["moe_layer"] = with_mlp(spec.module, spec.submodules)
    return ModuleSpec(module=PackedStack, submodules=HybridStackSubmodules(**kinds))
