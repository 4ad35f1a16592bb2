"""The kinds of each layer, by which rows of a family's table belong to the layer."""

from ckpt.layout.config import Config, count_or_zero, is_mixture, names
from ckpt.layout.families.table import Family, Layers

# The layers of a family with one mixer a layer, by their types.
_MIXERS: dict[str, Layers] = {"linear_attention": "linear", "full_attention": "full", "mlp": "dense", "moe": "moe"}


def layer_kinds(family: Family, text: Config, layer: int, num_layers: int, *, has_experts: bool) -> tuple[Layers, ...]:
    """Return the values of `Row.layers` that are true of a layer, under the language model's config.

    Raises:
        ValueError: The type of a layer with one mixer is unknown.
    """
    types = names(text, "layer_types")
    if family.one_mixer:
        if types[layer] not in _MIXERS:
            raise ValueError(f"the type {types[layer]!r} of layer {layer} is unknown; use one of {[*_MIXERS]}")
        return "all", _MIXERS[types[layer]]
    linear = family.has_linear_attention
    # Without types every fourth layer of Qwen3-Next has full attention, and every sixth of Gemma 4 and its last.
    interval = count_or_zero(text, "full_attention_interval") or (4 if linear else 6)
    attends = family.attends or (lambda config, layer, num_layers: (layer + 1) % interval == 0)
    full = types[layer] == "full_attention" if layer < len(types) else attends(text, layer, num_layers)
    full = full or (layer == num_layers - 1 and not linear)
    reusing = layer >= num_layers - count_or_zero(text, "num_kv_shared_layers")
    wide = reusing and text.get("use_double_wide_mlp")
    attention: tuple[Layers, Layers] = ("reusing sliding", "reusing full") if reusing else ("sliding", "full")
    attention = ("linear", "full") if linear else attention
    has_mixture = has_experts and is_mixture(text, layer)
    return "all", "moe" if has_mixture else "wide" if wide else "dense", attention[full]
