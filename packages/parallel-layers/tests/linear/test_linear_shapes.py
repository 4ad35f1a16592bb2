"""The parallel linears on inputs of 2 to 4 dims, empty and strided ones too, against the whole weight's product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_options import placed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel_layers.module.sharding import blocks_of, load_full_
from parallel_layers.testing import RankPool

IN, OUT = 8, 16


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **options: ColumnParallelLinear(IN, OUT, **placed(**options)),
    "merged": lambda **options: MergedColumnParallelLinear(IN, [OUT, 4, 8], **placed(**options)),
    # At tp 4 a KV head lives on two ranks
    "qkv": lambda **options: QKVParallelLinear(IN, 8, 2, 2, **placed(**options)),
    "row": lambda **options: RowParallelLinear(IN, OUT, **placed(**options)),
}
ROWS = {"column": OUT, "merged": OUT + 4 + 8, "qkv": (8 + 2 + 2) * 2, "row": OUT}

SHAPES = [(8, IN), (4, 3, IN), (4, 2, 3, IN), (0, IN), (0, 3, IN), (4, 0, IN), (4, 2, 0, IN)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t.clone(),
    "first dim innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "every other of the last dim": lambda t: torch.stack([t, t + 1], -1).flatten(-2)[..., ::2],
    "a slice of dim 0": lambda t: torch.cat([t + 1, t, t + 1])[len(t) : 2 * len(t)],
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def part_of_rows(layer: nn.Module, whole: Tensor, dim: int) -> Tensor:
    """Return what this rank's rows of the weight stand for along a dim of the whole."""
    return torch.cat([whole.movedim(dim, 0)[where[0]] for _, where in blocks_of(layer, "weight")]).movedim(0, dim)


class Part:
    """The parts of the whole tensors around one layer that a rank holds."""

    def __init__(self, kind: str, layer: nn.Module, options: dict[str, Any], group: ProcessGroup) -> None:
        self.row, self.layer, self.options, self.group = kind == "row", layer, options, group

    def tokens(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.group.size())[self.group.rank()]

    def features(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.group.size(), -1)[self.group.rank()]

    def x(self, whole: Tensor) -> Tensor:
        if self.row:
            return self.features(whole)
        return self.tokens(whole) if self.options.get("sequence_parallel") else whole

    def y(self, whole: Tensor) -> Tensor:
        if self.row:
            return self.tokens(whole) if self.options.get("sequence_parallel") else whole
        return part_of_rows(self.layer, whole, -1)

    def dy(self, whole: Tensor) -> Tensor:
        """Two ranks that hold the same rows each have a part of the gradient; the parts add up to the whole."""
        dy = self.y(whole)
        if getattr(self.layer, "shared_rows", None) is not None:
            dy[..., self.layer.local_sizes[0] :] *= 2.0 if self.group.rank() % 2 == 0 else -1.0  # type: ignore[union-attr, index]
        return dy

    def weight(self, whole: Tensor) -> Tensor:
        return self.features(whole) if self.row else part_of_rows(self.layer, whole, 0)

    def bias(self, whole: Tensor) -> Tensor:
        return whole if self.row else part_of_rows(self.layer, whole, 0)


def check(group: ProcessGroup, kind: str, options: dict[str, Any]) -> None:
    """Compare outputs and every gradient with those of the whole weight, for all shapes and layouts."""
    name = f"{kind} {options}"
    options = {"bias": True, "dtype": torch.float64, "group": group} | options
    whole_weight, whole_bias = numbers(ROWS[kind], IN), numbers(ROWS[kind], seed=1)
    layer = LAYERS[kind](**options)
    part = Part(kind, layer, options, group)
    load_full_(layer, {"weight": whole_weight, "bias": whole_bias})
    for shape in SHAPES:
        leaves = [t.requires_grad_() for t in (numbers(*shape, seed=2), whole_weight.clone(), whole_bias.clone())]
        whole_y = F.linear(*leaves)
        whole_dy = numbers(*whole_y.shape, seed=3)
        whole_dx, whole_dw, whole_db = torch.autograd.grad(whole_y, leaves, whole_dy)
        expected = {"y": part.y(whole_y.detach()), "x": part.x(whole_dx)}
        expected |= {"weight": part.weight(whole_dw), "bias": part.bias(whole_db)}
        for layout, lay_out in LAYOUTS.items():
            x, dy = lay_out(part.x(leaves[0].detach())).requires_grad_(), lay_out(part.dy(whole_dy))
            before = x.detach().clone(), dy.clone()
            y = layer(x)
            wanted = {"x": x, **dict(layer.named_parameters())}
            gradients = torch.autograd.grad(y, list(wanted.values()), dy)
            got = {"y": y.detach()} | dict(zip(wanted, gradients, strict=True))
            at = f"{name}, {shape}, {layout}"
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13, msg=lambda text, at=at: f"{at}: {text}")
            assert torch.equal(x, before[0]), at
            assert torch.equal(dy, before[1]), at


# A layer and its options, each with and without sequence parallelism.
CASES = [
    *[(kind, {}) for kind in LAYERS],
    *[(kind, {"overlap": "collectives"}) for kind in LAYERS],
]
worlds = pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
sequence_parallel = pytest.mark.parametrize("sp", [False, True], ids=["whole tokens", "divided tokens"])


@worlds
@sequence_parallel
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_any_number_of_dims_empty_and_strided(
    ranks: RankPool, kind: str, options: dict[str, Any], sp: bool, world: int
) -> None:
    ranks.run(check, kind, {"sequence_parallel": sp, **options}, world=world)
