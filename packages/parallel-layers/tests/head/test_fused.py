"""The head's CUDA kernels against fp64 logits, over shapes that do not divide the blocks."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import LogProbs, linear_log_probs
from parallel_layers.head import chunked, fused, linear_token_statistics
from parallel_layers.head.log_probs import has_room
from parallel_layers.testing import RankPool

IGNORE = -100


def problem(num_tokens: int, hidden_size: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """bf16 hidden states and head, labels (every fifth ignored), fp32 upstream gradients; logits of deviation 2."""
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16()
    weight = (torch.randn(vocab_size, hidden_size, device="cuda") * 2 / math.sqrt(hidden_size)).bfloat16()
    labels = torch.randint(vocab_size, (num_tokens,), device="cuda")
    labels[::5] = IGNORE
    return hidden, weight, labels, torch.randn(num_tokens, device="cuda"), torch.randn(num_tokens, device="cuda")


def exact(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    **_options: object,
) -> list[Tensor]:
    """Log-probs, entropies and the gradients of hidden states and head, in fp64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = logit_scale * (hidden @ weight.T)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_softmax = torch.log_softmax(logits, -1)
    ignored = labels == IGNORE
    log_probs = log_softmax.gather(-1, labels.masked_fill(ignored, 0)[:, None])[:, 0].masked_fill(ignored, 0.0)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    gradients = torch.autograd.grad((log_probs, entropy), (hidden, weight), (grad_log_probs, grad_entropy))
    return [log_probs.detach(), entropy.detach(), *gradients]


@pytest.mark.parametrize("hidden_size", [8, 1024, 2560, 4096, 16384])
@pytest.mark.parametrize("num_entries", [1, 515, 30000, 128256, 151936])
def test_slices_are_whole_tiles_near_a_tenth_and_within_their_bounds(num_entries: int, hidden_size: int) -> None:
    for num_tokens in (1, 100, 8192, 16384, 262144):
        entries = fused.slice_entries(num_tokens, num_entries, hidden_size, 132)
        wanted = min(max(num_entries / 10, 2048), max(2**28 / num_tokens, 2048))
        assert entries % 256 == 0
        assert entries * num_tokens <= max(2**28, 2048 * num_tokens)
        assert 0.87 * wanted <= entries <= 1.07 * wanted + 256


def test_slices_fill_the_multiprocessors() -> None:
    """A tenth, 12826 entries, is 12.1 waves of 132 tiles of 128 x 256: 13 with most of them idle in the last one."""
    assert fused.slice_entries(8192, 128256, 4096, multiprocessors=132) * 4096 / (128 * 256 * 132) == pytest.approx(
        13, abs=0.2
    )


def run(
    hidden: Tensor, weight: Tensor, labels: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor, **options: object
) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_log_probs(hidden, weight, labels, **options)
    gradients = torch.autograd.grad(out, (hidden, weight), (grad_log_probs, grad_entropy))
    return [out.log_probs.detach(), out.entropy.detach(), *gradients]


def assert_accurate(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Values within 0.001 of fp64; gradients within 0.003 of it, relative: their own rounding to bf16 is 0.002.

    A gradient that cancels (one token, certain of its label) is allowed an error of 1e-6 an element.
    """
    for name, value, truth in zip(("log-prob", "entropy"), actual, expected, strict=False):
        assert value.dtype == torch.float32
        assert (value.double() - truth).abs().max() < 1e-3, name
    for name, value, truth in zip(("hidden", "weight"), actual[2:], expected[2:], strict=True):
        assert value.dtype == torch.bfloat16
        error = (value.double() - truth).norm()
        assert error < 3e-3 * truth.norm() + 1e-6 * math.sqrt(truth.numel()), f"{name}: {error / truth.norm()}"


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7, "logit_scale": 0.8},
    "per-token temperature": {"temperature": "per token"},
    "softcap": {"logit_softcap": 5.0, "temperature": "per token"},
}
SHAPES = [(1, 8, 3), (37, 64, 257), (130, 200, 1000), (300, 512, 5003), (129, 1024, 40001)]


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_fp64(shape: tuple[int, int, int], options: dict[str, object], keep: bool) -> None:
    torch.manual_seed(sum(shape))
    inputs = problem(*shape)
    assert fused.supports(*inputs[:2])
    options = dict(options)
    if options.get("temperature") == "per token":
        options["temperature"] = torch.linspace(0.5, 2.0, shape[0], device="cuda")
    assert_accurate(run(*inputs, **options, keep_probabilities=keep), exact(*inputs, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("shape", [(600_011, 16, 300), (70_001, 64, 32_003)], ids=str)
def test_more_than_a_grid_axis_or_32_bits_hold(shape: tuple[int, int, int], keep: bool) -> None:
    """More blocks of tokens than the 65535 of a grid's second axis; more than 2^31 logits. Both ends have gradients."""
    torch.manual_seed(0)
    hidden, weight, labels, *grads = problem(*shape)
    ends = torch.cat([torch.arange(200), torch.arange(shape[0] - 200, shape[0])]).cuda()
    grads = [torch.zeros_like(x).index_copy_(0, ends, x[ends]) for x in grads]
    *actual, grad_weight = run(hidden, weight, labels, *grads, keep_probabilities=keep)
    expected = exact(hidden[ends], weight, *(x[ends] for x in (labels, *grads)))
    assert_accurate([*(x[ends] for x in actual), grad_weight], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_torch_path_on_cuda(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where the kernels do not: other dtypes, older GPUs."""
    monkeypatch.setattr(fused, "supports", lambda *_: False)
    hidden, weight, *rest = problem(130, 200, 20001)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    actual, expected = run(hidden, weight, *rest), exact(hidden, weight, *rest)
    for value, truth in zip(actual[:2], expected[:2], strict=True):
        assert (value.double() - truth).abs().max() < 1e-4
    for value, truth in zip(actual[2:], expected[2:], strict=True):
        assert value.dtype == dtype
        assert (value.double() - truth).norm() / truth.norm() < {torch.bfloat16: 3e-3}.get(dtype, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_padding_and_a_frozen_head(keep: bool) -> None:
    hidden, weight, labels, *grads = problem(130, 200, 1000)
    labels = labels.clamp(max=989)
    expected = exact(hidden, weight[:990], labels, *grads)
    actual = run(hidden, weight, labels, *grads, vocab_size=990, keep_probabilities=keep)
    assert not actual[3][990:].any()
    assert_accurate([*actual[:3], actual[3][:990]], expected)
    hidden.requires_grad_()
    out = linear_log_probs(hidden, weight, labels, vocab_size=990, keep_probabilities=keep)
    (grad_hidden,) = torch.autograd.grad(out, hidden, grads)
    torch.testing.assert_close(grad_hidden, actual[2])


@pytest.mark.gpu
def test_unaligned_and_strided_inputs() -> None:
    inputs = problem(64, 128, 1000)
    hidden = torch.cat((torch.zeros(1, device="cuda").bfloat16(), inputs[0].flatten()))[1:].view(64, 128)
    weight = inputs[1].T.contiguous().T
    assert hidden.data_ptr() % 16
    assert not weight.is_contiguous()
    assert_accurate(run(hidden, weight, *inputs[2:]), exact(*inputs))


@pytest.mark.gpu
def test_upstream_gradient_of_a_sum_and_none_of_the_entropy() -> None:
    hidden, weight, labels, *_ = problem(64, 128, 1000)
    hidden.requires_grad_()
    linear_log_probs(hidden, weight, labels).log_probs.sum().backward()
    truth = exact(hidden.detach(), weight, labels, torch.ones(64, device="cuda"), torch.zeros(64, device="cuda"))[2]
    assert (hidden.grad.double() - truth).norm() / truth.norm() < 3e-3


@pytest.mark.gpu
def test_never_waits_for_the_device() -> None:
    hidden, weight, labels, *grads = problem(130, 200, 1000)
    temperature = torch.tensor(0.7, device="cuda")
    for _ in range(2):  # the first compiles
        run(hidden, weight, labels, *grads, temperature=temperature)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(hidden, weight, labels, *grads, temperature=temperature)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_problem(
    num_tokens: int, hidden_size: int, vocab_size: int, **options: object
) -> tuple[Callable[[], LogProbs], list[Tensor], int]:
    """A call of the head after a first one, its upstream gradients, and the bytes of the gradients of its inputs."""
    hidden, weight, labels, *grads = problem(num_tokens, hidden_size, vocab_size)
    hidden.requires_grad_()
    weight.requires_grad_()
    call = partial(linear_log_probs, hidden, weight, labels, **options)
    torch.autograd.backward(call(), grads)
    hidden.grad = weight.grad = None
    return call, grads, hidden.nbytes + weight.nbytes


@pytest.mark.gpu
def test_memory_beyond_inputs_and_gradients() -> None:
    """At most 15 % of the bf16 logits; forward alone at most 5 %."""
    num_tokens, vocab_size = 4096, 128256
    call, grads, gradients = compiled_problem(num_tokens, 2048, vocab_size)
    torch.cuda.reset_peak_memory_stats()
    before, logits = torch.cuda.memory_allocated(), 2 * num_tokens * vocab_size
    out = call()
    assert torch.cuda.max_memory_allocated() - before <= 0.05 * logits
    torch.autograd.backward(out, grads)
    assert torch.cuda.max_memory_allocated() - before - gradients <= 0.15 * logits


@pytest.mark.gpu
def test_the_gradient_of_the_logits_takes_the_place_of_the_kept_probabilities() -> None:
    num_tokens, hidden_size = 4096, 1024
    call, grads, gradients = compiled_problem(num_tokens, hidden_size, 128256, keep_probabilities=True)
    out = call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.backward(out, grads)
    sums = 4 * num_tokens * hidden_size
    assert torch.cuda.max_memory_allocated() - before <= gradients + sums + 2**20


@pytest.mark.gpu
def test_kept_probabilities_change_no_value_and_gradients_within_rounding() -> None:
    hidden, weight, labels, advantages, _ = problem(300, 512, 5003)
    hidden.requires_grad_()
    weight.requires_grad_()

    def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return -(log_probs.exp() * advantages).mean() - 0.01 * entropy.mean()

    value = loss(*linear_log_probs(hidden, weight, labels, keep_probabilities=True))
    composed = loss(*linear_log_probs(hidden, weight, labels))
    assert torch.equal(value, composed)
    expected = torch.autograd.grad(composed, (hidden, weight))
    for retain_graph in (True, True, False):  # the last may write over what was saved
        actual = torch.autograd.grad(value, (hidden, weight), retain_graph=retain_graph)
        for mine, theirs in zip(actual, expected, strict=True):
            assert (mine.float() - theirs.float()).norm() / theirs.float().norm() < 5e-3


@pytest.mark.parametrize(("free", "keeps"), [(1.0, True), (0.6, False)])
def test_probabilities_are_kept_where_a_gpu_has_room(monkeypatch: pytest.MonkeyPatch, free: float, keeps: bool) -> None:
    """Room for 2 bytes of each probability, for the head's gradient twice, and for a tenth of the memory."""
    weight = torch.zeros(1000, 100, dtype=torch.bfloat16, requires_grad=True)
    assert not has_room(300, weight), "no GPU"
    total = 10**7
    needed = 2 * 300 * 1000 + (2 + 4) * 1000 * 100 + total // 10
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * needed) - 300, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    assert has_room(300, weight) is keeps


@pytest.mark.gpu
def test_probabilities_that_fit_are_kept() -> None:
    hidden, weight, labels, *_ = problem(300, 512, 5003)
    hidden.requires_grad_()
    gradients = []
    for keep in ("auto", True):
        value = linear_log_probs(hidden, weight, labels, keep_probabilities=keep).log_probs.sum()
        gradients += torch.autograd.grad(value, hidden)
    assert torch.equal(*gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_compiles_without_a_graph_break(keep: bool) -> None:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        out = linear_log_probs(hidden * 2, weight, labels, temperature=0.9, keep_probabilities=keep)
        return (out.log_probs.exp() + 0.1 * out.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True)
    for num_tokens in (65, 130):
        hidden, weight, labels, *_ = problem(num_tokens, 128, 1003)
        hidden.requires_grad_()
        weight.requires_grad_()
        eager = torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))
        for actual, expected in zip(
            torch.autograd.grad(compiled(hidden, weight, labels), (hidden, weight)), eager, strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def _tensor_parallel(group: ProcessGroup, inputs: list[Tensor], sequence_parallel: bool, keep: bool) -> list[Tensor]:
    hidden, weight, labels, *grads = (x.cuda() for x in inputs)
    weight = weight.chunk(group.size())[group.rank()]
    if sequence_parallel:
        hidden = hidden.chunk(group.size())[group.rank()]
    options = {"group": group, "sequence_parallel": sequence_parallel, "keep_probabilities": keep, "vocab_size": 5002}
    return [x.cpu() for x in run(hidden, weight, labels, *grads, **options)]


@pytest.mark.gpu(2)
def test_tensor_parallel() -> None:
    inputs = problem(260, 512, 5002)
    expected = [x.cpu() for x in exact(*inputs)]
    with RankPool(2, backend="nccl") as pool:
        for sequence_parallel, keep in ((False, False), (True, False), (True, True)):
            first, second = pool.run(_tensor_parallel, [x.cpu() for x in inputs], sequence_parallel, keep)
            for value, other in zip(first[:2], second[:2], strict=True):
                assert torch.equal(value, other)
            if not sequence_parallel:
                assert torch.equal(first[2], second[2])
            hidden = torch.cat((first[2], second[2])) if sequence_parallel else first[2]
            assert_accurate([*first[:2], hidden, torch.cat((first[3], second[3]))], expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_only_the_last_backward_of_a_graph_overwrites_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    overwritten = []

    def new_kept(hidden: Tensor, *_: int) -> fused.SavedTiles:
        return fused.SavedTiles(hidden.new_empty(3, 8), hidden.new_empty(1, 3, 3, dtype=torch.float32))

    def head_statistics(*arguments: Any) -> Tensor:
        return chunked.head_statistics(*arguments[:5])

    def head_gradients(*arguments: Any, saved: fused.SavedTiles, overwrite: bool, **options: Any) -> None:
        overwritten.append(overwrite)
        chunked.head_gradients(*arguments, **options)

    monkeypatch.setattr(fused, "supports", lambda *_: True)
    for stand_in in (new_kept, head_statistics, head_gradients):
        monkeypatch.setattr(fused, stand_in.__name__, stand_in)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_log_probs(hidden, weight, torch.arange(3), keep_probabilities=True).log_probs.sum()

    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    value = (torch.compile(loss, backend="aot_eager") if compiled else loss)(hidden, weight)
    gradients = [torch.autograd.grad(value, (hidden, weight), retain_graph=retain) for retain in (True, False)]
    assert overwritten == [False, not compiled]
    assert all(torch.equal(*both) for both in zip(*gradients, strict=True))


def test_the_cpu_takes_the_torch_path() -> None:
    assert not fused.supports(torch.zeros(4, 8).bfloat16(), torch.zeros(5, 8).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("shape", "top_n"), [((300, 512, 70000), 20), ((5, 64, 100), 64)])
def test_ranks_and_the_most_likely_tokens(shape: tuple[int, int, int], top_n: int, softcap: float | None) -> None:
    """Within fp32's errors of the logits; and without errors, in the order of ids, where small integers tie."""
    hidden, weight, labels, *_ = problem(*shape)
    temperature = torch.linspace(0.5, 2, len(hidden), device="cuda")
    options: dict[str, Any] = {"temperature": temperature, "logit_softcap": softcap}
    actual = linear_token_statistics(hidden, weight, labels, top_n=top_n, **options)
    ours = linear_log_probs(hidden, weight, labels, **options)
    torch.testing.assert_close((actual.log_probs, actual.entropy), tuple(ours), rtol=0, atol=0)
    logits = hidden.double() @ weight.double().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(actual.top_log_probs.double(), log_probs.topk(top_n).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(actual.top_log_probs.double(), log_probs.gather(1, actual.top_ids), rtol=0, atol=1e-4)
    assert all(len(set(row)) == top_n for row in actual.top_ids.tolist())
    of_label = log_probs.gather(1, labels.clamp(min=0)[:, None])
    least, most = ((log_probs > of_label + d).sum(1) + 1 for d in (1e-4, -1e-4))
    ranked = labels != IGNORE
    assert ((least <= actual.ranks) & (actual.ranks <= most))[ranked].all()
    assert (actual.ranks[~ranked] == 0).all()
    in_list = (actual.top_ids == labels[:, None]).any(1)
    assert ((actual.ranks <= top_n) == in_list)[ranked].all()

    hidden = torch.randint(-1, 2, hidden.shape, device="cuda").bfloat16()
    weight = torch.randint(-1, 2, weight.shape, device="cuda").bfloat16() / 4
    actual = linear_token_statistics(hidden, weight, labels, top_n=top_n)
    order = (hidden.double() @ weight.double().T).sort(dim=1, descending=True, stable=True).indices
    torch.testing.assert_close(actual.top_ids, order[:, :top_n])
    expected = 1 + (order == labels[:, None]).int().argmax(1)
    torch.testing.assert_close(actual.ranks, expected.masked_fill(~ranked, 0))
