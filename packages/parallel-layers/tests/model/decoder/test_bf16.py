"""A bf16 DecoderLayer on every grid is as close to fp64 as transformers' layer in bf16."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from decoder_families import FAMILIES, HIDDEN, Family, positions_of
from decoder_grids import (
    joined_over_experts,
    run_ours,
    run_with_context_parallel,
    run_with_expert_parallel,
    shard,
    summed_over_context,
)
from torch import Tensor, nn

from parallel_layers.testing import RankPool

# Two sequences; every grid below divides their 64 tokens.
BF16_LENGTHS = [32, 32]
Tensors = dict[str, Tensor]


def bf16_on_tensor_parallel_ranks(
    ranks: RankPool, tp: int, sequence_parallel: bool, family: Family, weights: Tensors, inputs: tuple[Any, ...]
) -> list[Tensors]:
    arguments = (family.ours, family.rotary(positions_of(BF16_LENGTHS)), weights, *inputs[:2], BF16_LENGTHS, inputs[2])
    results = [run_ours(None, *arguments)] if tp == 1 else ranks.run(run_ours, *arguments, world=tp)
    outs, d_xs, gradients = zip(*(result[sequence_parallel] for result in results), strict=True)
    out, d_x = (torch.cat(parts) if sequence_parallel else parts[0] for parts in (outs, d_xs))
    return [{"out": out, "d_x": d_x} | mine for mine in gradients]


def bf16_on_context_parallel_ranks(
    ranks: RankPool, attention: str, family: Family, weights: Tensors, inputs: tuple[Any, ...]
) -> list[Tensors]:
    config = replace(family.ours, context_parallel=attention)
    arguments = (config, family.rotary(positions_of(BF16_LENGTHS)), weights, *inputs[:2], BF16_LENGTHS, inputs[2])
    results = ranks.run(run_with_context_parallel, *arguments, world=4)
    return [{"out": results[0][1], "d_x": results[0][2]} | summed_over_context(results, rank) for rank in range(2)]


def bf16_on_expert_parallel_ranks(
    ranks: RankPool, family: Family, weights: Tensors, inputs: tuple[Any, ...]
) -> list[Tensors]:
    rotary = [family.rotary(torch.arange(length)) for length in BF16_LENGTHS]
    x, seed, experts = (t.split(BF16_LENGTHS) for t in inputs)
    lengths = [[length] for length in BF16_LENGTHS]
    results = ranks.run(
        run_with_expert_parallel, family.ours, rotary, weights, x, seed, lengths, experts, world=2
    )  # fmt: skip
    out, d_x, gradients = joined_over_experts(results)
    return [{"out": out, "d_x": d_x} | gradients]


# What each rank of the tensor-parallel group has in the end; the output and the input's gradient are whole.
BF16_GRIDS: dict[str, Callable[..., list[Tensors]]] = {
    "one rank": partial(bf16_on_tensor_parallel_ranks, tp=1, sequence_parallel=False),
    "tp 2": partial(bf16_on_tensor_parallel_ranks, tp=2, sequence_parallel=False),
    "tp 4 sp": partial(bf16_on_tensor_parallel_ranks, tp=4, sequence_parallel=True),
    "cp 2 tp 2 ulysses": partial(bf16_on_context_parallel_ranks, attention="ulysses"),
    "cp 2 tp 2 ring": partial(bf16_on_context_parallel_ranks, attention="ring"),
    "ep 2": bf16_on_expert_parallel_ranks,
}
# Every run has norms before and behind a layer, sinks and experts, latents, and heads by layer. --slow has all.
BF16_IN_EVERY_RUN = {
    ("llama", "tp 4 sp"),
    ("gpt-oss", "ep 2"),
}


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(name, grid, marks=[] if (name, grid) in BF16_IN_EVERY_RUN else pytest.mark.slow)
        for grid in BF16_GRIDS
        for name, family in FAMILIES.items()
        if family.ours.moe is not None or grid != "ep 2"
    ],
)
def test_bf16_error_is_that_of_plain_bf16(ranks: RankPool, name: str, grid: str) -> None:
    """Both against fp64: ours may not be more than 1.5 times as far off as transformers' layer on the same data.

    In output and every gradient, over six batches: a norm has few weights, and the errors of few numbers scatter.
    """
    torch.manual_seed(0)
    family = FAMILIES[name]
    reference = family.build().bfloat16()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    weights = family.by_our_names(reference.state_dict())
    squares: dict[str, list[Tensor]] = {}
    for x, seed in torch.randn(6, 2, sum(BF16_LENGTHS), HIDDEN).bfloat16():
        theirs, exact, seed, experts = bf16_and_exact(family, reference, x, seed)
        parts = BF16_GRIDS[grid](ranks, family=family, weights=weights, inputs=(x, seed, experts))
        for rank, ours in enumerate(parts):
            ours["out"] = ours["out"] * (seed != 0)
            plain, truth = (shard(full, family.ours, rank, len(parts)) for full in (theirs, exact))
            assert ours.keys() == plain.keys() == truth.keys()
            for key, value in truth.items():
                errors = torch.stack([(ours[key] - value).square().sum(), (plain[key] - value).square().sum()])
                squares.setdefault(key, []).append(errors)
    for key, errors in squares.items():
        mine, plain_error = sum(errors).sqrt()
        assert mine <= 1.5 * plain_error, key


def bf16_and_exact(
    family: Family, reference: nn.Module, x: Tensor, seed: Tensor
) -> tuple[Tensors, Tensors, Tensor, Tensor | None]:
    """transformers' output and gradients in bf16 and in fp64; the gradient to give ours, and the experts to replay.

    A router near a tie chooses other experts in bf16 than in fp64, which is no rounding: ours replays the choice of
    fp64, and tokens for which transformers' choice in bf16 is another one get no gradient and do not count.
    """
    length = BF16_LENGTHS[0]
    tables = family.rotary(torch.arange(length))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (family.ours.window or length))

    def run_theirs(dtype: torch.dtype, seed: Tensor) -> tuple[Tensors, Tensor | None]:
        layer, leaf = copy.deepcopy(reference).to(dtype), x.to(dtype, copy=True).requires_grad_()
        cos_sin = tuple(family.their_table(table)[None].to(dtype) for table in tables)
        mask = torch.zeros(distance.shape, dtype=dtype).masked_fill(hidden, float("-inf"))[None, None]
        chosen = []
        if family.ours.moe:
            router = family.router(layer)
            router.register_forward_hook(lambda *arguments: chosen.append(arguments[-1][2]))
        out = layer(leaf.view(-1, length, HIDDEN), attention_mask=mask, position_embeddings=cos_sin).flatten(0, 1)
        out.backward(seed.to(dtype))
        gradients = family.by_our_names({key: p.grad for key, p in layer.named_parameters()})
        return {"out": out.detach() * (seed != 0), "d_x": leaf.grad} | gradients, chosen[0] if chosen else None

    exact_choice = None
    if family.ours.moe:
        (_, exact_choice), (_, choice) = (run_theirs(dtype, seed) for dtype in (torch.float64, torch.bfloat16))
        same = (exact_choice.sort(1).values == choice.sort(1).values).all(1)
        assert same.sum() > len(x) // 2
        seed = seed * same[:, None]
    (theirs, _), (exact, _) = (run_theirs(dtype, seed) for dtype in (torch.bfloat16, torch.float64))
    return theirs, exact, seed, exact_choice
