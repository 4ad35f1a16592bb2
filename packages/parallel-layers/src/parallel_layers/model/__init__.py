"""One description of a model, read from a Hugging Face config, and the table of families that says how."""

from parallel_layers.model.config import ModelConfig
from parallel_layers.model.families import FAMILIES, Family, family_of

__all__ = ["FAMILIES", "Family", "ModelConfig", "family_of"]
