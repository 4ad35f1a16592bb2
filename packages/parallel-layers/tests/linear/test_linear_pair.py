"""Column -> GELU -> row, with biases, against the dense pair: outputs and every gradient, in fp32 and bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import ColumnParallelLinear, RowParallelLinear
from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.module.sharding import load_full_
from parallel_layers.testing import RankPool

TOKENS, IN, OUT = 8, 8, 16


def mlp(
    group: ProcessGroup, full: dict[str, Tensor], dtype: torch.dtype, sp: bool, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    wide, narrow = full["up"].shape
    options = {
        "bias": True,
        "dtype": dtype,
        "placement": Placement(group, sp),
        "execution": Execution(reduce_dtype=reduce_dtype),
    }
    up, down = ColumnParallelLinear(narrow, wide, **options), RowParallelLinear(wide, narrow, **options)
    load_full_(up, {"weight": full["up"], "bias": full["up_bias"]})
    load_full_(down, {"weight": full["down"], "bias": full["down_bias"]})
    x = (full["x"].chunk(group.size())[group.rank()] if sp else full["x"]).to(dtype).detach().requires_grad_()
    y = down(F.gelu(up(x)))
    (y * (full["dy"].chunk(group.size())[group.rank()] if sp else full["dy"])).sum().backward()
    assert up.weight is not None
    assert up.bias is not None
    assert down.weight is not None
    assert down.bias is not None
    assert x.grad is not None
    results = {"y": y, "x": x.grad, "up": up.weight.grad, "up_bias": up.bias.grad, "down": down.weight.grad}
    whole = {name: t for name, t in results.items() if t is not None} | {"down_bias": down.bias.grad}
    return whole  # type: ignore[return-value]


def dense_mlp(full: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    p = {name: t.to(dtype).detach().requires_grad_() for name, t in full.items() if name != "dy"}
    y = F.linear(F.gelu(F.linear(p["x"], p["up"], p["up_bias"])), p["down"], p["down_bias"])
    (y * full["dy"]).sum().backward()
    return {"y": y.detach()} | {name: t.grad for name, t in p.items() if t.grad is not None}


def gathered(results: list[dict[str, Tensor]], sp: bool) -> dict[str, Tensor]:
    dims = {"up": 0, "up_bias": 0, "down": 1, **({"x": 0, "y": 0} if sp else {})}
    return {
        name: torch.cat([r[name] for r in results], dims[name]) if name in dims else results[0][name]
        for name in results[0]
    }


def mlp_tensors(tokens: int, narrow: int = IN, wide: int = OUT, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (tokens, narrow),
        "up": (wide, narrow),
        "up_bias": (wide,),
        "down": (narrow, wide),
        "down_bias": (narrow,),
        "dy": (tokens, narrow),
    }
    return {n: torch.randn(s, generator=generator).bfloat16().double() for n, s in shapes.items()}


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_column_gelu_row(ranks: RankPool, world: int, sp: bool) -> None:
    full = mlp_tensors(TOKENS)
    got = gathered(ranks.run(mlp, full, torch.float32, sp, world=world), sp)
    torch.testing.assert_close(got, dense_mlp(full, torch.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_bf16_error_is_like_dense_bf16(ranks: RankPool, world: int, sp: bool) -> None:
    """Compare the errors of every output and gradient, by norm and by the largest element; bf16 sums add some."""
    full = mlp_tensors(128, 64, 128)
    truth = dense_mlp(full, torch.float64)
    dense = dense_mlp(full, torch.bfloat16)
    for reduce_dtype, order, times in ((None, 2, 1.05), (None, torch.inf, 1.5), (torch.bfloat16, 2, 1.6)):
        got = gathered(ranks.run(mlp, full, torch.bfloat16, sp, reduce_dtype, world=world), sp)
        for name, exact in truth.items():
            error = torch.linalg.vector_norm(got[name].double() - exact, order)
            error_of_dense = torch.linalg.vector_norm(dense[name].double() - exact, order)
            assert error <= times * error_of_dense, f"{name}: {error / error_of_dense:.2f} times, {reduce_dtype}"
