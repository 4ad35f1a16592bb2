"""GAE, token rewards and whitening, against the definitions in plain Python loops."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import ProcessGroup

from parallel_layers.testing import RankPool
from rl_models.losses import discounted_returns, gae, gspo_clip, token_rewards, whiten

number = st.floats(-2, 2, allow_nan=False)
token = st.tuples(number, number, st.booleans())
sequences = st.lists(st.lists(token, max_size=6), min_size=1, max_size=4)


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 of the paper as the sum it is, not as a recursion."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@given(sequences, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_sum_over_the_actions_of_each_sequence(
    batch: list[list[tuple[float, float, bool]]], gamma: float, lam: float
) -> None:
    flat = [step for sequence in batch for step in sequence]
    rewards = torch.tensor([step[0] for step in flat])
    values = torch.tensor([step[1] for step in flat])
    mask = torch.tensor([step[2] for step in flat], dtype=torch.bool)
    lengths = [len(sequence) for sequence in batch]
    result = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam)
    ends = list(accumulate(lengths))
    for sequence, end in zip(batch, ends, strict=True):
        here = slice(end - len(sequence), end)
        actions = [step for step in sequence if step[2]]
        expected = torch.tensor(reference_gae([a[0] for a in actions], [a[1] for a in actions], gamma, lam))
        chosen = mask[here]
        torch.testing.assert_close(result.advantages[here][chosen], expected, rtol=1e-5, atol=1e-5)
        old = torch.tensor([a[1] for a in actions])
        torch.testing.assert_close(result.returns[here][chosen], expected + old, rtol=1e-5, atol=1e-5)
        assert not result.advantages[here][~chosen].any()
        assert not result.returns[here][~chosen].any()


def test_gae_at_lambda_one_is_the_return_less_the_value() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])
    result = gae(rewards, values, torch.ones(3, dtype=torch.bool), [3], lam=1.0)
    torch.testing.assert_close(result.advantages, torch.tensor([2.0, 1.0, -1.0]))
    torch.testing.assert_close(result.returns, torch.full((3,), 3.0))


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_a_rank_without_tokens_has_empty_results(lengths: tuple[int, ...]) -> None:
    none, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    found = [*gae(none, none, mask, lengths), discounted_returns(none, mask, lengths)]
    found.append(gspo_clip(none, none, none, mask, lengths).loss)
    if not lengths:
        found.append(token_rewards(none, mask, lengths))
    assert {(each.shape, each.dtype) for each in found} == {(torch.Size([0]), torch.float32)}


def test_gae_refuses_mistakes() -> None:
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"lengths \[1, 1\] must .* add up to the 3 tokens"):
        gae(ones, ones, ones.bool(), [1, 1])
    with pytest.raises(ValueError, match=r"gamma=1.5"):
        gae(ones, ones, ones.bool(), [3], gamma=1.5)
    with pytest.raises(ValueError, match="one shape"):
        gae(ones, ones[:2], ones.bool(), [3])


def test_token_rewards_go_to_the_last_action() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    penalty = torch.arange(6.0)
    rewards = token_rewards(torch.tensor([10.0, 20.0]), mask, [4, 2], penalty=penalty, coefficient=0.5)
    torch.testing.assert_close(rewards, torch.tensor([0.0, -0.5, 9.0, 0.0, 0.0, 17.5]))
    with pytest.raises(ValueError, match=r"sequences \[1\] have a score and no action"):
        token_rewards(torch.ones(2), mask, [6, 0])
    for shape in ((3,), (2, 1)):
        with pytest.raises(ValueError, match=r"scores must be \[2\], one for each sequence, got \["):
            token_rewards(torch.ones(shape), mask, [4, 2])


def test_whiten_one_rank() -> None:
    torch.manual_seed(1)
    values, mask = 1e4 + torch.randn(50), torch.rand(50) > 0.4
    white = whiten(values, mask)
    chosen = values[mask].double()
    expected = (chosen - chosen.mean()) / chosen.std(unbiased=False)
    torch.testing.assert_close(white[mask].double(), expected, rtol=1e-5, atol=1e-5)
    assert not white[~mask].any()
    assert not whiten(torch.ones(3), torch.zeros(3)).any()


def whiten_part(group: ProcessGroup, values: torch.Tensor, mask: torch.Tensor, cut: int) -> torch.Tensor:
    part = slice(0, cut) if group.rank() == 0 else slice(cut, None)
    return whiten(values[part], mask[part], group=group)


@pytest.mark.parametrize("cut", [0, 7])
def test_whiten_is_that_of_the_whole_batch_over_ranks(ranks: RankPool, cut: int) -> None:
    torch.manual_seed(2)
    values, mask = torch.randn(20), torch.rand(20) > 0.3
    parts = ranks.run(whiten_part, values, mask, cut, world=2)
    torch.testing.assert_close(torch.cat(parts), whiten(values, mask), rtol=1e-6, atol=1e-6)
