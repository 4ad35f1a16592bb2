"""Mixtral: Mistral's attention; every layer has routed experts, called w1 (gate), w3 (up) and w2 (down) in files."""

from ckpt.layout.families.rows import ATTENTION, ENDS, NORMS, ROTARY_BUFFERS, SIZES, experts
from ckpt.layout.families.table import Family, Size

FAMILY = Family(
    name="mixtral",
    class_prefix="Mixtral",
    rows=(*ENDS, *NORMS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")),
    sizes={**SIZES, "E": Size("num_experts"), "M": Size("intermediate_size")},
    flags={"qkv_bias": False, "o_bias": False, "qk_norm": False},
    experts=True,
    ignored=ROTARY_BUFFERS,
)
