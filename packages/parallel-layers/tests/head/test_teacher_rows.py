"""`linear_distillation` with heads sharded over groups of their own, against one rank: values and every gradient."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.head import (
    TeacherHead,
    TeacherSamples,
    TeacherTopK,
    chunked,
    linear_distillation,
    teacher_rows,
)
from parallel_layers.testing import RankPool

WORLD, TOKENS, VOCABULARY, TEACHER_VOCABULARY = 4, 24, 53, 61
KINDS: list[dict[str, Any]] = [
    {"divergence": "reverse_kl"},
    {"divergence": "jensen_shannon", "mixture": 0.3},
]


def problem() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "hidden": (TOKENS, 6),
        "weight": (VOCABULARY, 6),
        "teacher_hidden": (TOKENS, 9),
        "teacher_weight": (TEACHER_VOCABULARY, 9),
    }
    tensors = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    ids = torch.randperm(TEACHER_VOCABULARY, generator=generator)[:VOCABULARY]
    ids[::7] = -1
    return tensors | {"upstream": torch.randn(TOKENS, generator=generator, dtype=torch.float64), "ids": ids}


def shard(weight: Tensor, group: ProcessGroup | None, padding: int = 0) -> Tensor:
    """This rank's rows; `padding` rows more than needed on each rank."""
    if group is None:
        return weight
    rows = -(-len(weight) // group.size()) + padding
    padded = torch.cat((weight, weight.new_full((rows * group.size() - len(weight), weight.shape[1]), 9.0)))
    return padded[group.rank() * rows : (group.rank() + 1) * rows]


def unsharded(tensors: dict[str, Tensor], kind: dict[str, Any], mapped: bool) -> list[Tensor]:
    hidden, weight = (tensors[name].clone().requires_grad_() for name in ("hidden", "weight"))
    teacher_weight, ids = tensors["teacher_weight"], tensors["ids"] if mapped else None
    teacher = TeacherHead(tensors["teacher_hidden"], teacher_weight if mapped else teacher_weight[:VOCABULARY], ids=ids)
    temperature = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)
    value = linear_distillation(hidden, weight, teacher, temperature=temperature, **kind)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight), tensors["upstream"])]


def on_grids(
    world: ProcessGroup, tensors: dict[str, Tensor], sizes: tuple[int, int], mapped: bool, padding: int
) -> list[list[Tensor]]:
    """This rank's value, hidden gradient and rows' gradient, for each kind.

    Ranks of a tensor-parallel group of the student hold the same tokens, and other groups other tokens, as data and
    context parallelism have them.
    """
    student, teacher = (
        ParallelDims(dp=WORLD // size, tp=size).build_mesh("cpu", dist.get_process_group_ranks(world)) for size in sizes
    )
    group, teacher_group = (None if mesh["tp"].size() == 1 else mesh.get_group("tp") for mesh in (student, teacher))
    tokens = torch.arange(TOKENS).chunk(WORLD // sizes[0])[student.get_local_rank("dp")]
    sequence_parallel = group is not None
    teacher_divides = teacher_group is not None and sizes[1] <= sizes[0]
    hidden, teacher_hidden = tensors["hidden"][tokens], tensors["teacher_hidden"][tokens]
    if group is not None:
        hidden = hidden.chunk(group.size())[group.rank()]
    if teacher_group is not None and teacher_divides:
        teacher_hidden = teacher_hidden.chunk(teacher_group.size())[teacher_group.rank()]
    teacher_weight = tensors["teacher_weight"][: None if mapped else VOCABULARY]
    head = TeacherHead(
        teacher_hidden,
        shard(teacher_weight, teacher_group, padding),
        group=teacher_group,
        sequence_parallel=teacher_divides,
        vocab_size=len(teacher_weight),
        ids=tensors["ids"] if mapped else None,
    )
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.TILE_ELEMENTS, "cpu", 100)
        patch.setitem(teacher_rows.EXCHANGE_ELEMENTS, "cpu", 200)
        for kind in KINDS:
            leaves = [x.clone().requires_grad_() for x in (hidden, shard(tensors["weight"], group))]
            value = linear_distillation(
                *leaves, head, group=group, vocab_size=VOCABULARY, sequence_parallel=sequence_parallel,
                temperature=torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)[tokens], **kind,
            )  # fmt: skip
            gradients = torch.autograd.grad(value, leaves, tensors["upstream"][tokens])
            results.append([value.detach(), *gradients])
    return results


SIZES = list(product((1, 2, 4), repeat=2))


@pytest.mark.parametrize(
    ("sizes", "mapped", "padding"),
    [
        *((sizes, False, 0) for sizes in [(2, 4), (4, 2), (1, 4), (4, 4)]),
        ((2, 4), True, 0),
        ((4, 4), False, 2),
        *(
            pytest.param(sizes, mapped, padding, marks=pytest.mark.slow)
            for sizes, mapped, padding in product(SIZES, (False, True), (0, 1))
        ),
    ],
)
def test_groups_of_their_own(ranks: RankPool, sizes: tuple[int, int], mapped: bool, padding: int) -> None:
    """The student's tp, then the teacher's; with `padding` equal groups hold other rows, too."""
    tensors = problem()
    results = ranks.run(on_grids, tensors, sizes, mapped, padding, world=WORLD)
    groups = [results[first : first + sizes[0]] for first in range(0, WORLD, sizes[0])]
    for number, kind in enumerate(KINDS):
        value, grad_hidden, grad_weight = unsharded(tensors, kind, mapped)
        for group in groups:
            assert all(torch.equal(rank[number][0], group[0][number][0]) for rank in group)
        torch.testing.assert_close(torch.cat([group[0][number][0] for group in groups]), value, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([r[number][1] for r in results]), grad_hidden, rtol=0, atol=1e-12)
        whole = sum(torch.cat([rank[number][2] for rank in group]) for group in groups)
        torch.testing.assert_close(whole[:VOCABULARY], grad_weight, rtol=0, atol=1e-12)
        assert (whole[VOCABULARY:] == 0).all()


def other_teachers(group: ProcessGroup, tensors: dict[str, Tensor], sequence_parallel: bool) -> list[list[Tensor]]:
    """Listed and sampled tokens, with the student over `group` (of one rank: whole)."""
    log_probs, ids = (tensors["teacher_hidden"] @ tensors["teacher_weight"][:VOCABULARY].T).log_softmax(-1).topk(4)
    results = []
    for teacher, kind in (
        (TeacherTopK(ids, log_probs), KINDS[1]),
        (TeacherSamples(ids[:, 0], log_probs[:, 0]), KINDS[0]),
    ):
        hidden = tensors["hidden"].chunk(group.size())[group.rank()] if sequence_parallel else tensors["hidden"]
        leaves = [x.clone().requires_grad_() for x in (hidden, shard(tensors["weight"], group))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(chunked.TILE_ELEMENTS, "cpu", 100)
            value = linear_distillation(
                *leaves, teacher, group=group, vocab_size=VOCABULARY, sequence_parallel=sequence_parallel, **kind
            )
        results.append([value.detach(), *torch.autograd.grad(value, leaves, tensors["upstream"])])
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_listed_and_sampled_tokens(ranks: RankPool, world: int) -> None:
    tensors = problem()
    expected = ranks.run(other_teachers, tensors, False, world=1)[0]
    for sequence_parallel in (False, True):
        results = ranks.run(other_teachers, tensors, sequence_parallel, world=world)
        for number, (value, grad_hidden, grad_weight) in enumerate(expected):
            of_ranks = [rank[number] for rank in results]
            assert all(torch.equal(rank[0], of_ranks[0][0]) for rank in of_ranks)
            torch.testing.assert_close(of_ranks[0][0], value, rtol=0, atol=1e-12)
            hidden = torch.cat([rank[1] for rank in of_ranks]) if sequence_parallel else of_ranks[0][1]
            torch.testing.assert_close(hidden, grad_hidden, rtol=0, atol=1e-12)
            rows = torch.cat([rank[2] for rank in of_ranks])
            torch.testing.assert_close(rows[:VOCABULARY], grad_weight, rtol=0, atol=1e-12)
            assert (rows[VOCABULARY:] == 0).all()
