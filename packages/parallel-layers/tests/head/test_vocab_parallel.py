"""Losses on vocabulary-parallel logits against torch on whole logits: values, gradients, second gradients."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import vocab_parallel_cross_entropy, vocab_parallel_entropy, vocab_parallel_log_probs
from parallel_layers.head import chunked
from parallel_layers.testing import RankPool

IGNORE = -100


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return picked.masked_fill(labels == IGNORE, 0.0)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_softmax = torch.log_softmax(logits, -1)
    return -(log_softmax.exp() * log_softmax).sum(-1)


def _cross_entropy(**options: object) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten(), ignore_index=IGNORE, **options)
        return losses.view(labels.shape) if options.get("reduction") == "none" else losses

    return loss


def _megatron(logits: Tensor, labels: Tensor) -> Tensor:
    """Label smoothing as Megatron-Core spells it: the label keeps 1 - 0.2, every other entry gets 0.2 / (K - 1)."""
    num_entries = logits.shape[-1]
    targets = torch.full_like(logits, 0.2 / (num_entries - 1))
    targets.scatter_(-1, labels.clamp(min=0)[..., None], 0.8)
    return -(targets * torch.log_softmax(logits, -1)).sum(-1).masked_fill(labels == IGNORE, 0.0)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "log_probs": (vocab_parallel_log_probs, _log_probs),
    "entropy": (
        lambda logits, labels, ignore_index=IGNORE, **options: vocab_parallel_entropy(logits, **options),
        _entropy,
    ),
    "mean": (vocab_parallel_cross_entropy, _cross_entropy(reduction="mean")),
    "sum": (
        lambda *args, **options: vocab_parallel_cross_entropy(*args, reduction="sum", **options),
        _cross_entropy(reduction="sum"),
    ),
    "smoothing of torch": (
        lambda *args, **options: vocab_parallel_cross_entropy(*args, reduction="none", label_smoothing=0.2, **options),
        _cross_entropy(reduction="none", label_smoothing=0.2),
    ),
    "mean, smoothed": (
        lambda *args, **options: vocab_parallel_cross_entropy(*args, label_smoothing=0.1, **options),
        _cross_entropy(label_smoothing=0.1),
    ),
    "smoothing of Megatron": (
        lambda *args, **options: vocab_parallel_cross_entropy(
            *args, reduction="none", label_smoothing=0.2, smoothing="megatron", **options
        ),
        _megatron,
    ),
}


def problem(shape: tuple[int, ...], vocab_size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp64 logits and labels; every fourth label is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(vocab_size, shape, generator=generator)
    labels.view(-1)[1::4] = IGNORE
    return logits, labels


class Derivatives(NamedTuple):
    """A loss of one rank's logits, its gradient, and the derivatives of a function of that gradient."""

    value: Tensor
    gradient: Tensor
    """Under fixed upstream weights, by the backward that is run once."""
    again: Tensor
    """The same by the backward that can be differentiated."""
    second: Tensor
    """By the logits."""
    mixed: Tensor
    """By the upstream weights."""


def _derivatives(loss: Callable[..., Tensor], logits: Tensor, labels: Tensor, **options: object) -> Derivatives:
    logits = logits.clone().requires_grad_()
    before = (logits.detach().clone(), labels.clone())
    value = loss(logits, labels, **options)
    upstream = torch.linspace(0.5, 3.0, value.numel(), dtype=value.dtype).view(value.shape).to(logits.device)
    before, upstream = (*before, upstream.clone()), upstream.requires_grad_()
    (gradient,) = torch.autograd.grad(value, logits, upstream, retain_graph=True)
    (again,) = torch.autograd.grad(value, logits, upstream, create_graph=True)
    second, mixed = torch.autograd.grad((again * _direction(options, logits)).sum(), (logits, upstream))
    assert all(torch.equal(was, now) for was, now in zip(before, (logits, labels, upstream), strict=True))
    return Derivatives(value.detach(), gradient, again.detach(), second, mixed)


def _direction(options: dict[str, object], logits: Tensor) -> Tensor:
    """A fixed function of the entry's place in the whole vocabulary, which every dtype holds exactly."""
    group = options.get("group")
    first = group.rank() * logits.shape[-1] if isinstance(group, ProcessGroup) else 0
    return torch.arange(first, first + logits.shape[-1]).sin().bfloat16().to(logits)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("loss", "expected"), LOSSES.values(), ids=LOSSES.keys())
def test_unsharded(loss: Callable[..., Tensor], expected: Callable[..., Tensor], device: str) -> None:
    logits, labels = problem((3, 5), 17)
    actual = _derivatives(loss, logits.to(device), labels.to(device))
    assert all(tensor.device.type == device for tensor in actual)
    actual = Derivatives(*(tensor.cpu() for tensor in actual))
    torch.testing.assert_close(actual, _derivatives(expected, logits, labels), rtol=1e-10, atol=1e-12)


def _columns(logits: Tensor, rank: int, size: int) -> Tensor:
    """This rank's columns, padded with a logit that would dominate if it were not hidden."""
    per_rank = -(-logits.shape[-1] // size)
    padded = F.pad(logits, (0, per_rank * size - logits.shape[-1]), value=99.0)
    return padded[..., rank * per_rank : (rank + 1) * per_rank]


def _sharded(
    group: ProcessGroup,
    logits: Tensor,
    labels: Tensor,
    names: list[str],
    ignore_index: int = IGNORE,
    device: str = "cpu",
) -> dict[str, Derivatives]:
    local = _columns(logits, group.rank(), group.size()).contiguous().to(device)
    options = {"group": group, "vocab_size": logits.shape[-1], "ignore_index": ignore_index}
    return {name: _derivatives(LOSSES[name][0], local, labels.to(device), **options) for name in names}


class Ranks(NamedTuple):
    """The first few ranks of a pool, and where they compute."""

    pool: RankPool
    world: int
    device: str

    def derivatives(self, logits: Tensor, labels: Tensor, names: Iterable[str]) -> dict[str, Derivatives]:
        """Return the results of the whole logits; equal results of all ranks are compared bit by bit."""
        results = self.pool.run(_sharded, logits, labels, list(names), device=self.device, world=self.world)
        whole = {}
        for name in names:
            ranks: list[Derivatives] = [result[name] for result in results]
            for rank in ranks:
                assert torch.equal(rank.value, ranks[0].value), name
                assert torch.equal(rank.mixed, ranks[0].mixed), name
            columns = [torch.cat([rank[part] for rank in ranks], dim=-1) for part in (1, 2, 3)]
            assert not any(tensor[..., logits.shape[-1] :].any() for tensor in columns), name
            columns = [tensor[..., : logits.shape[-1]] for tensor in columns]
            whole[name] = Derivatives(ranks[0].value, *columns, ranks[0].mixed)
        return whole


@pytest.fixture(params=["gloo-1", "gloo-2", "gloo-4", pytest.param("nccl-2", marks=pytest.mark.gpu(2))])
def sharding(request: pytest.FixtureRequest) -> Ranks:
    backend, _, world = request.param.partition("-")
    if backend == "gloo":
        return Ranks(request.getfixturevalue("ranks"), int(world), "cpu")
    return Ranks(request.getfixturevalue("nccl_ranks"), int(world), "cuda")


@pytest.mark.parametrize("vocab_size", [16, 17, 5, 1])
def test_sharded(sharding: Ranks, vocab_size: int) -> None:
    """With 5 entries on 4 ranks, or 1 on 2, some ranks hold nothing but padding."""
    logits, labels = problem((3, 5), vocab_size)
    names = [name for name in LOSSES if vocab_size > 1 or "Megatron" not in name]  # which smooths over the others
    for name, actual in sharding.derivatives(logits, labels, names).items():
        expected = _derivatives(LOSSES[name][1], logits, labels)
        torch.testing.assert_close(
            actual, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("world", [1, 2])
def test_any_label_may_be_the_ignored_one(ranks: RankPool, world: int) -> None:
    """The references know -100 alone: they are given it in the place of 3."""
    logits, labels = problem((3, 5), 16)
    labels[labels == IGNORE] = 3
    for name, (_, expected) in LOSSES.items():
        value, first, *_ = _derivatives(expected, logits, labels.masked_fill(labels == 3, IGNORE))
        results = [result[name] for result in ranks.run(_sharded, logits, labels, [name], 3, world=world)]
        torch.testing.assert_close(
            results[0][0], value, rtol=1e-10, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}"
        )
        gathered = torch.cat([result[1] for result in results], dim=-1)
        torch.testing.assert_close(gathered, first, rtol=1e-10, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")
        if name != "entropy":
            with pytest.raises(ValueError, match="label -100 at position 0"):
                LOSSES[name][0](logits[0, :1], torch.tensor([IGNORE]), ignore_index=3)


DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative error allowed for the gradient, which has the logits' dtype."""


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple),
    vocab_size=st.integers(2, 40),
    dtype=st.sampled_from(list(DTYPES)),
    world=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["log_probs", "entropy", "smoothing of torch", "smoothing of Megatron"]),
    seed=st.integers(0, 100),
)
def test_any_shape_dtype_and_group(
    ranks: RankPool, shape: tuple[int, ...], vocab_size: int, dtype: torch.dtype, world: int, name: str, seed: int
) -> None:
    logits, labels = problem(shape, vocab_size, seed=seed)
    logits = logits.to(dtype)
    results = ranks.run(_sharded, logits, labels, [name], world=world)
    value, first, *_ = _derivatives(LOSSES[name][1], logits.double(), labels)
    tolerance = DTYPES[dtype]
    for result in results:
        assert torch.equal(result[name][0], results[0][name][0])
        assert result[name][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(
            result[name][0].double(), value, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5) * 10
        )
    gathered = torch.cat([result[name][1] for result in results], dim=-1)[..., :vocab_size]
    torch.testing.assert_close(gathered.double(), first, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["log_probs", "entropy", "mean"])
def test_gradgradcheck(name: str) -> None:
    logits, labels = problem((4,), 7)
    loss = LOSSES[name][0]
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), (logits.requires_grad_(),))
    assert torch.autograd.gradgradcheck(lambda z: loss(z, labels), (logits,))


@pytest.mark.parametrize("name", ["log_probs", "entropy", "mean"])
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
"""Error allowed, relative and absolute, of what has the logits' dtype: gradients and second gradients."""

# A log-sum-exp near 1000 is an fp32 number: log-probabilities that come from it are exact to half its last place.
NEAR_1000 = 3e-5


def _check_narrow(
    sharding: Ranks, logits: Tensor, labels: Tensor, names: Iterable[str], *, log_sum_exp_error: float = 0.0
) -> None:
    """Results of logits of fewer bits than fp64, and of ±1000 and -inf among them, against fp64's."""
    tolerance = max(NARROW[logits.dtype], 3 * log_sum_exp_error)
    for name, actual in sharding.derivatives(logits, labels, names).items():
        # e^-2000 is 0, and torch's gradients stay finite.
        expected = _derivatives(LOSSES[name][1], logits.double().clamp(min=-3000), labels)
        assert actual.value.dtype == actual.mixed.dtype == torch.float32
        assert {tensor.dtype for tensor in actual[1:4]} == {logits.dtype}
        # A value without smoothing is a difference of logits less a small logarithm, near 1000 as elsewhere.
        exact = 1e-6 if "smooth" not in name else max(1e-6, log_sum_exp_error)
        tolerances = (exact, tolerance, tolerance, tolerance, max(1e-5, 3 * log_sum_exp_error))
        for part, result, truth, error in zip(Derivatives._fields, actual, expected, tolerances, strict=True):
            torch.testing.assert_close(
                result.double(), truth, rtol=error, atol=error, msg=lambda text, at=f"{name}, {part}": f"{at}: {text}"
            )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_logits_give_what_fp64_does(sharding: Ranks, dtype: torch.dtype) -> None:
    logits, labels = problem((3, 5), 17)
    _check_narrow(sharding, logits.to(dtype), labels, LOSSES)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_logits_at_1000_give_what_fp64_does(sharding: Ranks, dtype: torch.dtype) -> None:
    """Also where the smoothing asks for entries with a probability of 0."""
    logits = torch.tensor([[1000.0, -1000.0, 1000.0, 0.0, 3.0, -1000.0, 999.0], [-1000.0] * 6 + [-999.0]])
    logits = torch.cat((logits, logits.flip(-1), torch.full((1, 7), 1000.0))).to(dtype)
    _check_narrow(sharding, logits, torch.tensor([1, 6, IGNORE, 3, 0]), LOSSES, log_sum_exp_error=NEAR_1000)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_logits_of_minus_infinity_are_entries_of_probability_zero(sharding: Ranks, dtype: torch.dtype) -> None:
    """Half of the ranks have no other, another's are at 1000. (Smoothing would ask for the infinite loss of each.)"""
    logits = torch.full((4, 8), -torch.inf)
    logits[:, 4:6], logits[:, 6:] = 1000.0, -1000.0
    logits[3] = torch.tensor([0.0, -torch.inf, 2.0, -1000.0, -torch.inf, 1.0, 1.0, -torch.inf])
    names = [name for name in LOSSES if "smooth" not in name]
    _check_narrow(sharding, logits.to(dtype), torch.tensor([4, 5, IGNORE, 2]), names, log_sum_exp_error=NEAR_1000)


def _collectives(group: ProcessGroup, logits: Tensor, labels: Tensor, name: str) -> tuple[list[str], list[str]]:
    local = _columns(logits, group.rank(), group.size()).clone().requires_grad_()
    counts = []
    value = LOSSES[name][0](local, labels, group=group, vocab_size=logits.shape[-1]).sum()

    def forward() -> None:
        nonlocal value
        value = LOSSES[name][0](local, labels, group=group, vocab_size=logits.shape[-1]).sum()

    for step in (forward, lambda: value.backward()):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        counts.append([event.name for event in profile.events() if event.name.startswith("c10d::")])
    return counts[0], counts[1]


@pytest.mark.parametrize("name", LOSSES)
def test_collectives(ranks: RankPool, name: str) -> None:
    for forward, backward in ranks.run(_collectives, *problem((3, 5), 16), name, world=2):
        assert len(forward) == 1, forward
        assert backward == []


@pytest.mark.parametrize("device", DEVICES)
def test_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Chunks have two tokens each, in the forward and in the backward."""
    logits, labels = problem((3, 5), 17)
    monkeypatch.setitem(chunked.TILE_ELEMENTS, device, 40)
    for name, (loss, expected) in LOSSES.items():
        value, gradient, *_ = _derivatives(loss, logits.to(device), labels.to(device))
        exact = _derivatives(expected, logits, labels)
        torch.testing.assert_close(value.cpu(), exact.value, msg=lambda text, at=name: f"{at}: {text}")
        torch.testing.assert_close(gradient.cpu(), exact.gradient, msg=lambda text, at=name: f"{at}: {text}")


def _compiled(group: ProcessGroup | None, lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """(compiled, eager) losses and gradients at each length."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        cross_entropy = vocab_parallel_cross_entropy(
            logits * 2, labels, label_smoothing=0.1, group=group, vocab_size=16
        )
        log_probs = vocab_parallel_log_probs(logits, labels, group=group, vocab_size=16)
        return cross_entropy + log_probs.sum() - vocab_parallel_entropy(logits, group=group, vocab_size=16).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    pairs = []
    for num_tokens in lengths:
        logits, labels = problem((num_tokens,), 16)
        local = _columns(logits, 0, 1) if group is None else _columns(logits, group.rank(), group.size())
        for function in (compiled, loss):
            leaf = local.clone().requires_grad_()
            value = function(leaf, labels)
            pairs += [(value.detach(), *torch.autograd.grad(value, leaf))]
    return [pair for both in zip(pairs[::2], pairs[1::2], strict=True) for pair in zip(*both, strict=True)]


@pytest.mark.parametrize("world", [None, 2])
def test_compiles_without_a_graph_break_at_two_lengths(ranks: RankPool, world: int | None) -> None:
    lengths = (6, 11)
    results = [_compiled(None, lengths)] if world is None else ranks.run(_compiled, lengths, world=world)
    for pairs in results:
        assert len(pairs) == 4
        for compiled, eager in pairs:
            torch.testing.assert_close(compiled, eager)


def test_errors() -> None:
    logits, labels = problem((4,), 7)
    labels[2] = 9
    with pytest.raises(ValueError, match="label 9 at position 2 is outside the vocabulary of 7"):
        vocab_parallel_log_probs(logits, labels)
    assert vocab_parallel_log_probs(logits, labels, check_labels=False).isnan().tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match=r"labels \[3\]"):
        vocab_parallel_log_probs(logits, labels[:3])
    with pytest.raises(ValueError, match="labels must be int64"):
        vocab_parallel_log_probs(logits, labels.double())
    with pytest.raises(ValueError, match=r"vocab_size=8 must be in 1..7"):
        vocab_parallel_entropy(logits, vocab_size=8)
    for option in ({"label_smoothing": 1.0}, {"smoothing": "other"}, {"reduction": "max"}):
        with pytest.raises(ValueError, match=next(iter(option))):
            vocab_parallel_cross_entropy(logits, labels, **option)


def test_all_labels_ignored() -> None:
    logits, labels = problem((4,), 7)
    labels.fill_(IGNORE)
    assert vocab_parallel_cross_entropy(logits, labels).isnan()
    assert vocab_parallel_cross_entropy(logits, labels, reduction="sum") == 0
