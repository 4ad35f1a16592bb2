"""Every product with every transport: outputs and all gradients are those of the layer that is not divided."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, nullcontext
from itertools import product
from typing import Any, get_args

import cpu_quack
import pytest
import torch
from cpu_peer_memory import peer_memory_on_cpu
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel_layers.linear import transports
from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.linear.invariant import InvariantProduct
from parallel_layers.linear.products import PLAIN, Product, add_product_
from parallel_layers.linear.transports import Overlap
from parallel_layers.model.lora import add_lora_
from parallel_layers.model.options import LoraOptions
from parallel_layers.module.sharding import blocks_of, load_full_
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


def close(found: dict[str, Tensor], expected: dict[str, Tensor], where: object) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0.02, atol=0.02, msg=lambda text, at=(where, name): f"{at}: {text}"
        )


def check_quack(group: ProcessGroup | None, kind: str) -> None:
    """Compare every transport with itself by torch, and look at the products that quack made."""
    size, rank, row = 1 if group is None else group.size(), 0 if group is None else group.rank(), kind == "row"
    x = numbers(TOKENS, 3, IN, seed=1).to(torch.bfloat16)
    for overlap, sp in product(get_args(Overlap), (False, True) if group is not None else (False,)):
        layer = LAYERS[kind](
            dtype=torch.bfloat16,
            placement=Placement(group, sp),
            execution=Execution(overlap=overlap, reduce_dtype=torch.bfloat16),
        )
        mine = x.chunk(size, -1)[rank] if row else x
        mine = mine.chunk(size)[rank] if sp and not row else mine
        with ExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(transports, "CHUNK_ROWS", 2)
            stack.enter_context(peer_memory_on_cpu())
            with torch.no_grad():
                seed = numbers(*layer(mine).shape, seed=5).to(torch.bfloat16)
            expected = run(layer, mine.contiguous(), seed)
            _, products = stack.enter_context(cpu_quack.dense())
            found = run(layer, mine.contiguous(), seed)
        close(found, expected, (overlap, sp))
        outputs, inputs = layer.weight.shape
        rows = Counter[tuple[int, ...]]()
        for tokens, *sizes in products:
            rows[tuple(sizes)] += tokens
        both = Counter({(outputs, inputs): TOKENS * 3}) + Counter({(inputs, outputs): TOKENS * 3})
        assert {sizes: rows[sizes] for sizes in both} == both, (overlap, sp, products)
        assert (outputs, inputs, TOKENS * 3) in products, (overlap, sp, products)


@pytest.mark.parametrize("kind", LAYERS)
def test_by_quack_alone(kind: str) -> None:
    check_quack(None, kind)


@pytest.mark.parametrize("kind", LAYERS)
def test_by_quack_on_two_ranks(ranks: RankPool, kind: str) -> None:
    ranks.run(check_quack, kind, world=2)


def test_a_bias_and_small_products_stay_with_torch() -> None:
    layer = ColumnParallelLinear(IN, OUT, bias=True, dtype=torch.bfloat16)
    x = numbers(TOKENS, IN, seed=1).to(torch.bfloat16)
    with cpu_quack.dense() as (_, products):
        layer(x)
        assert not products
    layer = ColumnParallelLinear(IN, OUT, dtype=torch.bfloat16)
    with cpu_quack.dense(min_work=TOKENS * OUT * IN + 1) as (_, products):
        layer(x)
        assert not products


def test_gradients_flow_through_a_product_outside_of_a_layer() -> None:
    """torch's autograd differentiates a product that no layer does."""
    x, weight = (numbers(16, 16, seed=n).to(torch.bfloat16).requires_grad_() for n in (1, 2))
    with cpu_quack.dense() as (_, products):
        PLAIN(x, weight, None).sum().backward()
        assert not products
        with torch.no_grad():
            PLAIN(x, weight, None)
        assert products == [(16, 16, 16)]
    assert x.grad is not None


def test_a_frozen_weight_and_its_adapter() -> None:
    """A frozen weight has two products; those of its adapter's factors are equal, too."""
    model = nn.ModuleDict({"linear": ColumnParallelLinear(IN, OUT, dtype=torch.bfloat16)})
    add_lora_(model, LoraOptions(rank=8, targets=".*"))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    x, dy = (numbers(TOKENS * 2, width, seed=width).to(torch.bfloat16) for width in (IN, OUT))
    results = []
    for stand_in in (nullcontext(([], [])), cpu_quack.dense()):
        with stand_in as (_, products):
            leaf = x.clone().requires_grad_()
            y = model["linear"](leaf)
            learned = [p for p in model.parameters() if p.requires_grad]
            results.append([y.detach(), *torch.autograd.grad(y, [leaf, *learned], dy)])
    assert {(TOKENS * 2, OUT, IN), (TOKENS * 2, IN, OUT)} <= set(products)
    assert (OUT, IN, TOKENS * 2) not in products
    for found, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def test_sums_into_fp32() -> None:
    x, weight, out = (numbers(16, 16, seed=n) for n in (1, 2, 3))
    expected = out + x.to(torch.bfloat16).float() @ weight.to(torch.bfloat16).float().T
    with cpu_quack.dense():
        add_product_(out, x.to(torch.bfloat16), weight.to(torch.bfloat16))
    torch.testing.assert_close(out, expected)
