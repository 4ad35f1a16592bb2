"""Megatron-Core's model with Transformer Engine's layers, from a Llama config: the peer of several benchmarks.

Transformer Engine 2.20.2 may not choose flash-attn-4 (NVTE_FLASH_ATTN_V4=0): the kernels of 4.0.0b36 finish sooner than
the GPU can multiply, so not all of the attention is there. cuDNN and flash-attn 2 remain; NVTE_DEBUG=1
NVTE_DEBUG_LEVEL=2 says which it takes, and why. A model is refused in which a sequence's second token does not see its
first.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import CUDA, DEVICE
from torch import Tensor, nn

from parallel_layers import PackedSequence, next_token_labels


def has_megatron() -> bool:
    """Return whether Megatron-Core and Transformer Engine are installed, with a GPU."""
    return CUDA and all(importlib.util.find_spec(name) for name in ("megatron", "transformer_engine"))


def megatron_model(hf: dict[str, Any], group: dist.ProcessGroup | None = None, **config: Any) -> nn.Module:
    """Return the model in bf16; `config` are further arguments of its TransformerConfig."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
    tp = 1 if group is None else group.size()
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(0)
    chosen: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_backend": AttnBackend.auto,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "bias_activation_fusion": True,
        "apply_rope_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "gradient_accumulation_fusion": False,
    }
    model: nn.Module = GPTModel(
        TransformerConfig(**chosen | config),
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=-(-hf["vocab_size"] // tp) * tp,
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=500000,
    )
    return model.to(DEVICE)


def megatron_losses(model: nn.Module, packed: PackedSequence) -> Callable[[Tensor], Tensor]:
    """Return a function of the pack's tokens `[T]` that returns their losses `[1, T]`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )
    labels = next_token_labels(packed).clamp(min=0)[None]

    def losses(input_ids: Tensor) -> Tensor:
        result: Tensor = model(
            input_ids[None], packed.position_ids[None], None, labels=labels, packed_seq_params=bounds
        )
        return result

    return losses


@torch.no_grad()
def check_that_tokens_see_each_other(losses: Callable[[Tensor], Tensor], packed: PackedSequence) -> None:
    """Raise RuntimeError when another first token leaves the loss of a sequence's second one as it was."""
    first = packed.cu_seqlens[:-1].long()
    changed = packed.input_ids.clone()
    changed[first] = (changed[first] + 1) % changed.max()
    before, after = (losses(ids).flatten()[first + 1] for ids in (packed.input_ids, changed))
    if blind := (before == after).nonzero().flatten().tolist():
        raise RuntimeError(f"the attention leaves out sequences {blind} of the pack; take another attention backend")
