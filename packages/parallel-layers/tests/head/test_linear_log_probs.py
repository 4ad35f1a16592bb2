"""`linear_log_probs` against log-softmax of materialised logits: values, every gradient, memory, errors.

One file, although long: on one rank and on several the problem, the reference and the tolerance are the same.
"""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import linear_log_probs
from parallel_layers.head import SamplingMask, chunked
from parallel_layers.testing import RankPool

IGNORE = -100


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by the textbook, in the dtype of the inputs."""
    logits = logit_scale * (hidden @ weight.T)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_softmax = torch.log_softmax(logits, dim=-1)
    ignored = labels == IGNORE
    picked = log_softmax.gather(-1, labels.masked_fill(ignored, 0).long()[:, None])[:, 0]
    return picked.masked_fill(ignored, 0.0), -(log_softmax.exp() * log_softmax).sum(-1)


def problem(
    num_tokens: int, hidden_size: int, vocab_size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, labels (every fifth ignored) and upstream gradients of log-probs and entropy."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, hidden_size, generator=generator, dtype=torch.float64) * 2 / math.sqrt(hidden_size)
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    labels[::5] = IGNORE
    grads = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), labels, grads[0].to(dtype), grads[1].to(dtype)


def run(
    function: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    **options: object,
) -> dict[str, Tensor]:
    """Values and gradients of `function` under the given upstream gradients."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = function(hidden, weight, labels, **options)
    torch.autograd.backward((log_probs, entropy), (grad_log_probs, grad_entropy))
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Each element within `relative` of the largest of its tensor (at least 1)."""
    for name, value in expected.items():
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        torch.testing.assert_close(actual[name].double(), value.double(), rtol=0.0, atol=relative * scale)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "per-token temperature": {"temperature": torch.linspace(0.5, 2.0, 37)},
    "softcap": {"logit_softcap": 3.0},
    "everything": {"temperature": torch.linspace(0.5, 2.0, 37), "logit_softcap": 4.0, "logit_scale": 0.8},
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles that divide neither the tokens nor the vocabulary of the tests."""
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 250)
    return 250


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_materialised_logits(options: dict[str, object], small_tiles: int) -> None:
    inputs = problem(37, 16, 101)
    assert_same(run(linear_log_probs, *inputs, **options), run(reference, *inputs, **options), 2e-6)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    hidden_size=st.integers(1, 12),
    vocab_size=st.integers(1, 90),
    tile=st.integers(1, 600),
    seed=st.integers(0, 10),
)
def test_any_shape_and_tile(num_tokens: int, hidden_size: int, vocab_size: int, tile: int, seed: int) -> None:
    inputs = problem(num_tokens, hidden_size, vocab_size, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.TILE_ELEMENTS, "cpu", tile)
        actual = run(linear_log_probs, *inputs)
    assert_same(actual, run(reference, *(x.double() if x.is_floating_point() else x for x in inputs)), 1e-5)


def test_gradcheck(small_tiles: int) -> None:
    hidden, weight, labels, *_ = problem(7, 5, 23, dtype=torch.float64)

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_log_probs(
            hidden, weight, labels, temperature=torch.linspace(0.5, 2, 7), logit_softcap=5.0, logit_scale=1.5
        )
        assert out.log_probs.dtype == out.entropy.dtype == torch.float64
        return out.log_probs, out.entropy

    assert torch.autograd.gradcheck(head, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs_give_fp32_results(dtype: torch.dtype) -> None:
    inputs = problem(64, 128, 1000, dtype=dtype)
    actual = run(linear_log_probs, *inputs[:3], *(g.float() for g in inputs[3:]))
    exact = run(reference, *(x.double() if x.is_floating_point() else x for x in inputs))
    assert actual["log_probs"].dtype == actual["entropy"].dtype == torch.float32
    assert actual["hidden"].dtype == actual["weight"].dtype == dtype
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(actual[name].double(), exact[name], rtol=0, atol=1e-5)
    for name in ("hidden", "weight"):  # no worse than rounding the exact gradient to the inputs' dtype
        torch.testing.assert_close(actual[name], exact[name].to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_large_logits_stay_finite(small_tiles: int) -> None:
    hidden, weight, *rest = problem(13, 8, 57)
    hidden, weight = (hidden * 4).round() * 64, (weight * 16).round() / 16  # their products are exact in fp32
    inputs = (hidden, weight, *rest)
    assert (hidden @ weight.T).abs().max() > 1000
    actual = run(linear_log_probs, *inputs)
    exact = run(reference, *(x.double() if x.is_floating_point() else x for x in inputs))
    assert_same(actual, exact, 1e-5)


def test_padding_rows_are_invisible(small_tiles: int) -> None:
    hidden, weight, labels, *grads = problem(11, 8, 53)
    padded = torch.cat((weight, torch.full((7, 8), 50.0)))
    expected = run(linear_log_probs, hidden, weight, labels, *grads)
    actual = run(linear_log_probs, hidden, padded, labels, *grads, vocab_size=53)
    assert torch.equal(actual["weight"][53:], torch.zeros(7, 8))
    actual["weight"] = actual["weight"][:53]
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_ignored_labels_have_no_log_prob_gradient_but_an_entropy() -> None:
    hidden, weight, *_ = problem(6, 4, 10)
    labels = torch.full((6,), IGNORE)
    hidden.requires_grad_()
    out = linear_log_probs(hidden, weight, labels)
    assert torch.equal(out.log_probs, torch.zeros(6))
    (grad,) = torch.autograd.grad(out.log_probs.sum(), hidden, retain_graph=True)
    assert torch.equal(grad, torch.zeros(6, 4))
    torch.testing.assert_close(out.entropy, reference(hidden, weight, labels)[1])
    (grad,) = torch.autograd.grad(out.entropy.sum(), hidden)
    assert grad.abs().sum() > 0


def test_entropy_on_request() -> None:
    hidden, weight, labels, grad, _ = problem(6, 4, 10)
    hidden.requires_grad_()
    out = linear_log_probs(hidden, weight, labels, entropy=False)
    assert out.entropy is None
    (actual,) = torch.autograd.grad(out.log_probs, hidden, grad)
    (expected,) = torch.autograd.grad(reference(hidden, weight, labels)[0], hidden, grad)
    torch.testing.assert_close(actual, expected)


class _ProductCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func._schema.name in ("aten::matmul", "aten::mm", "aten::addmm", "aten::addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
def test_a_frozen_input_costs_no_product(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels, *_ = problem(9, 8, 33)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    counter = _ProductCounter()

    original = chunked.head_gradients

    def gradients(*args: object, **kwargs: object) -> None:
        with counter:
            original(*args, **kwargs)

    monkeypatch.setattr(chunked, "head_gradients", gradients)
    linear_log_probs(hidden, weight, labels).log_probs.sum().backward()
    assert counter.products == (3 if frozen == "nothing" else 2)
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("masked", [False, True])
def test_largest_temporary(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the size of the logits: at most a tile, the hidden states or the weight's own gradient.

    Nor with a sampling mask, whose rows here hold up to a third of the vocabulary.
    """
    num_tokens, hidden_size, vocab_size, limit = 256, 16, 8_000, 1 << 17
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", limit)
    hidden, weight, labels, *_ = problem(num_tokens, hidden_size, vocab_size)
    assert limit < num_tokens * vocab_size / 8, "the test must be able to fail"
    counts = torch.where(torch.arange(num_tokens) % 16 == 0, vocab_size // 3, 5)
    rows = [(torch.arange(count) + label) % vocab_size for label, count in zip(labels.tolist(), counts, strict=True)]
    mask = SamplingMask.from_rows(rows) if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        hidden.requires_grad_()
        weight.requires_grad_()
        out = linear_log_probs(hidden, weight, labels, sampling_mask=mask)
        (out.log_probs.sum() + out.entropy.sum()).backward()
    allocations = [event.self_cpu_memory_usage for event in profile.events()]
    assert max(allocations) >= 4 * weight.numel(), "the profiler must have seen the weight's gradient"
    assert max(allocations) <= 4 * max(limit, weight.numel(), hidden.numel())


def test_compiles_without_a_graph_break() -> None:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        out = linear_log_probs(hidden * 2, weight, labels, temperature=0.9)
        return (out.log_probs.exp() + 0.1 * out.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for num_tokens in (12, 31):
        inputs = problem(num_tokens, 8, 33)[:3]
        results = []
        for function in (loss, compiled):
            hidden, weight = inputs[0].clone().requires_grad_(), inputs[1].clone().requires_grad_()
            function(hidden, weight, inputs[2]).backward()
            results.append((hidden.grad, weight.grad))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def test_inputs_are_not_modified_and_need_not_be_contiguous() -> None:
    hidden, weight, labels, *grads = problem(9, 8, 33)
    strided_hidden, strided_weight = hidden.T.contiguous().T, weight.T.contiguous().T
    inputs = (strided_hidden, strided_weight, labels, *grads)
    copies = [x.clone() for x in inputs]
    expected = run(linear_log_probs, hidden, weight, labels, *grads)
    assert not strided_hidden.requires_grad_().is_contiguous()
    assert not strided_weight.requires_grad_().is_contiguous()
    out = linear_log_probs(strided_hidden, strided_weight, labels)
    torch.autograd.backward(out, grads)
    actual = {"log_probs": out.log_probs, "entropy": out.entropy}
    assert_same(actual | {"hidden": strided_hidden.grad, "weight": strided_weight.grad}, expected, 1e-6)
    for before, after in zip(copies, inputs, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("label", [33, -1, 10**6])
def test_label_outside_the_vocabulary(label: int) -> None:
    hidden, weight, labels, *_ = problem(9, 8, 40)
    labels = labels.clamp(max=32)
    labels[6] = label
    with pytest.raises(ValueError, match=rf"label {label} at index \[6\] is outside the vocabulary 0\.\.32"):
        linear_log_probs(hidden, weight, labels, vocab_size=33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 8)}, r"must be \[T, H\] and \[V, H\]"),
        ({"hidden": torch.zeros(9, 7)}, r"\[9, 7\] and head \[33, 8\]"),
        ({"hidden": torch.zeros(9, 8, dtype=torch.bfloat16)}, "share a floating dtype"),
        ({"labels": torch.zeros(8, dtype=torch.int64)}, r"labels must be int64 \[9\]"),
        ({"labels": torch.zeros(9)}, "labels must be int64"),
        ({"vocab_size": 34}, r"vocab_size=34 must be in 1..33"),
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"temperature": torch.ones(4)}, r"must be \[9\], one a token; got \[4\]"),
        ({"logit_scale": -1.0}, "logit_scale=-1.0"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, object], message: str) -> None:
    hidden, weight, labels, *_ = problem(9, 8, 33)
    arguments = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(ValueError, match=message):
        linear_log_probs(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("labels"), **arguments)


def _sharded(
    group: ProcessGroup,
    inputs: tuple[Tensor, ...],
    options: dict[str, object],
    vocab_size: int,
    sequence_parallel: bool,
) -> dict[str, Tensor]:
    """This rank's results; each rank holds its rows of the padded head, and maybe its part of the tokens."""
    hidden, weight, labels, *grads = inputs
    rank, size = group.rank(), group.size()
    rows = -(-vocab_size // size)
    padded = torch.cat((weight, torch.full((rows * size - vocab_size, weight.shape[1]), 9.0, dtype=weight.dtype)))
    if sequence_parallel:
        hidden = hidden.chunk(size)[rank]
    return run(
        linear_log_probs,
        hidden,
        padded[rank * rows : (rank + 1) * rows],
        labels,
        *grads,
        group=group,
        vocab_size=vocab_size,
        sequence_parallel=sequence_parallel,
        **options,
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence-parallel"])
@pytest.mark.parametrize(("world", "vocab_size"), [(2, 101), (4, 101), (4, 5)])
def test_vocabulary_parallel(ranks: RankPool, world: int, vocab_size: int, sequence_parallel: bool) -> None:
    """With 5 entries on 4 ranks, one rank holds nothing but padding."""
    inputs = problem(36, 16, vocab_size)
    options = {"temperature": torch.linspace(0.5, 2.0, 36), "logit_softcap": 6.0}
    expected = run(reference, *inputs, **options)
    results = ranks.run(_sharded, inputs, options, vocab_size, sequence_parallel, world=world)
    for result in results:
        assert torch.equal(result["log_probs"], results[0]["log_probs"])
        assert torch.equal(result["entropy"], results[0]["entropy"])
    weight = torch.cat([result["weight"] for result in results])
    assert torch.equal(weight[vocab_size:], torch.zeros_like(weight[vocab_size:]))
    if sequence_parallel:
        hidden = torch.cat([result["hidden"] for result in results])
    else:
        hidden = results[0]["hidden"]
        assert all(torch.equal(result["hidden"], hidden) for result in results)
    assert_same(results[0] | {"weight": weight[:vocab_size], "hidden": hidden}, expected, 3e-6)


# Relative error allowed for gradients, which have the inputs' dtype.
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@settings(max_examples=25, deadline=None)
@given(
    tokens_a_rank=st.integers(0, 6),
    hidden_size=st.integers(1, 9),
    vocab_size=st.integers(1, 40),
    dtype=st.sampled_from(list(DTYPES)),
    world=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_shape_dtype_and_group(
    ranks: RankPool,
    tokens_a_rank: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    world: int,
    sequence_parallel: bool,
    seed: int,
) -> None:
    inputs = problem(tokens_a_rank * world, hidden_size, vocab_size, seed=seed, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    inputs = (*inputs[:3], *(g.to(wide) for g in inputs[3:]))
    exact = run(reference, *(x.double() if x.is_floating_point() else x for x in inputs))
    results = ranks.run(_sharded, inputs, {}, vocab_size, sequence_parallel, world=world)
    merged = results[0] | {"weight": torch.cat([r["weight"] for r in results])[:vocab_size]}
    if sequence_parallel:
        merged["hidden"] = torch.cat([r["hidden"] for r in results])
    for name, value in merged.items():
        assert value.dtype == (wide if name in ("log_probs", "entropy") else dtype)
    values, gradients = ("log_probs", "entropy"), ("hidden", "weight")
    assert_same(merged, {name: exact[name] for name in values}, min(DTYPES[dtype], 1e-5))
    assert_same(merged, {name: exact[name] for name in gradients}, DTYPES[dtype])


def _sharded_compiled(group: ProcessGroup, sequence_parallel: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        out = linear_log_probs(hidden, weight, labels, group=group, sequence_parallel=sequence_parallel, vocab_size=34)
        return out.entropy.sum() + out.log_probs.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    results = []
    for num_tokens in (8, 12):
        hidden, weight, labels, *_ = problem(num_tokens, 8, 34)
        hidden = hidden.chunk(group.size())[group.rank()] if sequence_parallel else hidden
        leaves = [hidden.clone().requires_grad_(), weight.chunk(group.size())[group.rank()].clone().requires_grad_()]
        results.append(tuple(list(torch.autograd.grad(run(*leaves, labels), leaves)) for run in (compiled, head)))
    return results


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_with_a_group_at_two_lengths(ranks: RankPool, sequence_parallel: bool) -> None:
    for lengths in ranks.run(_sharded_compiled, sequence_parallel, world=2):
        for compiled, eager in lengths:
            torch.testing.assert_close(compiled, eager)


def _bad_label(group: ProcessGroup, inputs: tuple[Tensor, ...]) -> str:
    hidden, weight, labels, *_ = inputs
    labels[3] = 77
    with pytest.raises(ValueError, match="outside the vocabulary") as error:
        linear_log_probs(hidden, weight.chunk(group.size())[group.rank()], labels, group=group, vocab_size=34)
    return str(error.value)


def test_label_outside_the_vocabulary_raises_on_every_rank_alike(ranks: RankPool) -> None:
    messages = ranks.run(_bad_label, problem(9, 8, 34), world=2, timeout=20)
    assert messages[0] == messages[1]
    assert "label 77 at index [3]" in messages[0]


def _unequal_tokens(group: ProcessGroup, inputs: tuple[Tensor, ...]) -> str:
    hidden, weight, labels, *_ = inputs
    mine, rows = hidden.split([2, 6])[group.rank()], weight.chunk(group.size())[group.rank()]
    with pytest.raises(ValueError, match="one for each token of the whole sequence") as error:
        linear_log_probs(mine, rows, labels, group=group, sequence_parallel=True, vocab_size=34)
    return str(error.value)


def test_ranks_with_unequal_numbers_of_tokens_are_refused(ranks: RankPool) -> None:
    messages = ranks.run(_unequal_tokens, problem(8, 8, 34), world=2, timeout=20)
    assert [re.findall(r"labels must be int64 \[(\d+)\]", message) for message in messages] == [["4"], ["12"]]
