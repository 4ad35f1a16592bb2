"""The random numbers of stochastic rounding: even, and the same for an element on every grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import ckpt
from ckpt.layout import Box, full_box
from parallel_models.optimizers.rounding import coordinates, random_bits, step_key

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 60, "hidden_size": 16,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "attention_bias": True, "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip


def bits(block: ckpt.Block, step: int) -> Tensor:
    rows, columns = coordinates(block, CPU)
    return random_bits(rows, columns, step_key(step)).view(block.shape)


def canonical(layout: ckpt.Layout, place: ckpt.Place, cut: bool) -> Iterator[tuple[str, Box, Tensor]]:
    """The bits of every piece of a place, of the halves that FSDP2 makes of each tensor if `cut`."""
    for block in layout.at(place).values():
        half = block.shape[0] // 2
        boxes = [((0, half), *full_box(block.shape)[1:]), ((half, block.shape[0]), *full_box(block.shape)[1:])]
        for box in boxes if cut else [full_box(block.shape)]:
            part = block.part(box)
            found = bits(part, 3)
            for piece in part.pieces:
                if piece.canonical_range is not None:
                    own = found[tuple(slice(*side) for side in piece.local_range)]
                    yield piece.name, piece.canonical_range, own


def test_an_element_has_the_same_numbers_on_every_grid() -> None:
    layout = ckpt.layout_for(CONFIG)
    whole = {name: torch.zeros(entry.shape, dtype=torch.int64) for name, entry in layout.canonical.items()}
    for name, box, found in canonical(layout, ckpt.Place(), False):
        view = whole[name][tuple(slice(*side) for side in box)]
        view.copy_(found.reshape(view.shape))
    assert all((tensor != 0).any() for tensor in whole.values())
    places = [ckpt.Place(tp=(r, 2), ep=(e, 2), etp=(0, 1)) for r in range(2) for e in range(2)]
    for place in places:
        for name, box, found in canonical(layout, place, True):
            expected = whole[name][tuple(slice(*side) for side in box)]
            assert torch.equal(found.reshape(expected.shape), expected), (name, place)


def test_the_numbers_are_those_of_earlier_releases() -> None:
    rows, columns = coordinates(ckpt.Block.whole("model.norm.weight", (2, 3)), CPU)
    assert (rows.tolist(), columns.tolist()) == ([3390024241, 1446943101], [0, 1, 2])
    assert random_bits(rows, columns, step_key(9)).tolist() == [
        [464543915, 716515982, 3666015215],
        [4153130981, 3551655922, 1204108668],
    ]
    of_experts, _ = coordinates(ckpt.Block.whole("e", (2, 2, 3)), CPU)
    assert of_experts.tolist() == [3473303341, 1211032777, 3732104050, 304996358]


def test_the_numbers_are_even_and_differ_by_step_and_name() -> None:
    block = ckpt.Block.whole("model.layers.0.mlp.up_proj.weight", (256, 512))
    first, second = bits(block, 1), bits(block, 2)
    other = bits(ckpt.Block.whole("model.layers.1.mlp.up_proj.weight", (256, 512)), 1)
    for found in (first, second, other):
        for half in (found & 0xFFFF, found >> 16):
            counts = torch.bincount(half.flatten() >> 12, minlength=16).double()
            # Chi squared with 15 degrees of freedom: above 40 with a chance of 5e-4.
            assert float(((counts - 8192).square() / 8192).sum()) < 40
    for left, right in ((first, second), (first, other), (first & 0xFFFF, first >> 16), (first[:, 1:], first[:, :-1])):
        pair = torch.stack([left.flatten(), right.flatten()]).double()
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.015
