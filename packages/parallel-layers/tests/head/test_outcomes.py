"""`linear_distillation` from listed and from sampled tokens, against materialised distributions."""

import math

import pytest
import torch
from dense_divergences import KINDS, assert_same, dense_divergence, kl, materialised_log_probs, problem, results
from torch import Tensor

from parallel_layers.head import TeacherSamples, TeacherTopK, chunked, linear_distillation


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 150)


def outcomes(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the listed tokens and of all others together."""
    listed = log_probs.gather(-1, ids)
    rest = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat((listed, rest), dim=-1)


@pytest.mark.parametrize("name", KINDS)
def test_listed_tokens_and_the_tail(name: str) -> None:
    hidden, weight, teacher_hidden, teacher_weight, upstream = problem(23, 41)
    options = {"temperature": torch.linspace(0.5, 2.0, 23), "logit_softcap": 3.0}
    log_probs, ids = materialised_log_probs(teacher_hidden, teacher_weight).topk(5)
    # Rows may list fewer tokens: the first three rows list the two most likely ones.
    listed = ids.clone()
    listed[:3, 2:] = -1

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        teacher = TeacherTopK(listed, log_probs.masked_fill(listed < 0, math.nan))
        padded = torch.nn.functional.pad(weight, (0, 0, 0, 5))
        return linear_distillation(hidden, padded, teacher, divergence=name, vocab_size=41, **KINDS[name], **options)

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p, log_q = materialised_log_probs(teacher_hidden, teacher_weight), materialised_log_probs(
            hidden, weight, **options
        )  # fmt: skip
        rows = [
            dense_divergence(outcomes(log_p[t], row[row >= 0]), outcomes(log_q[t], row[row >= 0]), name, **KINDS[name])
            for t, row in enumerate(listed)
        ]
        return torch.stack(rows)

    assert_same(results(ours, hidden, weight, upstream), results(dense, hidden, weight, upstream))


@pytest.mark.parametrize("name", KINDS)
def test_listed_tokens_that_have_all_the_mass_leave_the_tail_its_epsilon(name: str) -> None:
    """Their rounded probabilities may sum up to more than 1; no divergence is infinite or NaN."""
    hidden, weight, _, _, upstream = problem(23, 41)
    ids, log_probs = torch.arange(4).expand(23, -1), torch.linspace(-1e-3, 1e-3, 23)[:, None] - math.log(4)
    log_probs = log_probs.expand(-1, 4).clone()
    tail = (1 - log_probs.to(hidden.dtype).exp().sum(1, keepdim=True)).clamp(min=torch.finfo(hidden.dtype).eps).log()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_distillation(hidden, weight, TeacherTopK(ids, log_probs), divergence=name, **KINDS[name])

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        log_q = outcomes(materialised_log_probs(hidden, weight), ids)
        return dense_divergence(torch.cat((log_probs, tail), 1), log_q, name, **KINDS[name])

    assert_same(results(ours, hidden, weight, upstream), results(dense, hidden, weight, upstream))


def test_gradient_of_samples_has_the_expectation_of_the_reverse_kl() -> None:
    """The expectation over every token that the student can draw, by its probability: value and gradient."""
    hidden, weight, teacher_hidden, teacher_weight, _ = problem(1, 41)
    log_p = materialised_log_probs(teacher_hidden, teacher_weight)[0]
    q = materialised_log_probs(hidden, weight)[0].exp()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        teacher = TeacherSamples(torch.arange(41), log_p)
        each = linear_distillation(hidden.expand(41, -1), weight, teacher, divergence="reverse_kl")
        return (q * each).sum()[None]

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        return kl(materialised_log_probs(hidden, weight)[0], log_p)[None]

    ones = torch.ones(1)
    assert_same(results(ours, hidden, weight, ones), results(dense, hidden, weight, ones))


def test_tokens_without_a_label_give_nothing() -> None:
    hidden, weight, *_ = problem(3, 41)
    teacher = TeacherSamples(torch.tensor([-100, 4, -100]), torch.tensor([math.nan, -2.0, -1.0]))
    value, grad_hidden, _ = results(
        lambda h, w: linear_distillation(h, w, teacher, divergence="reverse_kl"), hidden, weight, torch.ones(3)
    )
    assert value[0] == value[2] == 0
    assert grad_hidden.abs().sum(dim=1).bool().tolist() == [False, True, False]
