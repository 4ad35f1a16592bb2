"""The attention function of patched models, registered with transformers under its own name.

Shapes: Q query heads, K key-value heads, T tokens of the packed batch, D head size.
"""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface

from hf_patches.batch import BatchPlan, required_plan
from hf_patches.isolation import measure_leak
from hf_patches.npu import npu_attention
from hf_patches.report import KeyValues
from parallel_layers import packed_attention
from parallel_layers.attention import AttentionOptions, exchange_heads
from parallel_layers.module import as_operand

# transformers reads "flash" in a name as a request for the flash-attn package, so this name avoids it.
ATTENTION_NAME = "hf_patches_packed"


# Selects torch_npu's operator in place of a backend of packed_attention.
NPU_BACKEND = "npu"


def register_attention() -> None:
    """Enter the function into the registry of transformers; other entries stay unchanged."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within the segments of a packed batch, with the signature that transformers calls.

    Take query `[1, Q, T, D]`, key and value `[1, K, T, D]`; return (`[1, T, Q, D]`, None). Under sequence parallelism T
    counts this rank's part, and heads are exchanged for tokens around the attention (`exchange_heads`). Under
    torch.autocast, rotations return fp32 and projections 16 bits; all three inputs are rounded to autocast's dtype, as
    the GEMMs of transformers' own attention do.

    Raises:
        ValueError: The plan of the batch is missing, a mask is given (packing replaces masks), or dropout is active.
    """
    plan = required_plan(type(module).__name__, kwargs, query.shape[0], query.shape[2])
    if attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} got an attention mask of shape {tuple(attention_mask.shape)} for a packed batch; "
            "boundaries come from cu_seqlens alone: pass attention_mask=None"
        )
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} is not applied to packed batches; load the model with attention_dropout=0.0 "
            "or call model.eval()"
        )
    options: AttentionOptions = {
        "causal": is_causal if is_causal is not None else getattr(module, "is_causal", True),
        "window": sliding_window,
        "scale": scaling,
        "softcap": softcap,
        "backend": plan.backend,
    }
    attend = partial(_attend, module, plan, options)
    # squeeze instead of x[0]: the backward of x[0] copies the gradient into a tensor of zeros.
    query_TQD, key_TKD, value_TKD = (as_operand(x).squeeze(0).transpose(0, 1) for x in (query, key, value))
    mix = partial(exchange_heads, attend, group=plan.group, sinks=s_aux)
    if plan.trace is not None:
        operands = (query_TQD, key_TKD, value_TKD)
        plan.trace.record(module, lambda: measure_leak(mix, operands, plan, gradients=False))
        shape = (key_TKD.shape[1], key_TKD.shape[2], value_TKD.shape[2])
        plan.trace.key_values[module] = KeyValues(*shape, key_TKD.dtype)
    return mix(query_TQD, key_TKD, value_TKD).unsqueeze(0), None


def _attend(
    module: nn.Module,
    plan: BatchPlan,
    options: AttentionOptions,
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sinks_Q: Tensor | None,
) -> Tensor:
    """Attend by an NPU's operator, over the keys of a cache, over shared keys, or within the segments."""
    if plan.backend == NPU_BACKEND:
        if plan.shared_keys is not None:
            k_TKD, v_TKD = map(plan.shared_keys.rows, (k_TKD, v_TKD))
        window, scale, softcap = options["window"], options["scale"], options["softcap"]
        return npu_attention(q_TQD, k_TKD, v_TKD, plan, window=window, scale=scale, softcap=softcap, sinks=sinks_Q)
    options = {**options, "sinks": sinks_Q}
    if plan.cache is not None:
        layer = plan.cache.layer(cast(int, module.layer_idx))
        return layer.attend(q_TQD, k_TKD, v_TKD, plan.cu_seqlens, plan.max_seqlen, **options)
    attend = packed_attention if plan.shared_keys is None else plan.shared_keys.attend
    return attend(q_TQD, k_TKD, v_TKD, plan.cu_seqlens, plan.max_seqlen, **options)
