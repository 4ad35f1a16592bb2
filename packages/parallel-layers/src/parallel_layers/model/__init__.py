"""`ModelConfig` describes a model; it is read from a Hugging Face config by the table of families."""

from parallel_layers.model.config import ModelConfig
from parallel_layers.model.families import FAMILIES, family_of
from parallel_layers.model.family import Family

__all__ = ["FAMILIES", "Family", "ModelConfig", "family_of"]
