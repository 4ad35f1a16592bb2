"""Models that cannot be packed: refused by name before the first step."""

from typing import Any

import transformers
from packaging.version import Version

from hf_patches.backbone import WITHOUT_TOKEN_MIXER
from hf_patches.families.table import RECURRENT

_STATE = "has recurrent or convolutional layers, whose state runs across the boundaries of a packed batch"
_SCAN = "has Mamba layers, for which patch() has no scan that stops at the boundaries of a packed batch"
_CONVOLUTIONS = "convolves tokens in places where patch() does not stop at the boundaries of a packed batch"
_CHUNKS = "masks attention in chunks counted from the start of the batch, which packing moves"
_INDEXER = "chooses the keys of each token by an indexer that sees the whole batch"
_OVERLAY = "lets the tokens of an image see each other in both directions, which causal packed attention cannot"

REFUSED_MODEL_TYPES: dict[str, str] = {
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "zamba", "zamba2"), _SCAN),
    **dict.fromkeys(("inkling", "inkling_text", "lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl"), _CONVOLUTIONS),
    **dict.fromkeys(("bailing_hybrid", "minimax", "recurrent_gemma", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKS),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm5_next", "glm5_next_text", "glm_moe_dsa"), _INDEXER),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _INDEXER),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "paligemma"), f"{_OVERLAY}; load its text model alone"),
}

REFUSED_LAYER_TYPES: dict[str, str] = {
    **dict.fromkeys(("linear_attention", "conv"), _STATE),
    **dict.fromkeys(("hybrid", "hybrid_sliding"), _CONVOLUTIONS),
    "chunked_attention": _CHUNKS,
    **dict.fromkeys(("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"), _INDEXER),
}

_KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", *WITHOUT_TOKEN_MIXER)
# The first transformers whose recurrent layers call functions by name and hand them the keywords of the call.
_OLDEST_RECURRENT = "5.16"


def refuse(config: Any) -> None:
    """Raise ValueError if packing would compute a model of this config wrongly."""
    name = config.model_type
    if reason := REFUSED_MODEL_TYPES.get(name):
        raise ValueError(f"model_type={name!r} {reason}")
    text = config.get_text_config()
    recurrent = text.model_type in RECURRENT
    if recurrent and Version(transformers.__version__) < Version(_OLDEST_RECURRENT):
        raise ValueError(
            f"model_type={name!r} needs transformers {_OLDEST_RECURRENT} or later, whose recurrent layers can be told "
            f"the boundaries of a packed batch; installed is {transformers.__version__}"
        )
    for kind in dict.fromkeys(getattr(text, "layer_types", None) or ()):
        if kind not in _KNOWN_LAYER_TYPES and not (recurrent and kind == "linear_attention"):
            reason = REFUSED_LAYER_TYPES.get(kind, "has a kind of layer that patch() does not know")
            raise ValueError(f"model_type={name!r} with layer_types={kind!r} {reason}")
    # With "vision" only the tokens of an image see each other (Gemma 4).
    if (
        getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision")
        or getattr(text, "is_causal", True) is False
    ):
        raise ValueError(f"model_type={name!r} attends in both directions here; packed attention is causal")
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            f"model_type={name!r} with output_router_logits=True adds a load-balancing loss over the whole batch, "
            "which a packed and sharded batch would count differently; set config.output_router_logits=False"
        )


def longest_exact_sequence(config: Any) -> int | None:
    """Return the longest sequence whose rotary embedding is independent of the rest of the batch; None means any.

    Beyond the trained length, the types "dynamic" and "longrope" choose frequencies by the longest sequence of the
    batch. Then a packed batch would differ from its sequences one by one.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    if not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        return None
    trained = [kind.get("original_max_position_embeddings") for kind in kinds]
    lengths = [length for length in (*trained, getattr(text, "original_max_position_embeddings", None)) if length]
    return int(min(lengths, default=text.max_position_embeddings))
