"""The known families, and the choice of the family that describes a configuration."""

import re
from collections.abc import Mapping
from typing import Any

from ckpt.layout.families.entries import FAMILIES
from ckpt.layout.families.table import Family


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family whose entry describes `config`: by `architectures` where given, else by `model_type`.

    Raises:
        ValueError: Neither name is known; the message lists the known names.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"the config's architectures={architectures!r:.100} must be a list of class names")
    if architectures:
        # Moonshot's class is KimiK25..., transformers' class Kimi_K25...; a reward model is Gemma3TextFor...
        prefix = re.sub(r"(Text)?(For[A-Z]\w*|Model)$", "", str(architectures[0])).replace("_", "")
        matching = [family for family in FAMILIES.values() if prefix == family.class_prefix.replace("_", "")]
        # A text model and its vision-language model can have one prefix (Gemma 4).
        exact = (family for family in matching if family.name == config.get("model_type"))
        if matching:
            return next(exact, matching[0])
    else:
        model_type = config.get("model_type")
        for family in FAMILIES.values():
            if model_type == family.name:
                return family
    raise ValueError(
        f"architectures={architectures} with model_type={config.get('model_type')!r} is not a known family; "
        f"known: {', '.join(sorted(FAMILIES))}"
    )
