"""Sampling masks: their rows, and log-probs over them, against materialised logits of the kept tokens."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import invariant, linear_log_probs
from parallel_layers.head import SamplingMask, chunked
from parallel_layers.testing import RankPool

IGNORE = -100
TOKENS, HIDDEN, VOCABULARY = 36, 16, 51


class Problem(NamedTuple):
    """Hidden states, head, labels, the rows of the mask with their label, and upstream gradients `[2, T]`.

    Rows keep all tokens, one token, or none; every fifth row has no label.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    rows: list[list[int]]
    upstream: Tensor

    @classmethod
    def random(cls, dtype: torch.dtype = torch.float64) -> Problem:
        generator = torch.Generator().manual_seed(0)
        counts = [VOCABULARY, 1, 0, *(1 + 7 * n % VOCABULARY for n in range(TOKENS - 3))]
        rows = [torch.randperm(VOCABULARY, generator=generator)[:count].tolist() for count in counts]
        labels = torch.tensor([row[0] if row else 5 for row in rows])
        labels[4::5] = IGNORE
        return cls(
            torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
            (torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) / 2).to(dtype),
            labels,
            rows,
            torch.randn(2, TOKENS, generator=generator, dtype=torch.float64),
        )


def results(problem: Problem, **options: Any) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and head."""
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    scores = linear_log_probs(
        hidden, weight, problem.labels, sampling_mask=SamplingMask.from_rows(problem.rows), **options
    )
    gradients = torch.autograd.grad(scores, (hidden, weight), [x.to(scores[0].dtype) for x in problem.upstream])
    return [*(x.detach() for x in scores), *gradients]  # type: ignore[union-attr]


def reference(
    problem: Problem,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    **_: Any,
) -> list[Tensor]:
    hidden, weight = (x.double().requires_grad_() for x in problem[:2])
    logits = hidden @ weight.T * logit_scale
    logits = logits if logit_softcap is None else (logits / logit_softcap).tanh() * logit_softcap
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_probs, entropies = [], []
    for logit_row, label, ids in zip(logits, problem.labels.tolist(), problem.rows, strict=True):
        kept = logit_row[ids].log_softmax(0)
        log_probs.append(kept[ids.index(label)] if ids and label != IGNORE else kept.sum() * 0)
        entropies.append(-(kept.exp() * kept).sum())
    scores = torch.stack(log_probs), torch.stack(entropies)
    return [*(x.detach() for x in scores), *torch.autograd.grad(scores, (hidden, weight), tuple(problem.upstream))]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "temperature": torch.linspace(0.5, 2, TOKENS, dtype=torch.float64),
        "logit_softcap": 4.0,
        "logit_scale": 0.8,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_materialised_logits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 250)
    actual = results(Problem.random(), **options)
    torch.testing.assert_close(actual, reference(Problem.random(), **options), rtol=0, atol=1e-12)
    assert actual[0][2] == actual[1][2] == 0
    assert not actual[2][2].any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_16_bit_inputs_give_fp32_results(options: dict[str, Any]) -> None:
    problem = Problem.random(torch.bfloat16)
    actual, expected = results(problem, **options), reference(problem, **options)
    torch.testing.assert_close([x.double() for x in actual[:2]], expected[:2], rtol=0, atol=2e-6)
    torch.testing.assert_close([x.double() for x in actual[2:]], expected[2:], rtol=1e-2, atol=1e-3)


def test_gradients_in_double_precision() -> None:
    problem = Problem.random()
    mask = SamplingMask.from_rows(problem.rows[:6])

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return linear_log_probs(hidden, weight, problem.labels[:6], sampling_mask=mask, logit_softcap=3.0)  # type: ignore[return-value]

    inputs = problem.hidden[:6, :3].clone().requires_grad_(), problem.weight[:, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(scores, inputs, fast_mode=True)


@given(st.integers(0, 100), st.integers(1, 60), st.floats(0.1, 3))
def test_any_rows(seed: int, most: int, temperature: float) -> None:
    """Rows with repeated ids and ties between equal rows of the head; a mask of everything changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(5, 4, generator=generator), torch.randn(30, 4, generator=generator)
    weight[7] = weight[3]
    rows = [torch.randint(30, (most,), generator=generator).tolist() for _ in range(5)]
    labels = torch.tensor([row[-1] for row in rows])
    problem = Problem(hidden, weight, labels, rows, torch.zeros(2, 5, dtype=torch.float64))
    expected = reference(problem._replace(rows=[sorted(set(row)) for row in rows]), temperature=temperature)
    actual = results(problem, temperature=temperature)
    torch.testing.assert_close([x.double() for x in actual[:2]], expected[:2], rtol=0, atol=1e-5)
    everything = linear_log_probs(hidden, weight, labels, sampling_mask=SamplingMask.from_rows([range(30)] * 5))
    torch.testing.assert_close(everything, linear_log_probs(hidden, weight, labels), rtol=0, atol=0)


def test_logits_that_are_infinite_or_no_numbers() -> None:
    """A kept -inf has no weight; what the mask drops has no effect; a kept NaN gives NaN."""
    weight = torch.tensor([[0.0], [1.0], [-torch.inf], [torch.nan]])
    hidden, labels = torch.ones(3, 1), torch.ones(3, dtype=torch.int64)
    mask = SamplingMask.from_rows([[0, 1], [0, 1, 2], [1, 3]])
    scores = linear_log_probs(hidden, weight, labels, sampling_mask=mask)
    expected = torch.tensor([0.0, 1.0]).log_softmax(0)
    torch.testing.assert_close(scores.log_probs[:2], expected[1].expand(2))
    torch.testing.assert_close(
        scores.entropy, torch.tensor([*[-(expected.exp() * expected).sum()] * 2, torch.nan]), equal_nan=True
    )
    assert scores.log_probs[2].isnan()


def on_ranks(group: ProcessGroup, sequence_parallel: bool) -> list[Tensor]:
    """This rank's results: its rows of a padded head, and with sequence parallelism its hidden states."""
    problem, rank, size = Problem.random(), group.rank(), group.size()
    padded = torch.cat([problem.weight, problem.weight.new_full((-VOCABULARY % size, HIDDEN), 7.0)])
    hidden = problem.hidden.chunk(size)[rank] if sequence_parallel else problem.hidden
    sharded = problem._replace(hidden=hidden, weight=padded.chunk(size)[rank])
    return results(
        sharded, group=group, vocab_size=VOCABULARY, sequence_parallel=sequence_parallel, **OPTIONS["everything"]
    )


@pytest.mark.parametrize(("world", "sequence_parallel"), [(2, False), (4, True)])
def test_sharded(ranks: RankPool, world: int, sequence_parallel: bool) -> None:
    per_rank = ranks.run(on_ranks, sequence_parallel, world=world)
    expected = reference(Problem.random(), **OPTIONS["everything"])
    weight = torch.cat([result[3] for result in per_rank])
    assert not weight[VOCABULARY:].any()
    hidden = torch.cat([result[2] for result in per_rank]) if sequence_parallel else per_rank[0][2]
    for result in per_rank:
        actual = [*result[:2], hidden, weight[:VOCABULARY]]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def invariant_scores(group: ProcessGroup | None, tokens: slice) -> list[Tensor]:
    problem, size = Problem.random(torch.bfloat16), 1 if group is None else group.size()
    padded = torch.cat([problem.weight, problem.weight.new_zeros(-VOCABULARY % size, HIDDEN)])
    mask = SamplingMask.from_rows(problem.rows)[tokens]
    return list(
        invariant.linear_log_probs(
            problem.hidden[tokens], padded.chunk(size)[0 if group is None else group.rank()], problem.labels[tokens],
            sampling_mask=mask, group=group, vocab_size=VOCABULARY, temperature=0.7, logit_softcap=4.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_invariant_bits(ranks: RankPool, world: int) -> None:
    """The bits at tp 1, 2 and 4, and in a pack of its own, are those of one rank."""
    expected = invariant_scores(None, slice(None))
    torch.testing.assert_close(
        [x.double() for x in expected],
        reference(Problem.random(torch.bfloat16), temperature=0.7, logit_softcap=4.0)[:2],
        rtol=0,
        atol=2e-6,
    )
    for actual in [*ranks.run(invariant_scores, slice(None), world=world), invariant_scores(None, slice(None))]:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    apart = invariant_scores(None, slice(3, 11))
    torch.testing.assert_close(apart, [x[3:11] for x in expected], rtol=0, atol=0)


def test_rows_are_selected_split_padded_and_concatenated() -> None:
    rows = [[3, 1], [], [7], [2, 4, 6]]
    mask = SamplingMask.from_rows(rows)
    assert (len(mask), mask.tolist(), mask.counts.tolist()) == (4, rows, [2, 0, 1, 3])
    assert mask[1:3].tolist() == rows[1:3]
    assert mask[torch.tensor([3, -1, 0, 3])].tolist() == [rows[3], [], rows[0], rows[3]]
    assert mask[torch.tensor([True, False, False, True])].tolist() == [rows[0], rows[3]]
    assert [part.tolist() for part in mask.split([0, 3, 1])] == [[], rows[:3], rows[3:]]
    assert mask.pad(6).tolist() == [*rows, [], []]
    assert SamplingMask.concatenate([mask, mask[:0], mask[2:]]).tolist() == rows + rows[2:]
    bits = torch.tensor([[0b1010, 0], [0, 0], [128, 0], [0b1010100, 1]], dtype=torch.uint8)
    assert SamplingMask.from_bits(bits).tolist() == [[1, 3], [], [7], [2, 4, 6, 8]]
    empty = SamplingMask.from_rows([])
    assert (empty.tolist(), empty[torch.tensor([-1, -1])].tolist()) == ([], [[], []])


def test_mistakes_are_refused() -> None:
    problem = Problem.random()
    mask = SamplingMask.from_rows(problem.rows)
    mistakes = {
        "has 35 rows on cpu; give one for each of the 36 labels": mask[1:],
        "lacks the labels of 1 rows, and has 0 ids .* row 1 with label": SamplingMask.from_rows(
            [problem.rows[0], [(problem.rows[1][0] + 1) % VOCABULARY], *problem.rows[2:]]
        ),
        "lacks the labels of 0 rows, and has 2 ids outside 0..50, such as row 35": SamplingMask.from_rows(
            [*problem.rows[:-1], [*problem.rows[-1], VOCABULARY, -1]]
        ),
    }
    for message, wrong in mistakes.items():
        with pytest.raises(ValueError, match=message):
            linear_log_probs(*problem[:3], sampling_mask=wrong)
    ids, offsets = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 2, 3])
    for message, arguments in {
        "ids must be one row of torch.int32, got [3] torch.int64": (ids.long(), offsets),
        "offsets must be one row of torch.int64, got [1, 3]": (ids, offsets[None]),
        "0 offsets on cpu": (ids, offsets[:0]),
        "offsets go from 0 to 2": (ids, offsets[:2]),
        "offsets go from 0 to 3; they must rise": (ids, torch.tensor([0, 4, 3])),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            SamplingMask(*arguments)
