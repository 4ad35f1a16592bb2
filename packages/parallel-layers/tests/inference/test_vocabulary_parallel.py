"""Draws over ranks that hold parts of the vocabulary, against draws from whole logits on one rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.inference import sample, sample_with_mask, truncate
from parallel_layers.testing import RankPool

DRAWS: dict[str, dict[str, Any]] = {
    "all": {},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 7},
    "more than a part": {"top_k": 40, "top_p": 0.9},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.1},
    "all three": {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
}


def part_of(logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return the rank's part of the logits, with -inf for padding."""
    part = -(-logits.shape[1] // group.size())
    padded = torch.nn.functional.pad(logits, (0, part * group.size() - logits.shape[1]), value=-torch.inf)
    return padded[:, group.rank() * part :][:, :part]


def draw(group: ProcessGroup, logits: Tensor, uniforms: Tensor, options: dict[str, Any], mask: bool) -> Any:
    function: Any = sample_with_mask if mask else sample
    return function(part_of(logits, group), uniforms, group=group, **options)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", DRAWS)
def test_equal_to_one_rank(ranks: RankPool, name: str, world: int) -> None:
    """The last of 4 ranks has padding alone: 49 tokens are 4 parts of 13."""
    torch.manual_seed(0)
    logits, uniforms = 3 * torch.randn(400, 49, dtype=torch.float64), torch.rand(400)
    logits[::7, 40:] = -torch.inf
    masks = bool({"top_k", "top_p", "min_p"} & DRAWS[name].keys()) + 1
    for mask in range(masks):
        expected: Any = (sample_with_mask if mask else sample)(logits, uniforms, **DRAWS[name])
        results = ranks.run(draw, logits, uniforms, DRAWS[name], bool(mask), world=world)
        for result in results:
            assert torch.equal(result[0], expected[0])
            torch.testing.assert_close(result[1], expected[1])
            assert all(torch.equal(mine, first) for mine, first in zip(result, results[0], strict=True))
            assert not mask or torch.equal(result[2], expected[2])


@pytest.mark.parametrize("name", ["all", "greedy", "top-k", "all three"])
def test_a_row_that_is_no_distribution_has_no_log_prob_and_leaves_the_others_alone(ranks: RankPool, name: str) -> None:
    inf = torch.inf
    rows = [[0.0, 1.0, 2.0, 0.0], [torch.nan, 1.0, 0.0, 0.0], [0.0, 0.0, inf, 0.0], [-inf] * 4, [-inf, -inf, -inf, 2.0]]
    for _, log_probs in ranks.run(draw, torch.tensor(rows), torch.rand(5), DRAWS[name], False, world=2):
        assert log_probs.isnan().tolist() == [False, True, True, True, False]
        assert log_probs[4] == 0


def test_every_number_finds_a_token_with_weight(ranks: RankPool) -> None:
    """Also the largest number below 1, where rounding could pass the end, and 0."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(3, 4)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    for tokens, _ in ranks.run(draw, logits, uniforms, {}, False, world=2):
        assert tokens.tolist() == [1, 2, 2]
    for tokens, _ in ranks.run(draw, torch.zeros(8, 8), torch.arange(8) / 8, {}, False, world=4):
        assert tokens.tolist() == [*range(8)]  # at the borders of tokens and of parts


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}])
def test_numbers_at_borders_of_parts_find_tokens_with_weight(ranks: RankPool, options: dict[str, Any]) -> None:
    """Parts begin and end with tokens that cannot be drawn, and sums of fp32 round."""
    torch.manual_seed(0)
    logits = torch.randn(2000, 4, 16)
    logits[..., 0], logits[..., -1] = -torch.inf, -torch.inf
    shares = truncate(logits.flatten(1), **options).double().softmax(-1).unflatten(1, (4, 16)).sum(-1)
    numbers = shares.cumsum(1)[torch.arange(2000), torch.arange(2000) % 4] + (torch.rand(2000) - 0.5) * 2.0**-22
    uniforms = numbers.float().clamp(0, 1 - 2.0**-24)
    for tokens, log_probs in ranks.run(draw, logits.flatten(1), uniforms, options, False, world=4):
        assert (log_probs > -torch.inf).all()
        assert ((tokens % 16 > 0) & (tokens % 16 < 15)).all()


def bytes_of_draw(group: ProcessGroup, logits: Tensor, uniforms: Tensor, options: dict[str, Any], mask: bool) -> int:
    """Return the bytes that this rank gives to collectives."""
    sizes = list[int]()
    contiguous = async_collectives._contiguous
    with patch.object(async_collectives, "_contiguous", lambda x: sizes.append(x.nbytes) or contiguous(x)):
        draw(group, logits, uniforms, options, mask)
    return sum(sizes)


def test_no_rank_sends_logits(ranks: RankPool) -> None:
    """An all-reduce of 16 sums for each of 8 rounds, the maximum, three statistics and a draw: 1056 bytes a row."""
    logits, uniforms = torch.randn(3, 4096), torch.rand(3)
    search, draws, bits = 4 + 8 * 16 * 8, 3 * 4 + 2 * 8, 4 * (2048 // 32 + 1)
    for options, mask, expected in (
        ({"top_p": 0.9}, False, search + draws),
        ({"top_p": 0.9}, True, search + draws - 4 + bits),
        ({"min_p": 0.1}, False, 4 + draws),
        ({"top_k": 5}, False, 4 * 5 + draws),
    ):
        assert ranks.run(bytes_of_draw, logits, uniforms, options, mask, world=2) == [3 * expected] * 2
