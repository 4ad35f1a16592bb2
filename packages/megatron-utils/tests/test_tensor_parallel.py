"""Log-probs from sharded logits against torch on the whole vocabulary; responses against one sequence at a time."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.tensor_parallel import (
    response_log_probs,
    response_positions,
    response_slices,
    tensor_parallel_group,
)
from parallel_layers import PackedSequence, ParallelDims, next_token_labels, vocab_parallel_log_probs
from parallel_layers.testing import RankPool

V, H = 13, 6
LENGTHS = [5, 1, 4, 0]
RESPONSES = [2, 0, 3, 0]


def batch() -> PackedSequence:
    torch.manual_seed(0)
    return PackedSequence.from_sequences([torch.randint(0, V, (n,)) for n in LENGTHS], multiple_of=4)


def reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    chosen = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == -100, 0.0, chosen), entropy


def shard(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's part, zero-padded to equal parts."""
    size = -(-x.shape[dim] // group.size())
    padded = torch.cat(
        [x, x.new_zeros([size * group.size() - n if d == dim else n for d, n in enumerate(x.shape)])], dim
    )
    return padded.narrow(dim, group.rank() * size, size).contiguous()


def from_logits_on(group: ProcessGroup) -> tuple[Tensor, ...]:
    packed = batch()
    labels = next_token_labels(packed)
    logits = torch.randn(packed.num_tokens, V) * 3
    logits[2, 4] = logits[3, 0] = -torch.inf
    local = shard(logits, group, 1).requires_grad_()
    before = local.detach().clone()
    result = vocab_parallel_log_probs(local, labels, group=group, vocab_size=V)
    (result.log_probs * 2 - result.entropy).sum().backward()
    assert torch.equal(local.detach(), before)
    whole = logits.double().requires_grad_()
    log_probs, entropy = reference(whole, labels)
    torch.testing.assert_close(result.log_probs.double(), log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    finite = logits.clone().double().clamp(min=-1e4).requires_grad_()  # the reference's own gradient at -inf is NaN
    log_probs, entropy = reference(finite, labels)
    (log_probs * 2 - entropy).sum().backward()
    assert finite.grad is not None
    torch.testing.assert_close(local.grad, shard(finite.grad.float(), group, 1), rtol=1e-5, atol=1e-5)
    return result.log_probs, result.entropy


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_log_probs_from_sharded_logits(ranks: RankPool, tp: int) -> None:
    results = ranks.run(from_logits_on, world=tp)
    assert all(torch.equal(results[0][i], result[i]) for result in results for i in (0, 1))


def in_any_order_on(group: ProcessGroup, dtype: torch.dtype) -> None:
    packed = batch()
    labels = next_token_labels(packed)
    local = shard(torch.randn(packed.num_tokens, V).to(dtype) * 3, group, 1).requires_grad_()
    before = local.detach().clone()

    def log_probs() -> tuple[Tensor, ...]:
        return (vocab_parallel_log_probs(local, labels, group=group, vocab_size=V, entropy=False).log_probs,)

    def entropy() -> tuple[Tensor, ...]:
        return (vocab_parallel_log_probs(local, labels, group=group, vocab_size=V).entropy,)

    def both() -> tuple[Tensor, ...]:
        return tuple(vocab_parallel_log_probs(local, labels, group=group, vocab_size=V))

    def gradient() -> tuple[Tensor, ...]:
        result = vocab_parallel_log_probs(local, labels, group=group, vocab_size=V)
        return torch.autograd.grad(result.log_probs.sum() + result.entropy.sum(), local)

    calls = (log_probs, entropy, both, gradient)
    first = {call: call() for call in calls}
    assert torch.equal(first[log_probs][0], first[both][0])
    assert torch.equal(first[entropy][0], first[both][1])
    for order in itertools.permutations(calls):
        for call in order:
            assert all(torch.equal(one, other) for one, other in zip(call(), first[call], strict=True))
            assert torch.equal(local.detach().view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_keep_their_bits_in_any_order_of_calls(ranks: RankPool, dtype: torch.dtype, tp: int) -> None:
    ranks.run(in_any_order_on, dtype, world=tp)


def minus_infinity_on(group: ProcessGroup) -> None:
    """All of one rank's columns, all but one, and all but a few that lie apart, are impossible."""
    size = -(-V // group.size())
    torch.manual_seed(0)
    logits = torch.randn(group.size() + 2, V)
    for rank in range(group.size() - 1):
        logits[rank, rank * size : (rank + 1) * size] = -torch.inf
    logits[-3, :-1] = -torch.inf
    logits[-2, 1:-1] = -torch.inf
    logits[-1, 1:] = -torch.inf
    labels = logits.argmax(-1)
    local = shard(logits, group, 1).requires_grad_()
    result = vocab_parallel_log_probs(local, labels, group=group, vocab_size=V)
    (result.log_probs * 2 - result.entropy).sum().backward()
    finite = logits.double().clamp(min=-1e4).requires_grad_()
    log_probs, entropy = reference(finite, labels)
    (log_probs * 2 - entropy).sum().backward()
    torch.testing.assert_close(result.log_probs.double(), log_probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(local.grad, shard(finite.grad.float(), group, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_impossible_tokens_leave_everything_finite(ranks: RankPool, tp: int) -> None:
    ranks.run(minus_infinity_on, world=tp)


def large_vocabulary_on(group: ProcessGroup, vocabulary: int) -> None:
    torch.manual_seed(0)
    # From nearly uniform, whose entropy is a sum of many small numbers, to nearly certain.
    logits = (torch.randn(5, vocabulary) * torch.tensor([[0.01], [1.0], [4.0], [10.0], [100.0]])).bfloat16()
    result = vocab_parallel_log_probs(shard(logits, group, 1), torch.arange(5), group=group, vocab_size=vocabulary)
    log_probs, entropy = reference(logits, torch.arange(5))
    assert result.entropy is not None
    torch.testing.assert_close(result.entropy.double(), entropy, rtol=0, atol=1e-3)
    torch.testing.assert_close(result.log_probs.double(), log_probs, rtol=0, atol=1e-3)
    assert result.entropy.dtype == torch.float32


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("vocabulary", [32_000, 150_000])
def test_entropy_of_bf16_logits_over_a_large_vocabulary(ranks: RankPool, vocabulary: int, tp: int) -> None:
    ranks.run(large_vocabulary_on, vocabulary, world=tp)


def allocations(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result of a call and the bytes of all its allocations, custom operations included, largest first."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        result = call()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    return result, sorted((e.nbytes() for e in events if e.nbytes() > 0), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_temporary_is_one_chunk(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from parallel_layers.head import chunked

    chunk = 1 << 12
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", chunk)
    logits, labels = torch.randn(64, 512).to(dtype).requires_grad_(), torch.arange(64)
    result, forward = allocations(lambda: vocab_parallel_log_probs(logits, labels, group=None))
    # A chunk is computed with in fp32.
    assert forward[0] == 4 * chunk < logits.nbytes
    _, (gradient, *temporaries) = allocations(lambda: (result.log_probs.sum() + result.entropy.sum()).backward())
    assert gradient == logits.nbytes
    assert all(nbytes <= 4 * chunk for nbytes in temporaries)
    log_probs, entropy = reference(logits.detach(), labels)
    torch.testing.assert_close(result.log_probs.double(), log_probs, rtol=1e-5, atol=1e-5)
    assert result.entropy is not None
    torch.testing.assert_close(result.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def responses_on(group: ProcessGroup) -> None:
    packed = batch()
    torch.manual_seed(1)
    hidden, weight = torch.randn(packed.num_tokens, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    local = shard(weight.detach(), group, 0).requires_grad_()
    options = {"group": group, "vocab_size": V}
    fused = response_log_probs(packed, RESPONSES, hidden_TH=hidden, weight_VH=local, temperature=0.7, **options)
    plain = response_log_probs(packed, RESPONSES, logits_TV=(hidden @ local.T / 0.7).detach(), **options)
    sequences = packed.split(packed.input_ids)
    total = torch.zeros((), dtype=torch.float64)
    for ids, rows, response, one, other in zip(sequences, packed.split(hidden), RESPONSES, fused, plain, strict=True):
        # One by one, by the definition: the response's tokens given everything before each.
        start = len(ids) - response
        log_probs, entropy = (
            reference(rows[start - 1 : len(ids) - 1] @ weight.T / 0.7, ids[start:])
            if response
            else (
                torch.empty(0),
                torch.empty(0),
            )
        )
        for result in (one, other):
            torch.testing.assert_close(result.log_probs, log_probs.float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(result.entropy, entropy.float(), rtol=1e-5, atol=1e-5)
        total = total + (2 * log_probs - entropy).sum()
    expected = torch.autograd.grad(total, (hidden, weight))
    actual = torch.autograd.grad(sum((2 * part.log_probs - part.entropy).sum() for part in fused), (hidden, local))
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1], shard(expected[1], group, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_response_log_probs_shift_inside_each_sequence(ranks: RankPool, tp: int) -> None:
    ranks.run(responses_on, world=tp)


def test_response_slices() -> None:
    packed = batch()
    values = torch.arange(packed.num_tokens)
    assert [part.tolist() for part in response_slices(values, packed, RESPONSES)] == [[2, 3], [], [6, 7, 8], []]
    assert [part.dtype for part in response_positions(packed, RESPONSES)] == [torch.int64] * 4


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([2, 0, 4, 0], "sequence 2 has 4 tokens, so its response has 0 to 3, not 4"),
        ([2, 1, 3, 0], "sequence 1 has 1 tokens, so its response has 0 to 0, not 1"),
        ([2, 0, 3, 1], "sequence 3 has 0 tokens"),
        ([2, 0, -1, 0], "not -1"),
        ([2], "1 response lengths for 4 sequences"),
    ],
)
def test_impossible_responses_are_named(responses: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        response_positions(batch(), responses)


def test_response_log_probs_wants_one_source() -> None:
    packed = batch()
    logits = torch.zeros(packed.num_tokens, V)
    with pytest.raises(ValueError, match="give either logits_TV, or hidden_TH and weight_VH"):
        response_log_probs(packed, RESPONSES, group=None, logits_TV=logits, hidden_TH=logits, weight_VH=logits)
    with pytest.raises(ValueError, match=r"temperature=0\.5 applies to hidden_TH"):
        response_log_probs(packed, RESPONSES, group=None, logits_TV=logits, temperature=0.5)
    with pytest.raises(ValueError, match="values of 3 rows"):
        response_slices(torch.zeros(3), packed, RESPONSES)


def group_of_the_grid_on(group: ProcessGroup) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.testing import cpu_stand_in

    torch.manual_seed(0)
    logits, labels = torch.randn(4, V), torch.arange(4)
    expected, _ = reference(logits, labels)
    with cpu_stand_in():
        for dims in (ParallelDims(tp=2), ParallelDims(dp=2)):
            with megatron_grid(dims, ranks=range(2)) as grid:
                own = tensor_parallel_group()
                assert own is (grid.groups.tp if dims.tp == 2 else None)
                part = logits if own is None else shard(logits, own, 1)
                result = vocab_parallel_log_probs(part, labels, group=own, vocab_size=V)
                torch.testing.assert_close(result.log_probs.double(), expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match="no Megatron grid is active"):
            tensor_parallel_group()


def test_the_group_is_that_of_the_active_grid(ranks: RankPool) -> None:
    ranks.run(group_of_the_grid_on, world=2)
