from parallel_layers.linear.block_scaled import hold_in_float8_ as hold_in_float8_
from parallel_layers.linear.low_rank import without_adapters as without_adapters
from parallel_layers.model.decoder import NORM_PLACEMENTS as NORM_PLACEMENTS
from parallel_layers.model.families import FAMILIES as FAMILIES
from parallel_layers.model.family import Family as Family
from parallel_layers.model.fields import read as read
from parallel_layers.model.lora import add_lora_ as add_lora_
from parallel_layers.model.options import (
    ALL_LINEAR as ALL_LINEAR,
    Float8Recipe as Float8Recipe,
    LoraOptions as LoraOptions,
)
