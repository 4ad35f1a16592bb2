"""`linear_distillation` against distributions of materialised logits: values, every gradient, limits, errors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_divergences import KINDS, assert_same, dense_divergence, materialised_log_probs, problem, results
from hypothesis import assume, example, given, settings, strategies as st
from torch import Tensor

from parallel_layers.head import TeacherHead, TeacherSamples, TeacherTopK, chunked, linear_distillation
from parallel_layers.training import sum_in_place_


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that divide neither the tokens nor the vocabulary of the tests."""
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 150)
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cuda", 1 << 16)


TRANSFORMS = {
    "plain": ({}, {}),
    "temperatures": ({"temperature": 0.7}, {"temperature": torch.linspace(0.5, 2.0, 23)}),
    "everything": (
        {"temperature": torch.linspace(0.5, 2.0, 23), "logit_softcap": 3.0, "logit_scale": 0.8},
        {"temperature": 1.4, "logit_softcap": 4.0, "logit_scale": 1.3},
    ),
}


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("name", KINDS)
def test_equals_materialised_distributions(name: str, transforms: tuple[dict[str, Any], dict[str, Any]]) -> None:
    hidden, weight, teacher_hidden, teacher_weight, upstream = problem(23, 41)
    student_options, teacher_options = transforms
    log_p = materialised_log_probs(teacher_hidden, teacher_weight, **teacher_options)
    teacher = TeacherHead(teacher_hidden, teacher_weight, **teacher_options)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_distillation(hidden, weight, teacher, divergence=name, **KINDS[name], **student_options)

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        return dense_divergence(log_p, materialised_log_probs(hidden, weight, **student_options), name, **KINDS[name])

    assert_same(results(ours, hidden, weight, upstream), results(dense, hidden, weight, upstream))


@settings(max_examples=40, deadline=None)
@example(1, 2, (2, 4), 1, "reverse_kl", 0.5, (1.0, 0.375), (None, None), 6)
@given(
    num_tokens=st.integers(0, 12),
    vocab_size=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    tile=st.integers(1, 300),
    name=st.sampled_from(list(KINDS)),
    mixture=st.floats(1e-4, 1 - 1e-4),
    temperatures=st.tuples(st.floats(0.3, 3.0), st.floats(0.3, 3.0)),
    softcaps=st.tuples(*[st.none() | st.floats(1.0, 9.0)] * 2),
    seed=st.integers(0, 10),
)
def test_any_shape_tile_and_transform(
    num_tokens: int,
    vocab_size: int,
    sizes: tuple[int, int],
    tile: int,
    name: str,
    mixture: float,
    temperatures: tuple[float, float],
    softcaps: tuple[float | None, float | None],
    seed: int,
) -> None:
    """Each example also lists half of the tokens: the divergence of listed tokens is a lower bound."""
    hidden, weight, teacher_hidden, teacher_weight, upstream = problem(num_tokens, vocab_size, *sizes, seed=seed)
    sides = [
        dict(zip(("temperature", "logit_softcap"), pair, strict=True))
        for pair in zip(temperatures, softcaps, strict=True)
    ]
    kind = {"mixture": mixture} if KINDS[name] else {}
    log_p = materialised_log_probs(teacher_hidden, teacher_weight, **sides[1])

    def ours(teacher: TeacherHead | TeacherTopK) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda h, w: linear_distillation(h, w, teacher, divergence=name, **kind, **sides[0])

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        return dense_divergence(log_p, materialised_log_probs(hidden, weight, **sides[0]), name, **kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.TILE_ELEMENTS, "cpu", tile)
        actual = results(ours(TeacherHead(teacher_hidden, teacher_weight, **sides[1])), hidden, weight, upstream)
        assert_same(actual, results(dense, hidden, weight, upstream), 1e-10)
        assume(vocab_size > 1)
        log_probs, ids = log_p.topk((vocab_size + 1) // 2)
        bound = ours(TeacherTopK(ids, log_probs))(hidden, weight)
    # The mass of the tail is what the listed tokens leave of 1, whose rounding is relative to the tail.
    rounding = 1e-12 + 4 * torch.finfo(log_p.dtype).eps / log_p.exp().scatter(-1, ids, 0.0).sum(-1)
    assert ((bound <= actual[0] + rounding) & (bound >= -rounding)).all()


# `test_any_shape_tile_and_transform` compares the gradients of all kinds in every run.
IN_EVERY_RUN = {"forward_kl", "jensen_shannon"}


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_gradcheck(name: str) -> None:
    hidden, weight, teacher_hidden, teacher_weight, _ = problem(4, 11)
    log_probs, ids = materialised_log_probs(teacher_hidden, teacher_weight).topk(3)
    for teacher in (TeacherHead(teacher_hidden, teacher_weight), TeacherTopK(ids, log_probs)):

        def divergence(hidden: Tensor, weight: Tensor, teacher: TeacherHead | TeacherTopK = teacher) -> Tensor:
            return linear_distillation(
                hidden, weight, teacher, divergence=name, **KINDS[name], logit_softcap=5.0, temperature=0.8
            )

        assert torch.autograd.gradcheck(divergence, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", KINDS)
def test_half_precision_gives_fp32_of_the_exact_inputs(name: str, device: str) -> None:
    """Both sides in bf16; the truth is fp64 of the same numbers. Gradients are rounded once, on a GPU twice."""
    tensors = problem(*((64, 300, 32, 48) if device == "cpu" else (640, 3000, 64, 96)), dtype=torch.bfloat16)
    hidden, weight, teacher_hidden, teacher_weight, upstream = (x.mul(0.3).to(device) for x in tensors)
    log_p = materialised_log_probs(teacher_hidden.double(), teacher_weight.double())

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_distillation(
            hidden, weight, TeacherHead(teacher_hidden, teacher_weight), divergence=name, **KINDS[name]
        )

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        return dense_divergence(log_p, materialised_log_probs(hidden, weight), name, **KINDS[name])

    value, *gradients = results(ours, hidden, weight, upstream)
    truth, *true_gradients = results(dense, hidden.double(), weight.double(), upstream)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), truth, rtol=0, atol=3e-6)
    for actual, exact in zip(gradients, true_gradients, strict=True):
        assert actual.dtype == torch.bfloat16
        if device == "cpu":
            torch.testing.assert_close(actual, exact.bfloat16(), rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-5)
        else:  # the gradient of the logits is an operand in bf16
            assert (actual.double() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_equal_torch_on_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """With soft-caps and temperatures a token, and a token tile that does not divide the tokens."""
    hidden, weight, teacher_hidden, teacher_weight, upstream = (x.to("cuda", dtype) for x in problem(900, 700))
    sides = [
        {"temperature": torch.linspace(0.5, 2, 900, device="cuda"), "logit_softcap": 5.0, "logit_scale": 0.7},
        {"temperature": 1.3, "logit_softcap": 6.0},
    ]

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        teacher = TeacherHead(teacher_hidden.to(hidden.dtype), teacher_weight.to(hidden.dtype), **sides[1])
        return linear_distillation(hidden, weight, teacher, divergence=name, **KINDS[name], **sides[0])

    actual = results(ours, hidden, weight, upstream)
    # fp64 takes the functions in torch.
    assert_same(
        actual, results(ours, hidden.double(), weight.double(), upstream), 3e-5 if dtype.itemsize == 4 else 2e-3
    )


@pytest.mark.parametrize("name", KINDS)
def test_equal_distributions_have_no_divergence(name: str) -> None:
    """Also where all logits tie, and a shift of all logits changes nothing."""
    hidden, weight, *_ = problem(7, 41, dtype=torch.float32)
    hidden[2] = 0.0
    teacher = TeacherHead(torch.cat((hidden, torch.ones(7, 1)), 1), torch.cat((weight, torch.full((41, 1), 9.0)), 1))
    value, *gradients = results(
        lambda h, w: linear_distillation(h, w, teacher, divergence=name, **KINDS[name]), hidden, weight, torch.ones(7)
    )
    assert_same([value, *gradients], [torch.zeros_like(x) for x in (value, *gradients)], 3e-6)


@pytest.mark.parametrize("name", KINDS)
def test_entries_of_probability_zero(name: str) -> None:
    """Logits of -inf: in both sides harmless; in one side, the divergence is what its definition says."""
    hidden, weight, teacher_hidden, teacher_weight, _ = problem(5, 41)
    for side in (hidden, teacher_hidden):
        side[:, 0] = 1.0

    def value(teacher_entries: list[int], student_entries: list[int]) -> Tensor:
        q_rows, p_rows = weight.clone(), teacher_weight.clone()
        q_rows[student_entries, 0] = p_rows[teacher_entries, 0] = -math.inf
        return linear_distillation(hidden, q_rows, TeacherHead(teacher_hidden, p_rows), divergence=name, **KINDS[name])

    kept = [j for j in range(41) if j not in (0, 3, 40)]
    expected = linear_distillation(
        hidden, weight[kept], TeacherHead(teacher_hidden, teacher_weight[kept]), divergence=name, **KINDS[name]
    )
    torch.testing.assert_close(value([0, 3, 40], [0, 3, 40]), expected, rtol=0, atol=1e-12)
    assert value([], [3]).isinf().all() == (name == "forward_kl")
    assert value([3], []).isinf().all() == (name == "reverse_kl")
    assert not torch.stack((value([], [3]), value([3], []))).isnan().any()


def test_a_nan_stays_in_its_token() -> None:
    hidden, weight, teacher_hidden, teacher_weight, _ = problem(5, 41)
    teacher_hidden[2, 0] = math.nan
    for name, kind in KINDS.items():
        value, grad_hidden, _ = results(
            lambda h, w, name=name, kind=kind: linear_distillation(
                h, w, TeacherHead(teacher_hidden, teacher_weight), divergence=name, **kind
            ),
            hidden,
            weight,
            torch.ones(5),
        )
        assert value.isnan().tolist() == [False, False, True, False, False]
        assert grad_hidden.isnan().any(dim=1).tolist() == [False, False, True, False, False]


def test_large_logits_stay_finite() -> None:
    hidden, weight, teacher_hidden, teacher_weight, upstream = (x.float() for x in problem(9, 41))
    teacher = TeacherHead(teacher_hidden * 300, teacher_weight)
    log_p = materialised_log_probs(teacher.hidden.double(), teacher_weight.double())
    for name, kind in KINDS.items():
        actual = results(
            lambda h, w, name=name, kind=kind: linear_distillation(h, w, teacher, divergence=name, **kind),
            hidden * 200,
            weight,
            upstream,
        )
        expected = results(
            lambda h, w, name=name, kind=kind: dense_divergence(
                log_p, materialised_log_probs(h, w).clamp(min=-1e4), name, **kind
            ),
            hidden.double() * 200,
            weight.double(),
            upstream,
        )
        assert all(x.isfinite().all() for x in actual)
        if not kind:  # the dense mixture underflows
            assert_same(actual[:1], expected[:1], 1e-5)


def test_a_map_of_ids_conditions_both_sides_on_the_shared_tokens() -> None:
    hidden, weight, teacher_hidden, teacher_weight, upstream = problem(23, 41)
    teacher_weight = torch.cat((teacher_weight, teacher_weight.flip(0)[:9] * 0.5))
    ids = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:41]
    ids[[0, 7, 40]] = -1
    shared = ids >= 0
    log_p = materialised_log_probs(teacher_hidden, teacher_weight[ids[shared]])
    for name, kind in KINDS.items():

        def ours(hidden: Tensor, weight: Tensor, name: str = name, kind: dict[str, float] = kind) -> Tensor:
            teacher = TeacherHead(teacher_hidden, teacher_weight, ids=ids)
            return linear_distillation(hidden, weight, teacher, divergence=name, **kind)

        def dense(hidden: Tensor, weight: Tensor, name: str = name, kind: dict[str, float] = kind) -> Tensor:
            return dense_divergence(log_p, materialised_log_probs(hidden, weight[shared]), name, **kind)

        assert_same(results(ours, hidden, weight, upstream), results(dense, hidden, weight, upstream))


def test_frozen_inputs_sums_in_place_and_padding() -> None:
    hidden, weight, teacher_hidden, teacher_weight, upstream = problem(23, 41)
    teacher = TeacherHead(teacher_hidden, torch.cat((teacher_weight, teacher_weight[:3] + 7)), vocab_size=41)
    padded = torch.nn.Parameter(torch.cat((weight, weight[:7] * 9)))
    sum_in_place_([padded])
    padded.grad = torch.ones_like(padded)
    linear_distillation(hidden, padded, teacher, vocab_size=41).backward(upstream)
    plain = replace(teacher, weight=teacher_weight)
    expected = results(lambda h, w: linear_distillation(h, w, plain), hidden, weight, upstream)
    assert hidden.grad is None
    assert torch.equal(padded.grad[41:], torch.ones(7, 6))
    assert_same([padded.grad[:41] - 1], expected[2:])


def test_autocast_rounds_the_operands() -> None:
    hidden, weight, teacher_hidden, teacher_weight, upstream = (x.float() for x in problem(9, 41))
    teacher = TeacherHead(teacher_hidden, teacher_weight)
    rounded = TeacherHead(teacher_hidden.bfloat16(), teacher_weight.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = results(lambda h, w: linear_distillation(h, w, teacher), hidden, weight, upstream)
    expected = results(lambda h, w: linear_distillation(h.bfloat16(), w.bfloat16(), rounded), hidden, weight, upstream)
    for value, truth in zip(actual, expected, strict=True):
        assert torch.equal(value, truth)


def test_largest_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 1 << 18)
    num_tokens, vocab_size = 256, 20_000
    hidden, weight, teacher_hidden, teacher_weight, _ = problem(num_tokens, vocab_size, 16, 16, dtype=torch.float32)
    log_probs, ids = torch.full((num_tokens, 4), -2.0), torch.arange(4).expand(num_tokens, -1)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for teacher in (TeacherHead(teacher_hidden, teacher_weight), TeacherTopK(ids, log_probs)):
            linear_distillation(hidden, weight, teacher, divergence="jensen_shannon", mixture=0.5).sum().backward()
    allocations = [event.self_cpu_memory_usage for event in profile.events()]
    assert 4 * weight.numel() <= max(allocations) <= 4 * max(1 << 18, weight.numel())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reverse_kl", "jensen_shannon"])
def test_compiles_without_a_graph_break(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 1 << 20)
    *tensors, upstream = problem(9, 41)
    log_probs, ids = materialised_log_probs(*tensors[2:]).topk(3)
    for teacher in (TeacherHead(*tensors[2:]), TeacherTopK(ids, log_probs)):

        def divergence(hidden: Tensor, weight: Tensor, teacher: TeacherHead | TeacherTopK = teacher) -> Tensor:
            return linear_distillation(hidden * 2, weight, teacher, divergence=name, **KINDS[name])

        torch._dynamo.reset()
        compiled = torch.compile(divergence, fullgraph=True, backend="aot_eager")
        assert_same(results(compiled, *tensors[:2], upstream), results(divergence, *tensors[:2], upstream))


HIDDEN, WEIGHT, TEACHER_HIDDEN, TEACHER_WEIGHT, _ = problem(9, 33)
HEAD = TeacherHead(TEACHER_HIDDEN, TEACHER_WEIGHT)
TOP_K = TeacherTopK(torch.zeros(9, 1, dtype=torch.int64), torch.zeros(9, 1))


@pytest.mark.parametrize(
    ("teacher", "options", "message"),
    [
        (HEAD, {"divergence": "kl"}, "divergence='kl' is unknown; use one of forward_kl, reverse_kl"),
        (HEAD, {"mixture": 0.5}, "'forward_kl' takes no mixture, got mixture=0.5"),
        (HEAD, {"divergence": "jensen_shannon"}, "needs a mixture between 0 and 1, got mixture=None"),
        (HEAD, {"divergence": "jensen_shannon", "mixture": 1.0}, "mixture=1.0 must be between"),
        (HEAD, {"temperature": 0.0}, "^temperature=0.0 must be positive"),
        (replace(HEAD, logit_softcap=-1.0), {}, "the teacher's logit_softcap=-1.0 must be positive"),
        (replace(HEAD, temperature=torch.ones(4)), {}, r"teacher's temperature must be \[9\].*\[4\]"),
        (replace(HEAD, hidden=TEACHER_HIDDEN[:, 1:]), {}, r"the teacher's hidden states.*\[9, 8\].*\[33, 9\]"),
        (replace(HEAD, hidden=TEACHER_HIDDEN[:5]), {}, "the student has 9 tokens and the teacher 5"),
        (replace(HEAD, weight=TEACHER_WEIGHT[:30]), {}, "has 33 entries and the teacher's 30; pass the teacher ids"),
        (replace(HEAD, ids=torch.zeros(33, dtype=torch.int64)), {}, r"ids of the teacher's vocabulary 0\.\.32"),
        (replace(HEAD, ids=torch.arange(1, 34)), {}, "different ids"),
        (replace(HEAD, ids=torch.arange(9)), {}, r"ids must be integers \[33\], got torch.int64 \[9\]"),
        (replace(TOP_K, ids=TOP_K.ids[:3]), {}, r"must be integers and numbers \[9, K\]"),
        (replace(TOP_K, ids=TOP_K.ids + 33), {}, "33 at index"),
        (TeacherTopK(torch.tensor([[5, -1, 7, -1, 5]] * 9), torch.zeros(9, 5)), {}, "row 0 .* lists token 5 twice"),
        (TeacherTopK(torch.arange(33).expand(9, -1), torch.zeros(9, 33)), {}, "lists 33 tokens; list 1 to 32"),
        (TeacherSamples(TOP_K.ids[:, 0], torch.zeros(9)), {}, "estimate the reverse KL alone, not .*forward_kl"),
        (TeacherSamples(TOP_K.ids[:, 0], torch.zeros(8)), {"divergence": "reverse_kl"}, r"\[9\], got \[8\]"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(teacher: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_distillation(HIDDEN, WEIGHT, teacher, **options)
