"""DecoderLayer against transformers' own decoder layers, run one sequence at a time.

The reference's weights and gradients are cut into each rank's part, and every rank's output and every one of its
gradients is compared with its part.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_families import DEEPSEEK, FAMILIES, HIDDEN, LLAMA, Family, cu_seqlens_of, positions_of
from decoder_grids import (
    joined_over_experts,
    run_ours,
    run_with_context_parallel,
    run_with_expert_parallel,
    shard,
    summed_over_context,
)
from torch import Tensor, nn

from parallel_layers.linear_attention.config import GatedDeltaNetConfig
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.testing import RankPool

LENGTHS, PADDING = [11, 1, 0, 17, 6], 5  # 35 real tokens, 40 in all: a multiple of 4


def run_reference(family: Family, x: Tensor, seed: Tensor, lengths: list[int]) -> dict[str, dict[str, Tensor] | Tensor]:
    """Weights, output and gradients of transformers' layer, one sequence at a time."""
    layer = family.build()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    biases = {
        name: nn.init.normal_(b, std=0.3)
        for name, b in layer.named_buffers()
        if name.endswith(("correction_bias", "layer_scalar"))
    }
    x = x.clone().requires_grad_()
    outs = []
    for part in x.split(lengths):
        if len(part):
            cos, sin = map(family.their_table, family.rotary(torch.arange(len(part))))
            distance = torch.arange(len(part))[:, None] - torch.arange(len(part))
            hidden = (distance < 0) | (distance >= (family.ours.window or len(part)))
            mask = torch.zeros(distance.shape).masked_fill(hidden, float("-inf"))[None, None]
            out = layer(part[None], attention_mask=mask, position_embeddings=(cos[None], sin[None]))
            outs.append(out[0])
    out = torch.cat(outs)
    out.backward(seed)
    return {
        "out": out.detach(),
        "d_x": x.grad,
        "weights": family.by_our_names({name: p.detach() for name, p in layer.named_parameters()}) | biases,
        "d_weights": family.by_our_names({name: p.grad for name, p in layer.named_parameters()}),
    }


def check_gradients(
    gradients: dict[str, Tensor], expected: dict[str, Any], config: DecoderConfig, rank: int, size: int
) -> None:
    """Every parameter's gradient equals this rank's part of transformers', relative to its largest number."""
    local = shard(expected["d_weights"], config, rank, size)
    assert gradients.keys() == local.keys()
    for key, gradient in gradients.items():
        scale = local[key].abs().max()
        torch.testing.assert_close(
            gradient / scale, local[key] / scale, rtol=1e-5, atol=1e-5, msg=lambda text, at=key: f"{at}: {text}"
        )


# Every run has all families at tp 2 and these at other sizes; --slow has all.
SIZES_IN_EVERY_RUN = {
    ("llama", 1),
    ("deepseek", 1),
    ("olmo2", 4),
    ("gpt-oss", 4),
    ("deepseek", 4),
}


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[] if tp == 2 or (name, tp) in SIZES_IN_EVERY_RUN else pytest.mark.slow)
        for name in FAMILIES
        for tp in (1, 2, 4)
    ],
)
def test_equals_transformers(ranks: RankPool, name: str, tp: int) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    x, seed = torch.randn(sum(LENGTHS), HIDDEN), torch.randn(sum(LENGTHS), HIDDEN)
    expected = run_reference(family, x, seed, LENGTHS)
    lengths = [*LENGTHS, PADDING]
    padded_x = torch.cat((x, torch.randn(PADDING, HIDDEN)))
    padded_seed = torch.cat((seed, torch.zeros(PADDING, HIDDEN)))
    rotary = family.rotary(positions_of(lengths))
    arguments = (family.ours, rotary, expected["weights"], padded_x, padded_seed, lengths)
    results = [run_ours(None, *arguments)] if tp == 1 else ranks.run(run_ours, *arguments, world=tp)
    for sequence_parallel in (False, True):
        outs, d_xs, d_weights = zip(*(result[sequence_parallel] for result in results), strict=True)
        for ours, whole in ((outs, expected["out"]), (d_xs, expected["d_x"])):
            together = [torch.cat(ours)] if sequence_parallel else ours
            for rank_tensor in together:
                torch.testing.assert_close(rank_tensor[: sum(LENGTHS)], whole, rtol=1e-5, atol=1e-5)
            assert not (ours is d_xs and together[0][sum(LENGTHS) :].any())  # padding: no gradient
        for rank, gradients in enumerate(d_weights):
            check_gradients(gradients, expected, family.ours, rank, tp)


# A few in every run; the rest of the grid with --slow.
CONTEXT_CASES = {
    ("qwen3", "ulysses"),
    ("qwen3", "ring"),
    ("gemma2", "ring"),
    ("gpt-oss attention", "ulysses"),
    ("deepseek", "ring"),
}


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, attention, marks=[] if (name, attention) in CONTEXT_CASES else pytest.mark.slow)
        for name in FAMILIES
        for attention in ("ulysses", "ring")
    ],
)
def test_context_parallel_equals_transformers(ranks: RankPool, name: str, attention: str) -> None:
    torch.manual_seed(0)
    family, lengths = FAMILIES[name], [13, 1, 0, 21, 5]
    x, seed = torch.randn(40, HIDDEN), torch.randn(40, HIDDEN)
    expected = run_reference(family, x, seed, lengths)
    config = replace(family.ours, context_parallel=attention)
    rotary = family.rotary(positions_of(lengths))
    results = ranks.run(run_with_context_parallel, config, rotary, expected["weights"], x, seed, lengths, world=4)
    for _, out, d_x, _ in results:
        torch.testing.assert_close(out, expected["out"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(d_x, expected["d_x"], rtol=1e-5, atol=1e-5)
    for rank in range(2):
        gradients = summed_over_context(results, rank)
        check_gradients(gradients, expected, config, rank, 2)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ours.moe])
def test_expert_parallel_equals_transformers(ranks: RankPool, name: str) -> None:
    torch.manual_seed(0)
    family, lengths = FAMILIES[name], [[13, 1, 0], [21, 5]]
    whole = [*lengths[0], *lengths[1]]
    x, seed = torch.randn(40, HIDDEN), torch.randn(40, HIDDEN)
    expected = run_reference(family, x, seed, whole)
    parts = [t.split([sum(part) for part in lengths]) for t in (x, seed)]
    rotary = [family.rotary(positions_of(part)) for part in lengths]
    results = ranks.run(
        run_with_expert_parallel, family.ours, rotary, expected["weights"], *parts, lengths, world=2
    )  # fmt: skip
    out, d_x, gradients = joined_over_experts(results)
    torch.testing.assert_close(out, expected["out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_x, expected["d_x"], rtol=1e-5, atol=1e-5)
    check_gradients(gradients, expected, family.ours, 0, 1)


# Without experts: how many rows one gets depends on all tokens, and with it how a product is cut into blocks.
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ours.moe is None])
def test_a_sequence_never_feels_another_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    lengths = [11, 1, 17, 6]
    rotary, cu_seqlens = FAMILIES[name].rotary(positions_of(lengths)), cu_seqlens_of(lengths)
    layer = DecoderLayer(FAMILIES[name].ours)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, seed = torch.randn(2, sum(lengths), HIDDEN)

    def run(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = layer(leaf, rotary, cu_seqlens, max(lengths))
        return out.detach(), torch.autograd.grad(out, leaf, seed)[0]

    before = run(x, seed)
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        others = torch.ones(sum(lengths), 1, dtype=torch.bool)
        others[start:end] = False
        after = run(torch.where(others, x * 3 + 1, x), torch.where(others, seed - 2, seed))
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[start:end], b[start:end])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_size=32 is not divisible by num_attention_heads=5; give head_dim"):
        replace(LLAMA, head_dim=None, num_heads=5)
    with pytest.raises(ValueError, match=r"num_attention_heads=4 is not a multiple of num_key_value_heads=3"):
        replace(LLAMA, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"norm_placement='middle' is unknown; use one of pre, post, sandwich, par"):
        replace(LLAMA, norm_placement="middle")
    with pytest.raises(ValueError, match="normalization='batch' is unknown; use 'rms' or 'layer'"):
        replace(LLAMA, normalization="batch")
    with pytest.raises(ValueError, match="norm_unit_offset=True is of RMSNorm; leave it out"):
        replace(LLAMA, normalization="layer", norm_unit_offset=True)
    with pytest.raises(
        ValueError, match=r"qk_norm='layer' is unknown; use 'head' \(Qwen3\), 'full' \(OLMo-2\) or None"
    ):
        DecoderLayer(replace(LLAMA, qk_norm="layer"))
    with pytest.raises(
        ValueError, match=r"num_key_value_heads=2, but latent attention makes keys and values for each of num_a"
    ):
        replace(DEEPSEEK, num_kv_heads=2)
    with pytest.raises(
        ValueError, match=r"head_dim=4, but the heads of latent attention have qk_nope_head_dim=6 \+ qk_"
    ):
        replace(DEEPSEEK, head_dim=4)
    with pytest.raises(ValueError, match="output_gate=True: options of ordinary attention"):
        replace(DEEPSEEK, output_gate=True)
    with pytest.raises(ValueError, match="qk_norm='head': options of ordinary attention"):
        replace(DEEPSEEK, qk_norm="head")
    with pytest.raises(ValueError, match=r"activation='mish' is unknown; known: gelu, "):
        DecoderLayer(replace(LLAMA, activation="mish"))


def test_linear_attention_refuses_shared_keys() -> None:
    sizes = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8)
    layer, arguments = (
        DecoderLayer(replace(LLAMA, linear_attention=sizes)),
        (torch.randn(4, HIDDEN), None, cu_seqlens_of([4]), 4),
    )
    with pytest.raises(ValueError, match="linear attention does not go with shared keys: give whole sequences"):
        layer(*arguments, shared_keys=object())
