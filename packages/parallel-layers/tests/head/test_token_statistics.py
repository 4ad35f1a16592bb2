"""`linear_token_statistics` against sorted, materialised logits: ranks and the most likely tokens, ties by id."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import linear_log_probs
from parallel_layers.head import SamplingMask, TokenStatistics, chunked, linear_token_statistics
from parallel_layers.head.top_entries import top_of
from parallel_layers.testing import RankPool

IGNORE = -100
TOKENS, HIDDEN, VOCABULARY, N = 24, 8, 51, 5


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, SamplingMask]:
    """Hidden states, head, labels, and a mask whose rows keep all ids, one, none, or some; small integers tie."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN))
    )
    weight[9] = weight[8] = weight[40]
    counts = [VOCABULARY, 1, 0, *(1 + 7 * n % VOCABULARY for n in range(TOKENS - 3))]
    rows = [torch.randperm(VOCABULARY, generator=generator)[:count].tolist() for count in counts]
    labels = torch.tensor([row[0] if row else 5 for row in rows])
    labels[4::5] = IGNORE
    return hidden, weight, labels, SamplingMask.from_rows(rows)


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    top_n: int,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
) -> TokenStatistics:
    logits = hidden.double() @ weight.double().T * logit_scale
    logits = logits if logit_softcap is None else (logits / logit_softcap).tanh() * logit_softcap
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    ignored = labels == IGNORE
    if sampling_mask is not None:
        logits[~sampling_mask.tile(slice(None), slice(0, logits.shape[1]))] = -math.inf
        ignored = ignored | (sampling_mask.counts == 0)
    log_probs = logits.log_softmax(-1)
    ordered = log_probs.sort(dim=-1, descending=True, stable=True)
    nothing = ~(ordered.values > -math.inf)
    picked = labels.clamp(min=0)[:, None]
    ranks = 1 + (ordered.indices == picked).int().argmax(dim=1)
    return TokenStatistics(
        log_probs.gather(1, picked)[:, 0].masked_fill(ignored, 0),
        -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1).nan_to_num(0),
        ranks.masked_fill(ignored, 0),
        ordered.indices.masked_fill(nothing, -1)[:, :top_n],
        ordered.values.masked_fill(nothing, -math.inf)[:, :top_n],
    )


def assert_same(actual: TokenStatistics, expected: TokenStatistics, atol: float) -> None:
    for name, value in expected._asdict().items():
        found = getattr(actual, name)
        torch.testing.assert_close(found.to(value.dtype), value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "temperature": torch.linspace(0.5, 2, TOKENS, dtype=torch.float64),
        "logit_softcap": 4.0,
        "logit_scale": 0.8,
    },
}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("top_n", [1, N, VOCABULARY])
def test_equals_sorted_logits(
    options: dict[str, Any], masked: bool, top_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 150)
    *inputs, mask = problem()
    options = {**options, "sampling_mask": mask if masked else None}
    actual = linear_token_statistics(*inputs, top_n=top_n, **options)
    assert_same(actual, reference(*inputs, top_n, **options), 1e-12)
    scores = linear_log_probs(*inputs, **options)
    torch.testing.assert_close((actual.log_probs, actual.entropy), tuple(scores), rtol=0, atol=0)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 100), tokens=st.integers(0, 6), vocabulary=st.integers(1, 40), top_n=st.integers(1, 40),
    tile=st.integers(1, 200), levels=st.integers(1, 3), infinite=st.floats(0, 0.9),
)  # fmt: skip
def test_any_ties(seed: int, tokens: int, vocabulary: int, top_n: int, tile: int, levels: int, infinite: float) -> None:
    """Few levels of logits, in which most entries tie, and any share of -inf."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(levels, (vocabulary, 1), generator=generator).float()
    weight[torch.rand(vocabulary, generator=generator) < infinite] = -math.inf
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    hidden, top_n = torch.ones(tokens, 1), min(top_n, vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.TILE_ELEMENTS, "cpu", tile)
        actual = linear_token_statistics(hidden, weight, labels, top_n=top_n)
    expected = reference(hidden, weight, labels, top_n)
    if bool((weight > -math.inf).any()):
        assert_same(actual, expected, 1e-5)
    else:  # there is no distribution
        assert (actual.top_ids == -1).all()
        assert actual.log_probs.isnan().all()


def test_16_bit_inputs_give_fp32_results() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(30, 64, generator=generator), torch.randn(500, 64, generator=generator) / 4
    hidden, weight, labels = hidden.bfloat16(), weight.bfloat16(), torch.arange(30)
    actual = linear_token_statistics(hidden, weight, labels, top_n=20)
    assert actual.log_probs.dtype == actual.top_log_probs.dtype == torch.float32
    assert_same(actual, reference(hidden, weight, labels, 20), 3e-6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(linear_token_statistics(hidden.float(), weight.float(), labels, top_n=20), actual)


def test_margin_and_numbers_that_are_no_numbers() -> None:
    weight = torch.tensor([[0.0], [2.0], [0.5], [torch.nan]])
    hidden, labels = torch.ones(3, 1), torch.ones(3, dtype=torch.int64)
    mask = SamplingMask.from_rows([[0, 1, 2], [1], [1, 3]])
    actual = linear_token_statistics(hidden, weight, labels, top_n=2, sampling_mask=mask)
    torch.testing.assert_close(actual.margin[:2], torch.tensor([1.5, math.inf]))
    assert actual.ranks.tolist() == [1, 1, 0]
    assert actual.top_ids[:2].tolist() == [[1, 2], [1, -1]]
    assert actual.log_probs[2].isnan()
    assert actual.top_log_probs[2].isnan().all()


def test_errors() -> None:
    hidden, weight, labels, _ = problem()
    for top_n in (0, VOCABULARY + 1):
        with pytest.raises(ValueError, match=rf"top_n={top_n} must be in 1..51"):
            linear_token_statistics(hidden, weight, labels, top_n=top_n)
    with pytest.raises(ValueError, match="label 51 at index"):
        linear_token_statistics(hidden, weight, labels.masked_fill(labels == IGNORE, VOCABULARY))


def on_ranks(group: ProcessGroup, sequence_parallel: bool, top_n: int, masked: bool) -> TokenStatistics:
    """This rank's results: its rows of a padded head, and with sequence parallelism its hidden states."""
    hidden, weight, labels, mask = problem()
    size, rank = group.size(), group.rank()
    padded = torch.cat([weight, weight.new_full((-VOCABULARY % size, HIDDEN), 7.0)])
    return linear_token_statistics(
        hidden.chunk(size)[rank] if sequence_parallel else hidden,
        padded.chunk(size)[rank], labels, top_n=top_n, group=group, vocab_size=VOCABULARY,
        sequence_parallel=sequence_parallel, sampling_mask=mask if masked else None, **OPTIONS["everything"],
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("world", "sequence_parallel", "top_n"), [(2, False, N), (4, True, 20)])
def test_sharded(ranks: RankPool, world: int, sequence_parallel: bool, top_n: int, masked: bool) -> None:
    """More entries than a rank of four holds, ties between ranks, and padding with large logits."""
    *inputs, mask = problem()
    expected = reference(*inputs, top_n, sampling_mask=mask if masked else None, **OPTIONS["everything"])
    for actual in ranks.run(on_ranks, sequence_parallel, top_n, masked, world=world):
        assert_same(actual, expected, 1e-12)


def test_top_of_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3, 3, 3, 2], [-math.inf, 0, -math.inf, 0, 0], [-math.inf] * 5])
    top = top_of(logits, 2)
    assert top.ids.tolist() == [[1, 2], [1, 3], [-1, -1]]
    assert top.logits.tolist() == [[3, 3], [0, 0], [-math.inf, -math.inf]]
