"""The tensors of vision towers, by name: what a checkpoint of each family must hold beside its language model.

`{b}` stands for a block, `{d}` for a merger of Qwen3-VL's deep stack. Shapes are not described: towers are carried
whole.
"""


def _modules(*names: str, bias: bool = True) -> tuple[str, ...]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(f"{name}.{kind}" for name in names for kind in kinds)


_BLOCK = "blocks.{b}."
_ATTENTION = _modules(f"{_BLOCK}attn.qkv", f"{_BLOCK}attn.proj")
_NORMS = (f"{_BLOCK}norm1", f"{_BLOCK}norm2")
_GATED_MLP = tuple(f"{_BLOCK}mlp.{part}_proj" for part in ("gate", "up", "down"))

QWEN2_VL = (
    "patch_embed.proj.weight",
    *_modules(*_NORMS, f"{_BLOCK}mlp.fc1", f"{_BLOCK}mlp.fc2"),
    *_ATTENTION,
    *_modules("merger.ln_q", "merger.mlp.0", "merger.mlp.2"),
)
QWEN2_5_VL = (
    "patch_embed.proj.weight",
    *_modules(*_NORMS, bias=False),
    *_ATTENTION,
    *_modules(*_GATED_MLP),
    "merger.ln_q.weight",
    *_modules("merger.mlp.0", "merger.mlp.2"),
)
QWEN3_VL = (
    *_modules("patch_embed.proj"),
    "pos_embed.weight",
    *_modules(*_NORMS, f"{_BLOCK}mlp.linear_fc1", f"{_BLOCK}mlp.linear_fc2"),
    *_ATTENTION,
    *_modules(
        *(
            f"{m}.{part}"
            for m in ("merger", "deepstack_merger_list.{d}")
            for part in ("norm", "linear_fc1", "linear_fc2")
        )
    ),
)
GLM4V = (
    "embeddings.position_embedding.weight",
    *_modules("patch_embed.proj", "downsample", "merger.post_projection_norm"),
    *_modules(*_NORMS, f"{_BLOCK}attn.qkv", f"{_BLOCK}attn.proj", *_GATED_MLP, bias=False),
    *_modules("merger.proj", "merger.gate_proj", "merger.up_proj", "merger.down_proj", bias=False),
    *_modules("post_conv_layernorm", "post_layernorm", bias=False),
)
