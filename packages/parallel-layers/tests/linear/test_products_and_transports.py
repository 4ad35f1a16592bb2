"""Every product with every transport: outputs and all gradients are those of the layer that is not divided."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Any, get_args

import pytest
import torch
from cpu_peer_memory import peer_memory_on_cpu
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel_layers.linear import Execution, Overlap, Placement, transports
from parallel_layers.linear.invariant import InvariantProduct
from parallel_layers.linear.products import PLAIN, Product
from parallel_layers.sharding import blocks_of, load_full_
from parallel_layers.testing import RankPool

IN, OUT, TOKENS = 16, 32, 12


class OwnBackward(Product):
    """A product with a backward of its own, as that of Transformer Engine."""

    differentiable = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        assert bias is None
        assert dtype is None
        return F.linear(x, weight)


PRODUCTS: dict[str, Any] = {
    "plain": lambda row, size: PLAIN,
    "invariant": lambda row, size: InvariantProduct(4 // size if row else None),
    "with its own backward": lambda row, size: OwnBackward(),
}
LAYERS: dict[str, Any] = {
    "column": lambda **options: ColumnParallelLinear(IN, OUT, **options),
    "qkv": lambda **options: QKVParallelLinear(IN, 8, 4, 2, **options),
    "row": lambda **options: RowParallelLinear(IN, OUT, **options),
}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"y": y.detach(), "x": gradients[0], **dict(zip(parameters, gradients[1:], strict=True))}


def check(group: ProcessGroup, kind: str, multiply: str) -> None:
    """Compare each transport with `F.linear` of the full weight in fp64."""
    full = {"weight": numbers(OUT, IN, seed=1), "bias": numbers(OUT, seed=2)}
    x, dy = numbers(TOKENS, 3, IN, seed=3), numbers(TOKENS, 3, OUT, seed=4)
    leaves = [t.double().requires_grad_() for t in (x, full["weight"], full["bias"])]
    whole_y = F.linear(*leaves)
    whole_dx, whole_dw, whole_db = torch.autograd.grad(whole_y, leaves, dy.double())
    row, rank, size = kind == "row", group.rank(), group.size()

    def tokens(t: Tensor) -> Tensor:
        return t.chunk(size)[rank]

    def columns(t: Tensor) -> Tensor:
        return t.chunk(size, -1)[rank]

    def rows(t: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([t.movedim(dim, 0)[where[0]] for _, where in blocks_of(layer, "weight")]).movedim(0, dim)

    for overlap, sp in product(get_args(Overlap), (False, True)):
        execution = Execution(overlap=overlap, product=PRODUCTS[multiply](row, size))
        layer = LAYERS[kind](bias=True, placement=Placement(group, sp), execution=execution)
        load_full_(layer, full)
        expected = {
            "y": whole_y.detach() if row else rows(whole_y.detach(), -1),
            "x": columns(whole_dx) if row else whole_dx,
            "weight": columns(whole_dw) if row else rows(whole_dw),
            "bias": whole_db if row else rows(whole_db),
        }
        mine, seed = (columns(x), dy) if row else (x, rows(dy, -1))
        if sp and row:
            seed, expected["y"] = tokens(seed), tokens(expected["y"])
        elif sp:
            mine, expected["x"] = tokens(mine), tokens(expected["x"])
        with ExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(transports, "CHUNK_ROWS", 2)
            called = stack.enter_context(peer_memory_on_cpu())
            found = run(layer, mine, seed)
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name].double(),
                value,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, at=(overlap, sp, name): f"{at}: {text}",
            )
        assert bool(called) == (sp and overlap == "symmetric-memory" and multiply == "plain")


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("multiply", PRODUCTS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_the_undivided_layer(ranks: RankPool, world: int, multiply: str, kind: str) -> None:
    ranks.run(check, kind, multiply, world=world)
