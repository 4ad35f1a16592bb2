"""Every collective: its values, its conjugate to 1e-12, second derivatives, untouched inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives, collectives
from parallel_layers.testing import RankPool

Ranks = list[Tensor]


def each_part(x: Ranks, dim: int) -> Ranks:
    return [part.clone() for part in x[0].chunk(len(x), dim)]


def every(x: Ranks, y: Tensor) -> Ranks:
    return [y] * len(x)


def exchange(x: Ranks, split_dim: int, concat_dim: int) -> Ranks:
    parts = [t.chunk(len(x), split_dim) for t in x]
    return [torch.cat([p[r] for p in parts], concat_dim) for r in range(len(x))]


@dataclass(frozen=True)
class Case:
    """A collective, what it computes from the ranks' inputs, and whether inputs and outputs are replicated."""

    name: str
    expected: Callable[[Ranks], Ranks]
    replicated_input: bool = False
    replicated_output: bool = False
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.kwargs)])


CASES = [
    Case("copy_to_tensor_parallel", lambda x: x, replicated_input=True),
    Case("reduce_from_tensor_parallel", lambda x: every(x, sum(x[1:], x[0])), replicated_output=True),
    Case("scatter_to_tensor_parallel", lambda x: each_part(x, -1), replicated_input=True),
    Case("gather_from_tensor_parallel", lambda x: every(x, torch.cat(x, -1)), replicated_output=True),
    Case(
        "gather_from_tensor_parallel",
        lambda x: every(x, torch.cat(x, -1)),
        kwargs=(("reduce_gradient", True),),
    ),
    Case(
        "reduce_scatter_to_tensor_parallel",
        lambda x: each_part(every(x, sum(x[1:], x[0])), -1),
    ),
    Case("scatter_to_sequence_parallel", lambda x: each_part(x, 0), replicated_input=True),
    Case("gather_from_sequence_parallel", lambda x: every(x, torch.cat(x))),
    Case(
        "gather_from_sequence_parallel",
        lambda x: every(x, torch.cat(x)),
        replicated_output=True,
        kwargs=(("reduce_gradient", False),),
    ),
    Case(
        "reduce_scatter_to_sequence_parallel",
        lambda x: each_part(every(x, sum(x[1:], x[0])), 0),
    ),
    Case("all_to_all", lambda x: exchange(x, 0, 0)),
    Case("all_to_all", lambda x: exchange(x, -1, 0), kwargs=(("split_dim", -1), ("concat_dim", 0))),
    Case("all_to_all", lambda x: exchange(x, 0, -1), kwargs=(("split_dim", 0), ("concat_dim", -1))),
]
CASE_IDS = [str(case) for case in CASES]


def apply(group: ProcessGroup | None, case_index: int, x: Tensor) -> Tensor:
    case = CASES[case_index]
    return getattr(collectives, case.name)(x, group, **dict(case.kwargs))


def differentiate(
    group: ProcessGroup,
    case_index: int,
    inputs: Ranks,
    cotangents: Ranks,
    tangents: Ranks,
    transposed: bool = False,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Forward, backward and the backward's derivative; raises when any of them changes what it was given."""
    x, g, v = (tensors[group.rank()].to(device, copy=True) for tensors in (inputs, cotangents, tangents))
    if transposed:
        x, g, v = (t.movedim(0, -1).contiguous().movedim(-1, 0) for t in (x, g, v))
    copies = [t.clone() for t in (x, g, v)]
    x.requires_grad_()
    g.requires_grad_()
    y = apply(group, case_index, x)
    (gx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (again,) = torch.autograd.grad(gx, g, v)
    for tensor, copy in zip((x, g, v), copies, strict=True):
        torch.testing.assert_close(tensor.detach(), copy, rtol=0, atol=0)
    return {"forward": y, "backward": gx, "second": again}


def random_ranks(
    shapes: list[tuple[int, ...]], replicated: bool, seed: int, dtype: torch.dtype = torch.float64
) -> Ranks:
    """Normal numbers; in the other dtypes small integers, whose sums are exact in all of them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if dtype != torch.float64:
        tensors = [(2 * t).round().clamp(-8, 8).to(dtype) for t in tensors]
    return every(tensors, tensors[0]) if replicated else tensors


def inner(a: Ranks, b: Ranks, replicated: bool) -> float:
    """A replicated vector is one vector; otherwise the ranks' vectors are the parts of one."""
    pairs = list(zip(a, b, strict=True))[: 1 if replicated else None]
    return sum(float((x.double() * y.double()).sum()) for x, y in pairs)


def check(
    run: Callable[..., list[dict[str, Tensor]]],
    case_index: int,
    world: int,
    shape: tuple[int, ...],
    transposed: bool,
    dtype: torch.dtype = torch.float64,
) -> None:
    case = CASES[case_index]
    shapes = [shape] * world
    x = random_ranks(shapes, case.replicated_input, 0, dtype)
    expected = case.expected(x)
    g = random_ranks([tuple(t.shape) for t in expected], case.replicated_output, 1, dtype)
    v = random_ranks(shapes, case.replicated_input, 2, dtype)
    results = run(differentiate, case_index, x, g, v, transposed)
    torch.testing.assert_close([r["forward"] for r in results], expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close([r["second"] for r in results], case.expected(v), rtol=1e-14, atol=1e-14)
    if case.replicated_input:
        for result in results:
            assert torch.equal(result["backward"], results[0]["backward"])
    forward = inner([r["forward"] for r in results], g, case.replicated_output)
    backward = inner(x, [r["backward"] for r in results], case.replicated_input)
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case_index", range(len(CASES)), ids=CASE_IDS)
def test_values_and_conjugates(ranks: RankPool, case_index: int, world: int) -> None:
    check(partial(ranks.run, world=world), case_index, world, (8, 3, 4), transposed=False)


@settings(max_examples=40, deadline=None)
@given(
    case_index=st.integers(0, len(CASES) - 1),
    world=st.integers(1, 4),
    first=st.integers(0, 2),
    middle=st.lists(st.integers(0, 3), max_size=2),
    last=st.integers(0, 2),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shape_dtype_and_group(
    ranks: RankPool,
    case_index: int,
    world: int,
    first: int,
    middle: list[int],
    last: int,
    transposed: bool,
    dtype: torch.dtype,
) -> None:
    shape = (first * world, *middle, last * world)
    check(partial(ranks.run, world=world), case_index, world, shape, transposed, dtype)


def differentiate_compiled(
    group: ProcessGroup, inputs: list[tuple[int, list[Ranks]]]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(compiled, eager) outputs and gradients of all cases, in one graph, at each length."""

    def eager(xs: list[Tensor]) -> list[Tensor]:
        return [apply(group, index, x) for (index, _), x in zip(inputs, xs, strict=True)]

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    pairs = []
    for length in range(2):
        results = []
        for function in (compiled, eager):
            xs = [lengths[length][group.rank()].clone().requires_grad_() for _, lengths in inputs]
            ys = function(xs)
            seeds = [y.detach().cos() for y in ys]
            results.append([*(y.detach() for y in ys), *torch.autograd.grad(ys, xs, seeds)])
        pairs.append((results[0], results[1]))
    return pairs


# A compiled case holds two maps, that of the forward and its conjugate: these hold all but two ways of all_to_all.
COMPILED = [0, 3, 5, 7, 8, 11]


@pytest.mark.slow
@pytest.mark.parametrize("indices", [COMPILED, list(range(len(CASES)))], ids=["some", "all"])
def test_compiled_at_two_lengths(ranks: RankPool, indices: list[int]) -> None:
    inputs = [
        (index, [random_ranks([(n, 3, 4)] * 2, CASES[index].replicated_input, n) for n in (8, 12)]) for index in indices
    ]
    for pairs in ranks.run(differentiate_compiled, inputs, world=2):
        assert len(pairs) == 2
        for compiled, eager in pairs:
            torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def exchange_unevenly(group: ProcessGroup, counts: list[list[int]], split_dim: int, x: Ranks) -> tuple[Tensor, Tensor]:
    """Row r of `counts`: what rank r sends to each rank; along one dim."""
    mine = x[group.rank()].clone().requires_grad_()
    y = collectives.all_to_all(
        mine,
        group,
        split_dim=split_dim,
        concat_dim=split_dim,
        input_sizes=counts[group.rank()],
        output_sizes=[row[group.rank()] for row in counts],
    )
    (back,) = torch.autograd.grad(y, mine, y.detach())
    return y, back


@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_all_to_all_along_one_dim(ranks: RankPool, dim: int) -> None:
    check_uneven(ranks, [[1, 0, 3], [0, 0, 2], [2, 2, 0]], dim)


def check_uneven(ranks: RankPool, counts: list[list[int]], dim: int) -> None:
    x = [torch.randn(sum(row), 3) if dim == 0 else torch.randn(3, sum(row)) for row in counts]
    parts = [t.split(row, dim) for t, row in zip(x, counts, strict=True)]
    results = ranks.run(exchange_unevenly, counts, dim, x, world=len(counts))
    for rank, (y, back) in enumerate(results):
        torch.testing.assert_close(y, torch.cat([p[rank] for p in parts], dim), rtol=0, atol=0)
        torch.testing.assert_close(back, x[rank], rtol=0, atol=0)  # a permutation's transpose is its inverse


@settings(max_examples=20, deadline=None)
@given(data=st.data(), world=st.integers(1, 4), dim=st.sampled_from([0, 1, -1]))
def test_any_counts_of_an_all_to_all(ranks: RankPool, data: st.DataObject, world: int, dim: int) -> None:
    row = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    check_uneven(ranks, data.draw(st.lists(row, min_size=world, max_size=world)), dim)


def ulysses_unevenly(group: ProcessGroup, tokens: list[int], heads: list[int], x: Ranks) -> tuple[Tensor, Tensor]:
    mine = x[group.rank()].clone().requires_grad_()
    y = collectives.all_to_all(mine, group, split_dim=1, concat_dim=0, input_sizes=heads, output_sizes=tokens)
    (back,) = torch.autograd.grad(y, mine, y.detach())
    return y, back


def test_uneven_all_to_all_from_tokens_to_heads(ranks: RankPool) -> None:
    tokens, heads = [3, 0, 2], [1, 2, 1]
    x = [torch.randn(t, sum(heads), 2) for t in tokens]
    for rank, (y, back) in enumerate(ranks.run(ulysses_unevenly, tokens, heads, x, world=3)):
        torch.testing.assert_close(y, torch.cat(x).split(heads, 1)[rank], rtol=0, atol=0)
        torch.testing.assert_close(back, x[rank], rtol=0, atol=0)


def sum_in_every_dtype(group: ProcessGroup) -> dict[torch.dtype, Tensor]:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    return {d: collectives.reduce_from_tensor_parallel(torch.arange(3).to(d), group) for d in dtypes}


def test_dtypes(ranks: RankPool) -> None:
    for result in ranks.run(sum_in_every_dtype, world=2):
        for dtype, total in result.items():
            assert total.dtype == dtype
            assert total.tolist() == [0, 2, 4]


def gather_in_every_dtype(group: ProcessGroup) -> dict[torch.dtype, Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128)
    return {d: async_collectives.all_gather(torch.arange(3).to(d) * group.rank(), group) for d in dtypes}


def test_dtypes_of_gathers(ranks: RankPool) -> None:
    for gathered in ranks.run(gather_in_every_dtype, world=2):
        for dtype, whole in gathered.items():
            assert torch.equal(whole, torch.tensor([0, 0, 0, 0, 1, 2]).to(dtype)), dtype


def gather_many_at_once(group: ProcessGroup) -> None:
    x = torch.arange(2.0)
    for _ in range(4000):
        for gathered in [async_collectives.start_all_gather(x, group) for _ in range(64)]:
            assert async_collectives.wait(gathered).shape == x.shape


@pytest.mark.slow
def test_gathers_that_complete_at_once(ranks: RankPool) -> None:
    """Without `prepare_gloo`, gloo's threads free memory twice when two of torch's gathers complete at once."""
    ranks.run(gather_many_at_once, world=1)


def operators_of_a_gather(group: ProcessGroup) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        async_collectives.wait(async_collectives.start_all_gather(torch.arange(2.0), group))
    return {event.key for event in profile.key_averages() if event.key.startswith("c10d::")}


def test_gathers_have_a_name_that_takes_no_memory(ranks: RankPool) -> None:
    """The coalesced one is that of the test above."""
    assert ranks.run(operators_of_a_gather, world=1) == [{"c10d::_allgather_base_"}]


@pytest.mark.parametrize("case_index", range(len(CASES)), ids=CASE_IDS)
def test_without_a_group_it_is_the_identity(case_index: int) -> None:
    x = torch.randn(3, 5)
    assert apply(None, case_index, x) is x


def indivisible(group: ProcessGroup) -> list[str]:
    messages = []
    for index in (2, 5, 6, 9, 10):
        with pytest.raises(ValueError, match="not divisible by the group's 2 ranks") as caught:
            apply(group, index, torch.zeros(3, 5))
        messages.append(str(caught.value))
    for sizes in (
        {"input_sizes": [1, 1]},
        {"input_sizes": [3]},
        {"input_sizes": [4, -1], "output_sizes": [1, 1]},
        {"split_dim": 1, "input_sizes": [4, 1], "output_sizes": [1, 1]},
    ):
        with pytest.raises(ValueError, match="output_sizes=") as caught:
            collectives.all_to_all(torch.zeros(3, 5), group, **sizes)
        messages.append(str(caught.value))
    return messages


def test_what_does_not_divide_is_refused(ranks: RankPool) -> None:
    first, second = ranks.run(indivisible, world=2)
    assert first[0].startswith("dim 1 of a tensor of shape (3, 5)")
    assert first[2].startswith("dim 0 of a tensor of shape (3, 5)")
    assert len(first) == len(second) == 9


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case_index", range(len(CASES)), ids=CASE_IDS)
def test_nccl_equals_gloo(ranks: RankPool, nccl_ranks: RankPool, case_index: int) -> None:
    case = CASES[case_index]
    x = random_ranks([(8, 3, 4)] * 2, case.replicated_input, 0)
    g = random_ranks([tuple(t.shape) for t in case.expected(x)], case.replicated_output, 1)
    on_cpu = ranks.run(differentiate, case_index, x, g, x, world=2)
    on_cuda = nccl_ranks.run(differentiate, case_index, x, g, x, device="cuda")
    torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-14, atol=1e-14)
