"""The vocabulary-parallel embedding against torch's embedding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.head import embedding
from parallel_layers.head.embedding import VocabParallelEmbedding
from parallel_layers.head.vocabulary import vocab_range
from parallel_layers.kernels.embedding import embedding_gradient
from parallel_layers.module.sharding import load_full_
from parallel_layers.testing import RankPool
from parallel_layers.training.weight_gradients import sum_in_place_

HIDDEN = 6


def embed(
    group: ProcessGroup | None, table: Tensor, ids: Tensor, dy: Tensor, sp: bool, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    layer = VocabParallelEmbedding(
        len(table), HIDDEN, group=group, sequence_parallel=sp, dtype=table.dtype, device=device
    )
    load_full_(layer, {"weight": table})
    y = layer(ids.to(device))
    if sp and group is not None:
        dy = dy.chunk(group.size())[group.rank()]
    y.backward(dy.to(device))
    assert layer.weight.grad is not None
    return y, layer.weight.grad


QUICK = [((8,), 9, 2, False), ((8, 2), 9, 2, True), ((8,), 3, 4, True), ((8, 2), 12, 4, False), ((8,), 12, 1, True)]
EVERY = itertools.product([(8,), (8, 2)], [12, 9, 3], [1, 2, 4], [False, True])


@pytest.mark.parametrize(
    ("shape", "vocab", "world", "sp"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK)],
)
def test_rows_and_their_gradients(ranks: RankPool, shape: tuple[int, ...], vocab: int, world: int, sp: bool) -> None:
    table = torch.randn(vocab, HIDDEN).requires_grad_()
    ids = torch.randint(vocab, shape)
    dy = torch.randn(*shape, HIDDEN)
    y = F.embedding(ids, table)
    y.backward(dy)
    assert table.grad is not None
    results = ranks.run(embed, table.detach(), ids, dy, sp, world=world)
    rows = -(-vocab // world)
    grad = F.pad(table.grad, (0, 0, 0, rows * world - vocab))
    for rank, (output, gradient) in enumerate(results):
        assert torch.equal(output, y.detach().chunk(world)[rank] if sp else y.detach())
        torch.testing.assert_close(gradient, grad[rank * rows : (rank + 1) * rows])


def test_without_a_group() -> None:
    table, ids = torch.randn(5, HIDDEN), torch.tensor([4, 0, 4])
    y, _ = embed(None, table, ids, torch.ones(3, HIDDEN), True)
    assert torch.equal(y, table[ids])


def id_outside(group: ProcessGroup | None, vocab: int, bad: int) -> str:
    layer = VocabParallelEmbedding(vocab, HIDDEN, group=group)
    with pytest.raises(ValueError, match="outside the vocabulary") as caught:
        layer(torch.tensor([0, 1, bad]))
    return str(caught.value)


@pytest.mark.parametrize("bad", [-1, 9, 10, 100])
def test_an_id_outside_the_vocabulary_raises_everywhere_alike(ranks: RankPool, bad: int) -> None:
    """At tp 4 the ids 9 and 10 have padding rows: those are outside, too."""
    expected = (
        f"token id {bad} at index [2] is outside the vocabulary 0..8; check that the tokenizer belongs to the model"
    )
    assert id_outside(None, 9, bad) == expected
    assert ranks.run(id_outside, 9, bad, world=4) == [expected] * 4


def compiled(group: ProcessGroup, sp: bool) -> list[bool]:
    torch._dynamo.reset()
    layer = VocabParallelEmbedding(9, HIDDEN, group=group, sequence_parallel=sp)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    equal = []
    for tokens in (8, 12):
        ids = torch.arange(tokens) % 9
        values = []
        for run in (layer, fast):
            y = run(ids)
            (grad,) = torch.autograd.grad(y.square().sum(), [layer.weight])
            values.append((y, grad))
        torch.testing.assert_close(values[0], values[1])
        equal.append(True)
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True])
def test_compiles_without_a_graph_break(ranks: RankPool, sp: bool) -> None:
    assert ranks.run(compiled, sp, world=2) == [[True, True]] * 2


def ranges(group: ProcessGroup) -> list[tuple[int, int]]:
    return [vocab_range(vocab, group) for vocab in (8, 9, 2)]


def test_vocabulary_ranges(ranks: RankPool) -> None:
    assert vocab_range(9, None) == (0, 9)
    assert [r[1] for r in ranks.run(ranges)] == [(0, 3), (3, 6), (6, 9), (9, 9)]
    assert [r[2] for r in ranks.run(ranges)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("sp", [False, True])
def test_two_gpus(nccl_ranks: RankPool, sp: bool) -> None:
    table, ids, dy = torch.randn(9, HIDDEN), torch.randint(9, (8,)), torch.randn(8, HIDDEN)
    for rank, (y, _) in enumerate(nccl_ranks.run(embed, table, ids, dy, sp, "cuda")):
        assert torch.equal(y, table[ids].chunk(2)[rank] if sp else table[ids])


def test_a_16_bit_table_gets_the_fp32_gradient_that_its_parameter_asks_for() -> None:
    table = VocabParallelEmbedding(5, 2, dtype=torch.bfloat16)
    ids = torch.tensor([3] * 300 + [1])
    table(ids).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.dtype == torch.bfloat16
    # In bf16 256 + 1 is 256.
    assert table.weight.grad[3].tolist() == [300.0, 300.0]
    table.weight.grad, table.weight.grad_dtype = None, torch.float32
    table(torch.tensor([3] * 257)).sum().backward()
    assert table.weight.grad.dtype == torch.float32
    assert table.weight.grad.tolist() == [[0, 0], [0, 0], [0, 0], [257, 257], [0, 0]]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_micro_batches_add_to_the_gradient_in_place(place: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of three micro-batches are those of autograd; only the first makes a dense gradient."""
    sums, dense = [], list[int]()

    def counted(*arguments: Any) -> Tensor:
        dense.append(1)
        return embedding_gradient(*arguments)

    monkeypatch.setattr(embedding, "embedding_gradient", counted)
    for in_place in (False, True):
        torch.manual_seed(0)
        table = VocabParallelEmbedding(300, 24, dtype=torch.bfloat16, device=place)
        table.weight.grad_dtype = torch.float32
        if in_place:
            sum_in_place_(table.parameters())
        dense.clear()
        for number in range(3):
            ids = torch.randint(300, (70,), generator=torch.Generator().manual_seed(number)).to(place)
            out = table(ids)
            (F.linear(out, table.weight) if tied else out).float().square().sum().backward()
        assert len(dense) == (1 if in_place else 3)
        sums.append(table.weight.grad)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=1e-6)
