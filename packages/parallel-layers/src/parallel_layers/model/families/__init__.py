"""The table of model families: which fields of a Hugging Face config make which decoder.

A family is one row of `FAMILIES`; the rows stand in `dense`, `windowed`, `gemma4`, `mixtures`, `latent`,
`hybrid`, `mamba2` and `vision_language`.
Every entry of a row is a constant or a reader of the config (`fields`). Where a config leaves a field out, the entry
has the default of transformers' own config class of the family. `ckpt.layout.families` has the names and shapes of the
family's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallel_layers.model.families.dense import DENSE
from parallel_layers.model.families.gemma4 import GEMMA4
from parallel_layers.model.families.hybrid import HYBRID
from parallel_layers.model.families.latent import LATENT
from parallel_layers.model.families.mamba2 import MAMBA2
from parallel_layers.model.families.mixtures import MIXTURES
from parallel_layers.model.families.vision_language import VISION_LANGUAGE
from parallel_layers.model.families.windowed import WINDOWED
from parallel_layers.model.family import Family
from parallel_layers.model.fields import Config, names

_ROWS = (*DENSE, *WINDOWED, *GEMMA4, *MIXTURES, *LATENT, *HYBRID, *MAMBA2, *VISION_LANGUAGE)
_BY_NAME = {row.name: row for row in _ROWS}

# Vision-language models whose text part is a text model, by `model_type`: the fields of their rows that differ,
# and the `model_type`s of the text models, the usual text model first.
_WRAPPERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gemma4": ({"ties": "outer"}, ("gemma4_text",)),
    "kimi_k25": ({"class_prefix": "Kimi_K25", "tied": True, "ties": "outer"}, ("deepseek_v3", "kimi_k2")),
    "mistral3": ({"class_prefix": "Mistral3", "ties": "first"}, ("ministral3", "mistral")),
}
_MAMBA = "state spaces of Mamba's first form, with a step for each channel"
_INDEXER = "an indexer, which chooses the keys of each token"
_CONVOLUTIONS = "gated short convolutions in place of attention"
# What the layers lack for other models with states, convolutions or indexers, by `model_type`.
_LACKING = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), _MAMBA),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "minimax_m3", "mistral_large4"), _INDEXER),
    "deepseek_v4": f"compressed keys and values, hyper-connections, and {_INDEXER}",
    **dict.fromkeys(("glm5_next", "hy_v4"), f"hyper-connections, and {_INDEXER}"),
    "qwen4_exp": f"embeddings of n-grams, gated residuals, and {_INDEXER}",
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTIONS),
    **dict.fromkeys(
        ("inkling", "inkling2", "inkling2_loop"),
        "short convolutions of keys and values, and position biases instead of rotation",
    ),
    "bailing_hybrid": "delta attention whose decays have a lower bound",
    "falcon_h1": "attention and Mamba-2 side by side in one layer",
    "minimax": "lightning attention",
    "recurrent_gemma": "recurrent linear units",
    "rwkv": "the recurrence of RWKV",
    "xlstm": "memory cells with exponential gates",
    "zaya": "convolutions of queries and keys",
    "zamba2": "attention that several layers of Mamba-2 share",
}
# Text models that share the row of another model.
_SAME = {"kimi_k2": "deepseek_v3"}


def _wrapped(name: str, text: str) -> Family:
    return replace(_BY_NAME[_SAME.get(text, text)], name=name, nested=True, **_WRAPPERS[name][0])


_ALL = _BY_NAME | {name: _wrapped(name, texts[0]) for name, (_, texts) in _WRAPPERS.items()}
FAMILIES: dict[str, Family] = dict(sorted(_ALL.items()))


def family_of(config: Config) -> Family:
    """Return the family of a config, by `architectures` where given, else by `model_type`.

    Raises:
        ValueError: The family is not in the table; the message says what the layers lack for some, and lists the known
            families.
    """
    architectures = names("architectures")(config)
    # Moonshot's class is KimiK25..., transformers' class Kimi_K25...; a reward model is Gemma3TextFor...
    prefix = re.sub(r"(Text)?(For[A-Z]\w*|Model)$", "", architectures[0]).replace("_", "") if architectures else None
    model_type = config.get("model_type")
    matches = [
        family
        for family in FAMILIES.values()
        if prefix == family.class_prefix.replace("_", "") or (prefix is None and model_type == family.name)
    ]
    if matches:
        # A text model and its vision-language model can have one prefix (Gemma 4).
        return _of_text(next((family for family in matches if family.name == model_type), matches[0]), config)
    classes = ", ".join(f"{family.class_prefix}ForCausalLM" for family in FAMILIES.values())
    stated = f"architectures={[*architectures]} with model_type={model_type!r}"
    lacking = _LACKING.get(re.sub("(_vl)?(_text)?$", "", str(model_type)))
    reason = "" if lacking is None else f": the layers lack {lacking}"
    raise ValueError(f"{stated} is not supported{reason}; known: {classes}")


def _of_text(family: Family, config: Config) -> Family:
    """Return the row of a vision-language model for the text model that its config names."""
    text = config.get("text_config")
    if family.name not in _WRAPPERS or not isinstance(text, Mapping) or text.get("model_type") is None:
        return family
    texts = _WRAPPERS[family.name][1]
    if text["model_type"] not in texts:
        raise ValueError(
            f"text_config with model_type={text['model_type']!r} in a config of {family.name} is not supported; known: "
            f"{', '.join(texts)}"
        )
    return _wrapped(family.name, text["model_type"])
