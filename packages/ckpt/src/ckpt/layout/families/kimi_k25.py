"""Kimi-K2.5: the text part of DeepSeek-V3, a vision tower (MoonViT) and a projector.

The canonical names are the names in the published files; transformers saves some tensors under other names.
"""

from ckpt.layout.families.deepseek_v3 import DEEPSEEK_ROWS, DEEPSEEK_SIZES, LATENT_FLAGS
from ckpt.layout.families.table import Family
from ckpt.layout.families.towers import modules

_BLOCK = "vision_tower.encoder.blocks.{l}."
_TOWER = (
    *modules("vision_tower.patch_embed.proj"),
    "vision_tower.patch_embed.pos_emb.weight",
    *modules(*(_BLOCK + part for part in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1"))),
    *modules("vision_tower.encoder.final_layernorm"),
    *modules("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"),
)

KIMI_K25 = Family(
    "kimi_k25",
    "Kimi_K25",
    DEEPSEEK_ROWS,
    DEEPSEEK_SIZES,
    LATENT_FLAGS,
    tied=True,
    ties="outer",
    experts=True,
    prefixes=("language_model.model.", "model.language_model."),
    layers=("language_model.model.blocks.",),
    heads=("language_model.lm_head.", "lm_head."),
    carried=(
        ("vision_tower.patch_embed.", "vision_tower.encoder.patch_embed."),
        ("vision_tower.encoder.",),
        ("mm_projector.", "model.mm_projector."),
    ),
    tower=_TOWER,
)
