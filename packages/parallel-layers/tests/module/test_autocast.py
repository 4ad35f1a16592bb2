"""torch.autocast around the head, and around the backwards of the layers: what is rounded by it, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    linear_log_probs,
)
from parallel_layers.attention.context_parallel.ring import ring_attention
from parallel_layers.invariant import linear_log_probs as invariant_log_probs
from parallel_layers.linear.execution import Placement
from parallel_layers.testing import RankPool

TOKENS, HIDDEN, VOCABULARY = 8, 16, 40
BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def head_results(
    function: Callable[..., tuple[Tensor, Tensor]], group: ProcessGroup | None, where: str, *dtypes: torch.dtype
) -> list[Tensor]:
    """Values and fp32 gradients of the head, whose inputs are rounded to `dtypes` first, under autocast `where`."""
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    hidden = numbers(TOKENS, HIDDEN).requires_grad_()
    weight = numbers(VOCABULARY, HIDDEN, seed=1).chunk(size)[rank].clone().requires_grad_()
    labels = torch.arange(TOKENS) * 5
    inputs = (x.to(dtype) for x, dtype in zip((hidden, weight), dtypes, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "nowhere"):
        out = function(*inputs, labels, group=group, vocab_size=VOCABULARY)
        if where == "in both":
            (out[0].sum() + out[1].sum()).backward()
    if where != "in both":
        (out[0].sum() + out[1].sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [out[0].detach(), out[1].detach(), hidden.grad, weight.grad]


def heads_differ(group: ProcessGroup | None, function: Callable[..., tuple[Tensor, Tensor]]) -> list[str]:
    """Where results under autocast are not those of a head in bf16, bit for bit, whose results are fp32."""
    wide, narrow = torch.float32, torch.bfloat16
    expected = head_results(function, group, "nowhere", narrow, narrow)
    wrong = []
    for where in ("in the forward", "in both"):
        for dtypes in ((wide, wide), (narrow, wide), (wide, narrow)):
            found = head_results(function, group, where, *dtypes)
            if not all(x.dtype == wide and torch.equal(x, y) for x, y in zip(found, expected, strict=True)):
                wrong.append(f"{where} {dtypes}")
    return wrong


@pytest.mark.parametrize("function", [linear_log_probs, invariant_log_probs])
def test_the_head_is_a_head_in_bf16(ranks: RankPool, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    assert heads_differ(None, function) == []
    assert ranks.run(heads_differ, function, world=2) == [[], []]


def test_mixed_dtypes_in_the_head_are_refused_outside() -> None:
    with pytest.raises(
        ValueError, match=r"bfloat16\) and head \(torch.float32\) .* run the model under torch.autocast"
    ):
        linear_log_probs(numbers(2, 4).bfloat16(), numbers(8, 4), torch.zeros(2, dtype=torch.int64))


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **options: ColumnParallelLinear(HIDDEN, 8, **options),
    "qkv": lambda **options: QKVParallelLinear(HIDDEN, 4, 1, 4, **options),  # the KV head is on both ranks
    "row": lambda **options: RowParallelLinear(2 * HIDDEN, 8, **options),
}


def linears_differ(group: ProcessGroup, kind: str) -> list[str]:
    """Which gradients are others when the backward runs under autocast, of layers in fp32 and in bf16."""
    wrong = []
    for sequence_parallel in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            layer = LAYERS[kind](placement=Placement(group, sequence_parallel), bias=True, dtype=dtype)
            x = numbers(TOKENS, HIDDEN).to(dtype).requires_grad_()
            leaves = {"x": x, **dict(layer.named_parameters())}
            y = layer(x)
            outside = torch.autograd.grad(y, [*leaves.values()], torch.ones_like(y) / 3, retain_graph=True)
            with BF16:
                inside = torch.autograd.grad(y, [*leaves.values()], torch.ones_like(y) / 3)
            same = zip(leaves, outside, inside, strict=True)
            wrong += [f"{name} {dtype} {sequence_parallel}" for name, a, b in same if not torch.equal(a, b)]
    return wrong


@pytest.mark.parametrize("kind", LAYERS)
def test_a_backward_under_autocast_is_its_forwards(ranks: RankPool, kind: str) -> None:
    assert ranks.run(linears_differ, kind, world=2) == [[], []]


def refuse_mixed(group: ProcessGroup) -> list[str]:
    messages = []
    for layer in (
        RowParallelLinear(8, 4, placement=Placement(group)),
        ColumnParallelLinear(4, 4, placement=Placement(group)),
    ):
        with pytest.raises(ValueError, match=r"under torch\.autocast") as error:
            layer(torch.ones(2, 4, dtype=torch.bfloat16))
        messages.append(str(error.value))
    return messages


def test_mixed_dtypes_in_a_linear_are_refused_outside(ranks: RankPool) -> None:
    for messages in ranks.run(refuse_mixed, world=2):
        assert all(message.startswith("x is torch.bfloat16 and the weight torch.float32") for message in messages)


def rings_differ(group: ProcessGroup) -> list[bool]:
    q, k, v = (numbers(4, 2, 8, seed=seed).requires_grad_() for seed in range(3))
    out = ring_attention(q, k, v, torch.tensor([0, 3, 8], dtype=torch.int32), 5, group=group)
    outside = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with BF16:
        inside = torch.autograd.grad(out.sum(), (q, k, v))
    return [not torch.equal(a, b) for a, b in zip(outside, inside, strict=True)]


def test_the_rings_backward_under_autocast(ranks: RankPool) -> None:
    assert ranks.run(rings_differ, world=2) == [[False] * 3] * 2
