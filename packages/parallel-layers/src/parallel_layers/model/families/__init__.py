"""The table of model families: which fields of a Hugging Face config make which decoder.

A family is one row of `FAMILIES`; the rows stand in `dense`, `windowed`, `mixtures`, `latent` and `vision_language`.
Every entry of a row is a constant or a reader of the config (`fields`). Where a config leaves a field out, the entry
has the default of transformers' own config class of the family. `ckpt.layout.families` has the names and shapes of the
family's tensors.
"""

from __future__ import annotations

import re

from parallel_layers.model.families.dense import DENSE
from parallel_layers.model.families.latent import LATENT
from parallel_layers.model.families.mixtures import MIXTURES
from parallel_layers.model.families.vision_language import VISION_LANGUAGE
from parallel_layers.model.families.windowed import WINDOWED
from parallel_layers.model.family import Family
from parallel_layers.model.fields import Config, names

_ROWS = (*DENSE, *WINDOWED, *MIXTURES, *LATENT, *VISION_LANGUAGE)
FAMILIES: dict[str, Family] = {family.name: family for family in sorted(_ROWS, key=lambda family: family.name)}

# Architectures that no `DecoderConfig` describes, by class prefix and by `model_type`, and what they have.
_GEMMA4 = (
    "its layers with full attention have heads of another size than those with windows, its values are normed, and the "
    "output of each layer has a factor; some sizes also share keys and values between layers, or embed tokens in every "
    "layer. Run transformers' own model"
)
_INEXPRESSIBLE = dict.fromkeys(("Gemma4", "gemma4", "gemma4_text"), _GEMMA4)


def family_of(config: Config) -> Family:
    """Return the family of a config, by `architectures` where given, else by `model_type`.

    Raises:
        ValueError: The family is not in the table; the message says why, or lists the known ones.
    """
    architectures = names("architectures")(config)
    prefix = re.sub(r"(For[A-Z]\w*|Model)$", "", architectures[0]) if architectures else None
    for family in FAMILIES.values():
        if prefix == family.class_prefix or (prefix is None and config.get("model_type") == family.name):
            return family
    known = ", ".join(f"{family.class_prefix}ForCausalLM" for family in FAMILIES.values())
    given = f"architectures={[*architectures]} with model_type={config.get('model_type')!r}"
    reason = _INEXPRESSIBLE.get(str(config.get("model_type")) if prefix is None else prefix)
    raise ValueError(f"{given} is not supported; {f'known: {known}' if reason is None else reason}")
