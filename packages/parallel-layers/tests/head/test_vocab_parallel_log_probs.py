"""`vocab_parallel_log_probs` against torch on whole logits: values and gradients."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.head import chunked
from parallel_layers.head.log_probs import vocab_parallel_log_probs
from parallel_layers.testing import RankPool

IGNORE = -100
Loss = Callable[..., Tensor]


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(labels == IGNORE, 0.0)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_softmax = torch.log_softmax(logits, -1)
    return -(log_softmax.exp() * log_softmax).sum(-1)


# Name -> (ours, torch's); "both" has gradients of both results.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "log_probs": (lambda *args, **options: vocab_parallel_log_probs(*args, entropy=False, **options)[0], _log_probs),
    "entropy": (lambda *args, **options: vocab_parallel_log_probs(*args, **options)[1], _entropy),
    "both": (
        lambda *args, **options: torch.add(*vocab_parallel_log_probs(*args, **options), alpha=0.5),
        lambda logits, labels: _log_probs(logits, labels) + 0.5 * _entropy(logits, labels),
    ),
}


def problem(shape: tuple[int, ...], vocab_size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp64 logits and labels; every fourth label is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(vocab_size, shape, generator=generator)
    labels.view(-1)[1::4] = IGNORE
    return logits, labels


class Result(NamedTuple):
    """A loss of one rank's logits, and its gradient under fixed upstream gradients."""

    value: Tensor
    gradient: Tensor


def run(loss: Loss, logits: Tensor, labels: Tensor, **options: object) -> Result:
    logits = logits.clone().requires_grad_()
    value = loss(logits, labels, **options)
    upstream = torch.linspace(0.5, 3.0, value.numel(), dtype=value.dtype).view(value.shape).to(logits.device)
    before = [x.detach().clone() for x in (logits, labels, upstream)]
    (gradient,) = torch.autograd.grad(value, logits, upstream)
    assert all(torch.equal(was, now) for was, now in zip(before, (logits, labels, upstream), strict=True))
    return Result(value.detach(), gradient)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOSSES)
def test_unsharded(name: str, device: str) -> None:
    logits, labels = problem((3, 5), 17)
    loss, expected = LOSSES[name]
    actual = run(loss, logits.to(device), labels.to(device))
    assert all(tensor.device.type == device for tensor in actual)
    actual = Result(*(tensor.cpu() for tensor in actual))
    torch.testing.assert_close(actual, run(expected, logits, labels), rtol=1e-10, atol=1e-12)


def _columns(logits: Tensor, rank: int, size: int) -> Tensor:
    """This rank's columns, padded with a logit that would dominate if it were not hidden."""
    per_rank = -(-logits.shape[-1] // size)
    padded = F.pad(logits, (0, per_rank * size - logits.shape[-1]), value=99.0)
    return padded[..., rank * per_rank : (rank + 1) * per_rank]


def _sharded(
    group: ProcessGroup, logits: Tensor, labels: Tensor, names: list[str], device: str = "cpu"
) -> dict[str, Result]:
    local = _columns(logits, group.rank(), group.size()).contiguous().to(device)
    options = {"group": group, "vocab_size": logits.shape[-1]}
    return {name: run(LOSSES[name][0], local, labels.to(device), **options) for name in names}


class Ranks(NamedTuple):
    """The first few ranks of a pool, and where they compute."""

    pool: RankPool
    world: int
    device: str

    def results(self, logits: Tensor, labels: Tensor, names: Iterable[str]) -> dict[str, Result]:
        """Return the results of the whole logits; the values of all ranks are compared bit by bit."""
        ranks = self.pool.run(_sharded, logits, labels, list(names), device=self.device, world=self.world)
        whole = {}
        for name in names:
            value = ranks[0][name].value
            assert all(torch.equal(rank[name].value, value) for rank in ranks), name
            gradient = torch.cat([rank[name].gradient for rank in ranks], dim=-1)
            assert not gradient[..., logits.shape[-1] :].any(), name
            whole[name] = Result(value, gradient[..., : logits.shape[-1]])
        return whole


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gloo-1", "gloo-2")),
        "gloo-4",
        pytest.param("nccl-2", marks=pytest.mark.gpu(2)),
    ]
)
def sharding(request: pytest.FixtureRequest) -> Ranks:
    backend, _, world = request.param.partition("-")
    if backend == "gloo":
        return Ranks(request.getfixturevalue("ranks"), int(world), "cpu")
    return Ranks(request.getfixturevalue("nccl_ranks"), int(world), "cuda")


@pytest.mark.parametrize("vocab_size", [16, 17, 5, 1])
def test_sharded(sharding: Ranks, vocab_size: int) -> None:
    """With 5 entries on 4 ranks, or 1 on 2, some ranks hold nothing but padding."""
    logits, labels = problem((3, 5), vocab_size)
    actual = sharding.results(logits, labels, LOSSES)
    expected = {name: run(reference, logits, labels) for name, (_, reference) in LOSSES.items()}
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative error allowed for the gradient, which has the logits' dtype."""


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple),
    vocab_size=st.integers(2, 40),
    dtype=st.sampled_from(list(DTYPES)),
    world=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(list(LOSSES)),
    seed=st.integers(0, 100),
)
def test_any_shape_dtype_and_group(
    ranks: RankPool, shape: tuple[int, ...], vocab_size: int, dtype: torch.dtype, world: int, name: str, seed: int
) -> None:
    logits, labels = problem(shape, vocab_size, seed=seed)
    logits = logits.to(dtype)
    actual = Ranks(ranks, world, "cpu").results(logits, labels, [name])[name]
    value, gradient = run(LOSSES[name][1], logits.double(), labels)
    tolerance = DTYPES[dtype]
    assert actual.value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(actual.value.double(), value, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5) * 10)
    torch.testing.assert_close(actual.gradient.double(), gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name: str) -> None:
    logits, labels = problem((4,), 7)
    assert torch.autograd.gradcheck(lambda z: LOSSES[name][0](z, labels), (logits.requires_grad_(),))


def test_second_derivatives_are_refused() -> None:
    logits, labels = problem((4,), 7)
    loss = vocab_parallel_log_probs(logits.requires_grad_(), labels).log_probs.sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits_stay_finite(name: str) -> None:
    logits = torch.tensor([[1000.0, -1000.0, 1000.0, 0.0], [-1000.0, -1000.0, -1000.0, -999.0]] * 2)
    logits[2, 1] = logits[2, 3] = logits[3, 0] = -torch.inf
    labels = torch.tensor([0, 3, 2, 1])
    loss, expected = LOSSES[name]
    actual = logits.clone().requires_grad_()
    reference = logits.double().clamp(min=-3000).requires_grad_()  # e^-2000 is 0, and torch's gradients stay finite
    value, exact = loss(actual, labels), expected(reference, labels)
    (7.0 * value.sum()).backward()
    (7.0 * exact.sum()).backward()
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)
    # A log-sum-exp near 1000 is an fp32 number: the backward's log-probabilities are exact to half its last place.
    torch.testing.assert_close(actual.grad.double(), reference.grad, rtol=5e-5, atol=7 * 3e-5)


NARROW = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Error allowed, relative and absolute, of gradients, which have the logits' dtype."""

# A log-sum-exp near 1000 is an fp32 number: log-probabilities that come from it are exact to half its last place.
NEAR_1000 = 3e-5


def _check_narrow(sharding: Ranks, logits: Tensor, labels: Tensor, *, log_sum_exp_error: float = 0.0) -> None:
    """Results of logits of fewer bits than fp64, and of ±1000 and -inf among them, against fp64's."""
    tolerance = max(NARROW[logits.dtype], 3 * log_sum_exp_error)
    for name, (value, gradient) in sharding.results(logits, labels, LOSSES).items():
        # e^-2000 is 0, and torch's gradients stay finite.
        expected = run(LOSSES[name][1], logits.double().clamp(min=-3000), labels)
        assert (value.dtype, gradient.dtype) == (torch.float32, logits.dtype)
        # A value is a difference of logits less a small logarithm, near 1000 as elsewhere.
        torch.testing.assert_close(value.double(), expected.value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient.double(), expected.gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_logits_give_what_fp64_does(sharding: Ranks, dtype: torch.dtype) -> None:
    logits, labels = problem((3, 5), 17)
    _check_narrow(sharding, logits.to(dtype), labels)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_logits_at_1000_give_what_fp64_does(sharding: Ranks, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1000.0, -1000.0, 1000.0, 0.0, 3.0, -1000.0, 999.0], [-1000.0] * 6 + [-999.0]])
    logits = torch.cat((logits, logits.flip(-1), torch.full((1, 7), 1000.0))).to(dtype)
    _check_narrow(sharding, logits, torch.tensor([1, 6, IGNORE, 3, 0]), log_sum_exp_error=NEAR_1000)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_logits_of_minus_infinity_are_entries_of_probability_zero(sharding: Ranks, dtype: torch.dtype) -> None:
    """Half of the ranks have no other, another's are at 1000."""
    logits = torch.full((4, 8), -torch.inf)
    logits[:, 4:6], logits[:, 6:] = 1000.0, -1000.0
    logits[3] = torch.tensor([0.0, -torch.inf, 2.0, -1000.0, -torch.inf, 1.0, 1.0, -torch.inf])
    _check_narrow(sharding, logits.to(dtype), torch.tensor([4, 5, IGNORE, 2]), log_sum_exp_error=NEAR_1000)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Chunks have two tokens each, in the forward and in the backward."""
    logits, labels = problem((3, 5), 17)
    monkeypatch.setitem(chunked.TILE_ELEMENTS, device, 40)
    for loss, expected in LOSSES.values():
        actual = Result(*(x.cpu() for x in run(loss, logits.to(device), labels.to(device))))
        torch.testing.assert_close(actual, run(expected, logits, labels))


def test_entropy_of_bf16_logits_over_a_large_vocabulary(ranks: RankPool) -> None:
    """From nearly uniform, whose entropy is a sum of many small numbers, to nearly certain."""
    torch.manual_seed(0)
    scales = torch.tensor([[0.01], [1.0], [4.0], [10.0], [100.0]])
    logits, labels = (torch.randn(5, 150_000) * scales).bfloat16(), torch.arange(5)
    results = Ranks(ranks, 2, "cpu").results(logits, labels, ["log_probs", "entropy"])
    for name, (value, _) in results.items():
        torch.testing.assert_close(value.double(), LOSSES[name][1](logits.double(), labels), rtol=0, atol=1e-3)


def _allocations(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result of a call and the bytes of all its allocations, custom operators included, largest first."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        result = call()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    return result, sorted((e.nbytes() for e in events if e.nbytes() > 0), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_temporary_is_one_tile(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    tile = 1 << 12
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", tile)
    logits, labels = torch.randn(64, 512).to(dtype).requires_grad_(), torch.arange(64)
    result, forward = _allocations(lambda: vocab_parallel_log_probs(logits, labels))
    assert forward[0] == 4 * tile < logits.nbytes  # tiles are fp32
    _, (gradient, *temporaries) = _allocations(lambda: (result.log_probs.sum() + result.entropy.sum()).backward())
    assert gradient == logits.nbytes
    assert all(nbytes <= 4 * tile for nbytes in temporaries)


def _compiled(group: ProcessGroup | None, lengths: tuple[int, ...]) -> list[tuple[Result, Result]]:
    """(compiled, eager) results at each length."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, entropy = vocab_parallel_log_probs(logits * 2, labels, group=group, vocab_size=16)
        return log_probs - entropy

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    pairs = []
    for num_tokens in lengths:
        logits, labels = problem((num_tokens,), 16)
        local = _columns(logits, 0, 1) if group is None else _columns(logits, group.rank(), group.size())
        pairs.append((run(compiled, local, labels), run(loss, local, labels)))
    return pairs


@pytest.mark.parametrize("world", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break_at_two_lengths(ranks: RankPool, world: int | None) -> None:
    lengths = (6, 11)
    for pairs in [_compiled(None, lengths)] if world is None else ranks.run(_compiled, lengths, world=world):
        for compiled, eager in pairs:
            torch.testing.assert_close(compiled, eager)


def test_errors() -> None:
    logits, labels = problem((4,), 7)
    labels[2] = 9
    with pytest.raises(ValueError, match=r"label 9 at index \[2\] is outside the vocabulary 0\.\.6"):
        vocab_parallel_log_probs(logits, labels)
    with pytest.raises(ValueError, match=r"labels \[3\]"):
        vocab_parallel_log_probs(logits, labels[:3])
    with pytest.raises(ValueError, match="labels must be int64"):
        vocab_parallel_log_probs(logits, labels.double())
    with pytest.raises(ValueError, match=r"vocab_size=8 must be in 1..7"):
        vocab_parallel_log_probs(logits, labels, vocab_size=8)
