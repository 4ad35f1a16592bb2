"""The tensors of a Megatron-Core checkpoint (`torch_dist`), as pieces of canonical tensors.

A stored tensor belongs to the whole model, whatever grid saves it. Its name is the module's name, with the layer's
number in the model: `decoder.layers.3.self_attention.linear_qkv.weight`. The experts of a layer are stacked:
`decoder.layers.3.mlp.experts.experts.linear_fc1.weight` is `[E, 2 * M, H]`. In older checkpoints ("homogeneous") the
layers are stacked as well, and the name has no number. Modules of the local spec that Transformer Engine fuses have
Transformer Engine's names, except with latent attention (Megatron-Core, `gpt_layer_specs.py`,
`sharded_state_dict_keys_map`).
"""

import dataclasses
import re
from collections.abc import Mapping

from ckpt.layout.config import count_or_zero
from ckpt.layout.families.table import Target
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Piece, Shape
from ckpt.layout.place import Place

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
# One expert's tensor: of the local spec, and of Transformer Engine.
_EXPERT = re.compile(r"(mlp\.experts\.)(?:local_experts\.(\d+)\.(\w+\.weight)|(\w+\.weight)(\d+))")
_FUSED_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


def stored_blocks(layout: Layout, target: Target, *, rows: int = 1, homogeneous: bool = False) -> dict[str, Block]:
    """Return the stored tensors of a model: name -> its block of canonical tensors.

    Args:
        layout: The layout of the model, on any target.
        target: "megatron" for models of the local spec, "megatron_te" for models of Transformer Engine's.
        rows: The vocabulary is padded up to a multiple of this.
        homogeneous: Stack the layers, `[L, ...]`.

    Raises:
        ValueError: Megatron-Core has no tensor for one of the model's, or the model has linear attention.
    """
    if layout.family.has_linear_attention:
        raise ValueError(
            f"{layout.family.name} has linear attention, whose projections Megatron-Core's checkpoints divide into "
            "tensors of other names, which are not supported; use a Hugging Face folder, or a sharded folder"
        )
    placed = dataclasses.replace(layout, target=target, layers=None, vocab_multiple=rows, prediction_layers=0)
    keeps_norms = target == "megatron_te" or count_or_zero(layout.text, "kv_lora_rank")
    parts: dict[str, dict[Shape, Block]] = {}
    for local, block in placed.at(Place()).items():
        name, index = _stored_name(local, homogeneous, keep_norms=bool(keeps_norms))
        parts.setdefault(name, {})[index] = block
    return {name: _stacked(blocks) for name, blocks in parts.items()}


def _stored_name(local: str, homogeneous: bool, *, keep_norms: bool) -> tuple[str, Shape]:
    """Return the stored name of a local tensor, and its index in the stored tensor's leading dimensions."""
    match = _LAYER.fullmatch(local)
    if match is None:
        return local, ()
    layers, layer, name = match.groups()
    index: Shape = (int(layer),) if homogeneous else ()
    if expert := _EXPERT.fullmatch(name):
        module, of_local, local_name, te_name, of_te = expert.groups()
        index, name = (*index, int(of_local or of_te)), f"{module}experts.{local_name or te_name}"
    for plain, fused in () if keep_norms else _FUSED_NORMS:
        if name.startswith(plain):
            name = fused + name.removeprefix(plain)
    return layers + ("" if homogeneous else f"{layer}.") + name, index


def _stacked(blocks: Mapping[Shape, Block]) -> Block:
    """Return the block of a tensor that stacks blocks of one shape at their indices."""
    ((first, block), *_) = blocks.items()
    if not first:
        return block
    shape = tuple(max(sides) + 1 for sides in zip(*blocks, strict=True))
    pieces = []
    for index, entry in blocks.items():
        at: Box = tuple((number, number + 1) for number in index)
        pieces += [Piece(piece.name, piece.canonical_range, at + piece.local_range) for piece in entry.pieces]
    return Block((*shape, *block.shape), tuple(pieces))
