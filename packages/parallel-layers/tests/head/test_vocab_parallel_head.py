"""`VocabParallelHead` against torch on one rank, and what a sharded vocabulary refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import VocabParallelHead, linear_log_probs
from parallel_layers.head.log_probs import vocab_parallel_log_probs
from parallel_layers.invariant import linear_log_probs as invariant_log_probs
from parallel_layers.module.sharding import blocks_of, load_full_
from parallel_layers.testing import RankPool

VOCAB, HIDDEN, TOKENS, CAP = 7, 8, 6, 2.0


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (TOKENS, VOCAB))
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), generator=generator)


def _head(group: ProcessGroup | None, sp: bool, tied: bool) -> dict[str, Tensor]:
    """Log-probs and both gradients, the weight's laid into NaN where this rank holds no row."""
    hidden, full, labels = problem()
    if sp and group is not None:
        hidden = hidden.chunk(group.size())[group.rank()].clone()
    hidden.requires_grad_()
    options = {"group": group, "sequence_parallel": sp, "logit_softcap": CAP}
    owner = VocabParallelHead(HIDDEN, VOCAB, **options)  # type: ignore[arg-type]
    load_full_(owner, {"weight": full})
    assert owner.weight is not None
    head = VocabParallelHead(HIDDEN, VOCAB, allocate_weight=False, **options) if tied else owner  # type: ignore[arg-type]
    given = (owner.weight,) if tied else ()
    out = head(hidden, labels, *given)
    out.log_probs.sum().backward()
    gradient = torch.full_like(full, torch.nan)
    for local, where in blocks_of(owner, "weight"):
        gradient[where] = owner.weight.grad[local]  # type: ignore[index]
    return {"log_probs": out.log_probs.detach(), "hidden": hidden.grad, "weight": gradient}  # type: ignore[dict-item]


@pytest.mark.parametrize(("sp", "tied"), [(False, False), (True, False), (True, True)])
def test_a_vocabulary_that_the_ranks_do_not_divide(ranks: RankPool, sp: bool, tied: bool) -> None:
    hidden, weight, labels = (x.requires_grad_() if x.is_floating_point() else x for x in problem())
    logits = CAP * torch.tanh(hidden @ weight.T / CAP)
    expected = -F.cross_entropy(logits, labels, reduction="none")
    expected.sum().backward()
    results = ranks.run(_head, sp, tied, world=2)
    gradient = torch.cat([each["hidden"] for each in results]) if sp else results[0]["hidden"]
    torch.testing.assert_close(gradient, hidden.grad)
    torch.testing.assert_close(torch.stack([r["weight"] for r in results]).nansum(0), weight.grad)
    for each in results:
        torch.testing.assert_close(each["log_probs"], expected.detach())


def _values(group: ProcessGroup, labels: int, sp: bool, invariant: bool) -> tuple[Tensor, ...]:
    """The values, and the gradients of the states, the weight and the bias."""
    hidden, full, _ = problem()
    dtype = torch.float32 if invariant else torch.float64
    hidden, target = hidden.to(dtype), torch.linspace(-1, 1, TOKENS * labels).view(TOKENS, labels)
    if sp:
        hidden = hidden.chunk(group.size())[group.rank()].clone()
    hidden.requires_grad_()
    head = VocabParallelHead(HIDDEN, labels, group=group, sequence_parallel=sp, bias=True, replicated=True)
    head.to(dtype)
    with torch.no_grad():
        head.weight.copy_(full[:labels])
        head.bias.copy_(torch.arange(labels))
    values = head.values(hidden, tp_invariant=invariant)
    (values * target).square().sum().backward()
    return values.detach(), hidden.grad, head.weight.grad, head.bias.grad  # type: ignore[return-value]


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(("sp", "invariant"), [(False, False), (True, False), (True, True)])
def test_values_of_a_replicated_head(ranks: RankPool, labels: int, sp: bool, invariant: bool) -> None:
    hidden, full, _ = problem()
    hidden, weight = hidden.double().requires_grad_(), full[:labels].double().requires_grad_()
    bias = torch.arange(labels, dtype=torch.float64).requires_grad_()
    expected = F.linear(hidden, weight, bias)
    target = torch.linspace(-1, 1, TOKENS * labels).view(TOKENS, labels)
    (expected * target).square().sum().backward()
    results = ranks.run(_values, labels, sp, invariant, world=2)
    gradient = torch.cat([each[1] for each in results]) if sp else results[0][1]
    torch.testing.assert_close(gradient, hidden.grad.to(gradient.dtype))  # type: ignore[union-attr]
    for values, _, of_weight, of_bias in results:
        for actual, wanted in ((values, expected.detach()), (of_weight, weight.grad), (of_bias, bias.grad)):
            assert wanted is not None
            torch.testing.assert_close(actual, wanted.to(actual.dtype))


def test_errors_of_the_head() -> None:
    hidden, _, labels = problem()
    head = VocabParallelHead(HIDDEN, VOCAB, allocate_weight=False)
    assert head.state_dict() == {}
    with pytest.raises(ValueError, match=r"call head\(hidden, labels, weight\)"):
        head(hidden, labels)
    with pytest.raises(ValueError, match=r"weight has shape \[9, 8\], but each rank's part of 7 entries is \[7, 8\]"):
        head(hidden, labels, torch.zeros(9, HIDDEN))
    with pytest.raises(ValueError, match="build the head with replicated=True"):
        VocabParallelHead(HIDDEN, VOCAB).values(hidden)
    with pytest.raises(ValueError, match="bias=True needs replicated=True"):
        VocabParallelHead(HIDDEN, VOCAB, bias=True)


def _on_hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rows, labels, **options: function(
        torch.zeros(TOKENS, HIDDEN), torch.zeros(rows, HIDDEN), labels, **options
    )


FUNCTIONS = {
    "linear_log_probs": _on_hidden(linear_log_probs),
    "invariant.linear_log_probs": _on_hidden(invariant_log_probs),
    "vocab_parallel_log_probs": lambda rows, labels, **options: vocab_parallel_log_probs(
        torch.zeros(TOKENS, rows), labels, **options
    ),
}


def _refusals(group: ProcessGroup, name: str) -> list[str]:
    """Return the errors without a vocabulary's size, with unequal rows, with unequal sizes and with too few rows."""
    call, labels = FUNCTIONS[name], torch.zeros(TOKENS, dtype=torch.int64)
    # Sizes of this test alone: the ranks compare each pair of numbers once.
    wrong = [(501, None), (501 - group.rank(), 1001), (501, 1001 + group.rank()), (501, 1003)]
    messages = []
    for rows, vocab_size in wrong:
        with pytest.raises(ValueError, match="vocab_size") as error:
            call(rows, labels, group=group, vocab_size=vocab_size)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_ranks_cannot_know_is_refused_on_each_alike(ranks: RankPool, name: str) -> None:
    first, second = ranks.run(_refusals, name, world=2, timeout=30)
    assert first == second
    left_out, rows, sizes, few = first
    assert (
        "2 ranks of 501 rows each may hold a vocabulary of 1001 to 1002 entries and padding; pass vocab_size"
        in left_out
    )
    assert "rank 0: 501 rows, vocab_size=1001; rank 1: 500 rows, vocab_size=1001" in rows
    assert "rank 0: 501 rows, vocab_size=1001; rank 1: 501 rows, vocab_size=1002" in sizes
    assert "vocab_size=1003 must be in 1..1002" in few
