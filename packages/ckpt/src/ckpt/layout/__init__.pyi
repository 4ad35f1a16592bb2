from ckpt.layout.adapter_config import (
    NOTES as NOTES,
    PLAIN as PLAIN,
    READ as READ,
    require_plain_lora as require_plain_lora,
)
from ckpt.layout.adapters import EXPERTS as EXPERTS, HEADS as HEADS, Change as Change, adaptable as adaptable
from ckpt.layout.config import (
    PREDICTION_LAYERS as PREDICTION_LAYERS,
    classifies_sequences as classifies_sequences,
    load_config as load_config,
    quantization_of as quantization_of,
)
from ckpt.layout.dtensors import on_this_rank as on_this_rank
from ckpt.layout.families.entries import FAMILIES as FAMILIES
from ckpt.layout.families.table import Target as Target
from ckpt.layout.hub_layout import HubLayout as HubLayout
from ckpt.layout.labels import labels_of as labels_of
from ckpt.layout.operations import multiply_adds as multiply_adds
from ckpt.layout.pieces import Box as Box, extents as extents, full_box as full_box
