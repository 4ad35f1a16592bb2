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


def family_of(config: Config) -> Family:
    """Return the family of a config, by `architectures` where given, else by `model_type`.

    Raises:
        ValueError: The family is not in the table; the message lists the known ones.
    """
    architectures = names("architectures")(config)
    prefix = re.sub(r"(For[A-Z]\w*|Model)$", "", architectures[0]) if architectures else None
    for family in FAMILIES.values():
        if prefix == family.class_prefix or (prefix is None and config.get("model_type") == family.name):
            return family
    known = ", ".join(f"{family.class_prefix}ForCausalLM" for family in FAMILIES.values())
    given = f"architectures={[*architectures]} with model_type={config.get('model_type')!r}"
    raise ValueError(f"{given} is not supported; known: {known}")
