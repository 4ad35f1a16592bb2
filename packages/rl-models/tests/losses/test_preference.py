"""DPO and Bradley-Terry against their formulas, one pair after the other, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_models import Batch
from rl_models.losses import bradley_terry, dpo, kto, simpo
from rl_models.losses.aggregation import token_weights

PROMPTS = [[1, 2], [3], [4, 5, 6]]
CHOSEN = [[7, 8, 9], [7], [8, 8]]
REJECTED = [[9], [8, 9, 7, 7], [9, 9]]


def make_pairs() -> Batch:
    return Batch.from_pairs(PROMPTS, CHOSEN, REJECTED)


def random_column(batch: Batch, seed: int) -> Tensor:
    return torch.randn(batch.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_pairs_are_prompts_with_the_chosen_and_then_the_rejected_response() -> None:
    batch = make_pairs()
    rows = [prompt + response for prompt, *both in zip(PROMPTS, CHOSEN, REJECTED, strict=True) for response in both]
    assert [row.tolist() for row in batch.split()] == rows
    assert [row.tolist() for row in batch.responses()] == [[7, 8, 9], [9], [7], [8, 9, 7, 7], [8, 8], [9, 9]]
    assert batch.units("group", "pair") == [0, 0, 1, 1, 2, 2]
    ends = batch.with_ends()
    assert [row.tolist() for row in ends.split()] == [[*row, row[-1]] for row in rows]
    assert [row.tolist() for row in ends.split("mask")] == [[False] * len(row) + [True] for row in rows]
    assert ends.units("pair") == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [2, 4, 0, 3, 1, 5]], ids=["neighbours", "apart"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_equals_its_formula(order: list[int], smoothing: float) -> None:
    batch = make_pairs()
    new, reference = (random_column(batch, seed) for seed in (0, 1))
    batch = batch.with_fields(new=new, reference=reference).select(order)
    log_probs = batch["new"].clone().requires_grad_()
    arguments = batch["pair"], batch.mask, batch.lengths
    found = dpo(log_probs, batch["reference"], *arguments, beta=0.3, label_smoothing=smoothing)
    (found.loss * token_weights(batch, "sequence-mean", len(batch))).sum().backward()

    plain = batch["new"].clone().requires_grad_()
    sums = [(row - ref)[mask].sum() for row, ref, mask in zip(
        plain.split(batch.lengths), batch.split("reference"), batch.split("mask"), strict=True
    )]  # fmt: skip
    terms = {}
    for pair in range(3):
        chosen, rejected = (0.3 * sums[order.index(2 * pair + which)] for which in (0, 1))
        wins = torch.sigmoid(chosen - rejected)
        terms[pair] = -(1 - smoothing) * wins.log() - smoothing * (1 - wins).log()
        of_pair = batch["pair"] == pair
        for name, value in (
            ("chosen_reward", chosen),
            ("rejected_reward", rejected),
            ("reward_margin", chosen - rejected),
            ("reward_accuracy", (chosen > rejected).double()),
        ):
            torch.testing.assert_close(found.metrics[name][of_pair], value.detach().expand(int(of_pair.sum())))
        torch.testing.assert_close(found.loss[of_pair], terms[pair].expand(int(of_pair.sum())))
    torch.stack(list(terms.values())).mean().backward()
    torch.testing.assert_close(log_probs.grad, plain.grad, rtol=1e-6, atol=1e-8)  # the weights are fp32


def test_simpo_compares_mean_log_probs_with_a_margin() -> None:
    batch = make_pairs()
    log_probs = random_column(batch, 0).requires_grad_()
    found = simpo(log_probs, batch["pair"], batch.mask, batch.lengths, beta=1.5, margin=0.7)
    plain = log_probs.detach().clone().requires_grad_()
    means = [row[mask].mean() for row, mask in zip(plain.split(batch.lengths), batch.split("mask"), strict=True)]
    expected = torch.stack([-torch.sigmoid(1.5 * (means[2 * n] - means[2 * n + 1]) - 0.7).log() for n in range(3)])
    torch.testing.assert_close(found.loss, expected[batch["pair"]])
    margins = torch.stack([1.5 * (means[2 * n] - means[2 * n + 1]).detach() for n in range(3)])
    torch.testing.assert_close(found.metrics["reward_margin"], margins[batch["pair"]])
    (found.loss * token_weights(batch, "sequence-mean", len(batch))).sum().backward()
    expected.mean().backward()
    torch.testing.assert_close(log_probs.grad, plain.grad, rtol=1e-6, atol=1e-8)


def test_kto_equals_its_formula() -> None:
    labels = [True, False, False, True]
    rows = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 1, 1]]
    batch = Batch.from_sequences(
        rows, response_lengths=[2, 3, 1, 1],
        desirable=[torch.full((len(row),), float(label)) for row, label in zip(rows, labels, strict=True)],
    )  # fmt: skip
    log_probs, reference = random_column(batch, 0).requires_grad_(), random_column(batch, 1)
    options: Any = {"kl": 0.3, "beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    found = kto(log_probs, reference, batch["desirable"], batch.mask, batch.lengths, **options)
    plain = log_probs.detach().clone().requires_grad_()
    terms, ratios = [], []
    for row, ref, mask, label in zip(
        plain.split(batch.lengths), batch.split(reference), batch.split("mask"), labels, strict=True
    ):
        ratio = (row - ref)[mask].sum()
        value = torch.sigmoid(0.5 * (ratio - 0.3)) if label else torch.sigmoid(0.5 * (0.3 - ratio))
        terms.append((1.3 if label else 0.7) * (1 - value))
        ratios.append(ratio.detach())
    torch.testing.assert_close(found.loss, torch.stack(terms)[batch.sequence_ids])
    torch.testing.assert_close(found.metrics["reward"], 0.5 * torch.stack(ratios)[batch.sequence_ids])
    (found.loss * token_weights(batch, "sequence-mean", len(batch))).sum().backward()
    torch.stack(terms).mean().backward()
    torch.testing.assert_close(log_probs.grad, plain.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "lengths", "message"),
    [
        ({"beta": 0.0}, (2, 1), "beta=0.0 must be positive"),
        ({"kl": -1.0}, (2, 1), "kl=-1.0, desirable_weight=1.0, undesirable_weight=1.0 not negative"),
        ({}, (3, 0), r"a sequence has no tokens, .* \[3, 0\]"),
    ],
)
def test_mistakes_of_kto_are_refused(options: dict[str, float], lengths: tuple[int, ...], message: str) -> None:
    column = torch.zeros(3)
    with pytest.raises(ValueError, match=message):
        kto(column, column, column, torch.ones(3).bool(), lengths, **options)


def test_a_negative_margin_is_refused() -> None:
    batch = make_pairs()
    with pytest.raises(ValueError, match=r"margin=-0.1 must not be negative"):
        simpo(random_column(batch, 0), batch["pair"], batch.mask, batch.lengths, margin=-0.1)


def test_bradley_terry_compares_the_values_at_the_ends() -> None:
    batch = make_pairs().with_ends()
    values = random_column(batch, 2).requires_grad_()
    found = bradley_terry(values, batch["pair"], batch.mask, batch.lengths)
    ends = values.detach()[batch.mask].clone().requires_grad_()
    expected = -torch.sigmoid(ends[0::2] - ends[1::2]).log()
    torch.testing.assert_close(found.loss, expected[batch["pair"]])
    (found.loss * token_weights(batch, "sequence-mean", len(batch))).sum().backward()
    expected.mean().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad[batch.mask], ends.grad, rtol=1e-6, atol=1e-8)
    assert not values.grad[~batch.mask].any()


def test_ipo_equals_its_formula() -> None:
    batch = make_pairs()
    log_probs, reference = random_column(batch, 0).requires_grad_(), random_column(batch, 1)
    arguments = batch["pair"], batch.mask, batch.lengths
    found = dpo(log_probs, reference, *arguments, beta=0.3, loss_type="ipo")
    (found.loss * token_weights(batch, "sequence-mean", len(batch))).sum().backward()
    plain = log_probs.detach().clone().requires_grad_()
    ratios = (plain - reference).split(batch.lengths)
    means = torch.stack([row[mask].mean() for row, mask in zip(ratios, batch.split("mask"), strict=True)])
    chosen, rejected = means.view(-1, 2).unbind(1)
    expected = (chosen - rejected - 1 / (2 * 0.3)).square()
    expected.mean().backward()
    torch.testing.assert_close(found.loss, expected[batch["pair"]])
    torch.testing.assert_close(log_probs.grad, plain.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.metrics["reward_margin"], 0.3 * (chosen - rejected)[batch["pair"]].detach())


def test_mistakes_are_named() -> None:
    batch = make_pairs()
    column = torch.zeros(batch.num_tokens)

    def run(batch: Batch, **options: Any) -> None:
        column = torch.zeros(batch.num_tokens)
        dpo(column, column, batch["pair"], batch.mask, batch.lengths, **options)

    with pytest.raises(ValueError, match=r"pairs \[1\] do not have two sequences with tokens in the mask"):
        run(batch.select([0, 1, 2, 4, 5]))
    emptied = Batch(batch.tokens, batch.lengths, batch.mask & (batch["pair"] != 2), batch.fields)
    with pytest.raises(ValueError, match=r"pairs \[2\] do not have two"):
        run(emptied)
    with pytest.raises(ValueError, match=r"beta=0 must be positive"):
        run(batch, beta=0)
    with pytest.raises(ValueError, match=r"label_smoothing=0.5 must lie in \[0, 0.5\)"):
        run(batch, label_smoothing=0.5)
    with pytest.raises(ValueError, match="must be 'sigmoid', or 'ipo' without label_smoothing"):
        run(batch, label_smoothing=0.1, loss_type="ipo")
    with pytest.raises(ValueError, match=r"the sequences have \[3, 1, 1, 4, 2, 2\] tokens in the mask; .*with_ends"):
        bradley_terry(column, batch["pair"], batch.mask, batch.lengths)
    with pytest.raises(ValueError, match="3 prompts, 3 chosen responses, 2 rejected responses; give a chosen"):
        Batch.from_pairs(PROMPTS, CHOSEN, REJECTED[:2])
    with pytest.raises(ValueError, match=r"rejected responses \[1\] are empty"):
        Batch.from_pairs(PROMPTS, CHOSEN, [[1], [], [2]])
