"""The tensors of vision towers, by name: what a checkpoint of each family must hold beside its language model.

`{b}` and `{l}` stand for a block, `{d}` for a merger of Qwen3-VL's deep stack. Shapes are not described: towers are
carried whole.
"""

from collections.abc import Mapping, Sequence

from ckpt.layout.config import repetitions

# The field of `vision_config` that counts a symbol, or lists its places, and the count where the field is absent.
_REPEATED = {"{b}": ("depth", 1), "{d}": ("deepstack_visual_indexes", 1), "{l}": ("num_hidden_layers", 27)}


def tower_names(tower: Sequence[str], vision: object) -> list[str]:
    """Return the names of a tower's tensors for the content of `vision_config`."""
    names = [*tower]
    for symbol, (counted, default) in _REPEATED.items():
        count = repetitions(vision if isinstance(vision, Mapping) else {}, counted, default)
        spelled = ([name.replace(symbol, str(i)) for i in range(count if symbol in name else 1)] for name in names)
        names = [name for group in spelled for name in group]
    return names


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def _modules(*names: str, bias: bool = True) -> tuple[str, ...]:
    """Return the names of the weights of modules, and of their biases."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return tuple(f"{name}.{kind}" for name in names for kind in kinds)


_BLOCK = "blocks.{b}."
_ATTENTION = _modules(f"{_BLOCK}attn.qkv", f"{_BLOCK}attn.proj")
_NORMS = (f"{_BLOCK}norm1", f"{_BLOCK}norm2")
_GATED_MLP = tuple(f"{_BLOCK}mlp.{name}_proj" for name in ("gate", "up", "down"))

QWEN2_VL = _under(
    "visual.",
    "patch_embed.proj.weight",
    *_modules(*_NORMS, f"{_BLOCK}mlp.fc1", f"{_BLOCK}mlp.fc2"),
    *_ATTENTION,
    *_modules("merger.ln_q", "merger.mlp.0", "merger.mlp.2"),
)
QWEN2_5_VL = _under(
    "visual.",
    "patch_embed.proj.weight",
    *_modules(*_NORMS, bias=False),
    *_ATTENTION,
    *_modules(*_GATED_MLP),
    "merger.ln_q.weight",
    *_modules("merger.mlp.0", "merger.mlp.2"),
)


def _qwen3_vl(*mergers: str) -> tuple[str, ...]:
    return _under(
        "model.visual.",
        *_modules("patch_embed.proj"),
        "pos_embed.weight",
        *_modules(*_NORMS, f"{_BLOCK}mlp.linear_fc1", f"{_BLOCK}mlp.linear_fc2"),
        *_ATTENTION,
        *_modules(*(f"{merger}.{layer}" for merger in mergers for layer in ("norm", "linear_fc1", "linear_fc2"))),
    )


QWEN3_VL = _qwen3_vl("merger", "deepstack_merger_list.{d}")
QWEN3_5 = _qwen3_vl("merger")
GLM4V = _under(
    "model.visual.",
    "embeddings.position_embedding.weight",
    *_modules("patch_embed.proj", "downsample", "merger.post_projection_norm"),
    *_modules(*_NORMS, f"{_BLOCK}attn.qkv", f"{_BLOCK}attn.proj", *_GATED_MLP, bias=False),
    *_modules("merger.proj", "merger.gate_proj", "merger.up_proj", "merger.down_proj", bias=False),
    *_modules("post_conv_layernorm", "post_layernorm", bias=False),
)
KIMI_K25 = (
    "vision_tower.patch_embed.pos_emb.weight",
    *_modules("vision_tower.patch_embed.proj", "vision_tower.encoder.final_layernorm"),
    *_modules(
        *(
            f"vision_tower.encoder.blocks.{{l}}.{layer}"
            for layer in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
        )
    ),
    *_modules("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"),
)
