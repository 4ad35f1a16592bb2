"""When the parallel linears begin to communicate and need the result, and what they keep for the backward."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers import ColumnParallelLinear, RowParallelLinear
from parallel_layers.linear import transports
from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.testing import RankPool

TOKENS, IN, OUT = 8, 8, 16
LAYERS: dict[str, Any] = {"column": ColumnParallelLinear, "row": RowParallelLinear}


class Order(TorchDispatchMode):
    """Products, sums and communication, in the order in which they are begun; `wait`: the result is needed."""

    NAMES: ClassVar = {
        "mm": "product",
        "all_reduce_": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "_reduce_scatter_base_": "reduce_scatter",
        "wait_tensor": "wait",
    }

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.names += [self.NAMES[name]] if name in self.NAMES else []
        return func(*args, **(kwargs or {}))


def order_of_backward(group: ProcessGroup, sp: bool) -> list[str]:
    layer = ColumnParallelLinear(IN, OUT, placement=Placement(group, sp))
    y = layer(torch.randn(TOKENS, IN, requires_grad=True))
    with Order() as order:
        y.backward(torch.ones_like(y))
    return order.names


def test_backward_communicates_under_the_products(ranks: RankPool) -> None:
    """Each communication is begun before the product that hides it, and waited for after: nothing is left to luck."""
    assert ranks.run(order_of_backward, False, world=2)[0] == ["product", "all_reduce", "product", "wait"]
    gather_under_dx = ["all_gather", "product"]
    scatter_under_dw = ["reduce_scatter", "wait", "product", "wait"]  # the first wait is for what was gathered
    assert ranks.run(order_of_backward, True, world=2)[0] == gather_under_dx + scatter_under_dw


def order_of_overlap(group: ProcessGroup, kind: str, rows: int) -> tuple[list[str], list[str]]:
    size = group.size()
    layer = LAYERS[kind](
        IN, OUT, placement=Placement(group, sequence_parallel=True), execution=Execution(overlap="collectives")
    )
    x = torch.randn(rows * (size if kind == "row" else 1), IN // (size if kind == "row" else 1), requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "CHUNK_ROWS", 2)
        with Order() as forward:
            y = layer(x)
        with Order() as backward:
            y.backward(torch.ones_like(y))
    return forward.names, backward.names


def test_forward_communication_runs_under_the_products(ranks: RankPool) -> None:
    """What is sent, how often, and that each product is begun when something is on its way."""
    own_first = ["all_gather", "product", "wait", "product"]
    under_the_gradients = ["all_gather", "product", "reduce_scatter", "wait", "product", "wait"]
    assert ranks.run(order_of_overlap, "column", 9, world=2)[0] == (own_first, under_the_gradients)
    forward, backward = ranks.run(order_of_overlap, "column", 9, world=4)[0]
    assert forward == ["all_gather"] * 3 + ["product"] + ["wait", *["product"] * 3] * 3  # n - 1 chunks
    assert backward == under_the_gradients
    for rows, chunks in ((3, 2), (6, 3), (100, transports.MAX_SCATTERED)):
        forward, backward = ranks.run(order_of_overlap, "row", rows, world=2)[0]
        assert forward == ["product", "product", "reduce_scatter"] * chunks
        assert backward == [*own_first, "product"]


def saved_bytes(group: ProcessGroup) -> int:
    layer = ColumnParallelLinear(IN, OUT, placement=Placement(group, sequence_parallel=True))
    saved: list[Tensor] = []
    x = torch.randn(TOKENS // group.size(), IN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer(x)
    return sum(t.numel() for t in saved if t is not layer.weight)


def test_sequence_parallel_saves_only_its_own_tokens(ranks: RankPool) -> None:
    assert ranks.run(saved_bytes, world=4) == [TOKENS // 4 * IN] * 4
