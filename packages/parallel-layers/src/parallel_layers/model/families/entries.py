"""Entries that rows of several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel_layers.model.fields import Config, count, count_or_zero, flag, name, number

BIASES = {"attention_bias": flag("attention_bias"), "output_bias": flag("attention_bias")}
GRANITE = {
    **BIASES,
    "attention_scale": number("attention_multiplier", default=1.0),
    "residual_multiplier": number("residual_multiplier", default=1.0),
}
GRANITE_ENDS = {
    "embedding_scale": number("embedding_multiplier", default=1.0),
    "logit_scale": number("logits_scaling", default=1.0, then=lambda divisor: 1 / divisor),
}
EXPERTS = {
    "num_experts": count_or_zero("num_local_experts", "num_experts"),
    "top_k": count("num_experts_per_tok"),
    "intermediate_size": count("moe_intermediate_size"),
    "normalize_top_k": flag("norm_topk_prob"),
    "activation": name("hidden_act", default="silu"),
}
# Mixtral's: each expert has the width of an MLP.
WIDE_EXPERTS = {**EXPERTS, "intermediate_size": count("intermediate_size"), "normalize_top_k": True}


def _shared_experts(config: Config) -> int:
    return int(count_or_zero("n_shared_experts")(config) * count("moe_intermediate_size")(config))


def routed(**changes: Any) -> dict[str, Any]:
    """Return the entries of DeepSeek-V3's routed and shared experts, with these changes."""
    return {
        **EXPERTS,
        "num_experts": count("n_routed_experts"),
        "scoring": "sigmoid",
        "normalize_top_k": flag("norm_topk_prob", default=True),
        "routed_scaling_factor": number("routed_scaling_factor", default=1.0),
        "correction_bias": True,
        "num_groups": count("n_group", default=1),
        "top_k_groups": count("topk_group", default=1),
        "shared_intermediate_size": _shared_experts,
        **changes,
    }


def from_max_window_layers(default: int) -> Callable[[Config, int], list[bool]]:
    """Return a rule: the layers from number `max_window_layers` on have a window."""
    first_windowed = count_or_zero("max_window_layers", default=default)
    return lambda config, num_layers: [i >= first_windowed(config) for i in range(num_layers)]


def all_but_every(period: int) -> Callable[[Config, int], list[bool]]:
    """Return a rule: each `period`-th layer sees all tokens, and the others have a window."""
    stated = count("sliding_window_pattern", default=period)
    return lambda config, num_layers: [(i + 1) % stated(config) != 0 for i in range(num_layers)]
