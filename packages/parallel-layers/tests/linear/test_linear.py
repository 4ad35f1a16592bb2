"""The parallel linears against torch.nn.functional.linear with the full weight: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from linear_options import placed
from torch import Tensor, nn
from torch.distributed import ProcessGroup, new_group
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.distributed.collectives import gather_from_tensor_parallel, reduce_from_tensor_parallel
from parallel_layers.linear import column_parallel_linear
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel_layers.module.sharding import blocks_of, get_sharding, load_full_
from parallel_layers.testing import RankPool

TOKENS, IN, OUT = 8, 8, 16
QKV = (8, 8, 2, 2)  # hidden, heads, kv heads, head size: at tp 4 a kv head lives on two ranks


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **options: ColumnParallelLinear(IN, OUT, **placed(**options)),
    "merged": lambda **options: MergedColumnParallelLinear(IN, [OUT, 4, 8], **placed(**options)),
    "qkv": lambda **options: QKVParallelLinear(*QKV, **placed(**options)),
    "row": lambda **options: RowParallelLinear(IN, OUT, **placed(**options)),
}
FULL_OUT = {"column": OUT, "merged": OUT + 12, "qkv": (8 + 4) * 2, "row": OUT}


@dataclass
class Result:
    output: Tensor
    grads: dict[str, Tensor | None]
    calls: dict[str, list[str]] = field(default_factory=dict)


class CountCollectives(TorchDispatchMode):
    """Names of the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.__name__:
            self.names.append(func.__name__.split(".")[0].rstrip("_"))
        return func(*args, **(kwargs or {}))


def full_tensors(kind: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "x": (TOKENS, IN),
        "weight": (FULL_OUT[kind], IN),
        "bias": (FULL_OUT[kind],),
        "dy": (TOKENS, FULL_OUT[kind]),
    }
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def local_rows(layer: nn.Module, full: Tensor) -> Tensor:
    """The parts of the last dim of `full` that the rows of this rank's weight stand for."""
    parts = [where[0] for _, where in blocks_of(layer, "weight")]
    return torch.cat([full[..., part] for part in parts], -1)


def run_layer(
    group: ProcessGroup | None, kind: str, full: dict[str, Tensor], options: dict[str, Any], compiled: bool = False
) -> Result:
    """One forward and backward of a layer with this rank's part of the full weight, x and dy."""
    device = "cuda" if options.pop("cuda", False) else "cpu"
    frozen = options.pop("frozen", False)
    layer = LAYERS[kind](bias=True, dtype=full["weight"].dtype, device=device, group=group, **options)
    load_full_(layer, {"weight": full["weight"], "bias": full["bias"]})
    layer.weight.requires_grad_(not frozen)
    sp = options.get("sequence_parallel", False) and group is not None
    size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    x, dy = full["x"].to(device), full["dy"].to(device)
    if kind == "row":
        x = x.chunk(size, -1)[rank]
        dy = dy.chunk(size, 0)[rank] if sp else dy
    else:
        x = x.chunk(size, 0)[rank] if sp else x
        dy = local_rows(layer, dy)
        if getattr(layer, "shared_rows", None) is not None:
            # The two copies of a head see different queries: their gradients are unequal parts of the whole.
            dy = torch.cat([dy[:, :4], dy[:, 4:] * (2.0 if rank % 2 == 0 else -1.0)], -1)
    x = x.clone().requires_grad_()
    before = x.detach().clone(), dy.clone()
    with CountCollectives() as forward:
        y = (torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer)(x)
    with CountCollectives() as backward:
        y.backward(dy)
    torch.testing.assert_close((x.detach(), dy), before, rtol=0, atol=0)
    grads = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return Result(y, grads, {"forward": forward.names, "backward": backward.names})


def reference(full: dict[str, Tensor]) -> Result:
    x, weight, bias = (full[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
    y = F.linear(x, weight, bias)
    y.backward(full["dy"])
    return Result(y.detach(), {"x": x.grad, "weight": weight.grad, "bias": bias.grad})


def expected_on_rank(kind: str, rank: int, world: int, options: dict[str, Any], full: Result) -> dict[str, Tensor]:
    """Return what a rank should hold of the reference's outputs and gradients."""
    grads = {name: grad for name, grad in full.grads.items() if grad is not None}
    sp = options.get("sequence_parallel", False)

    def tokens(t: Tensor) -> Tensor:
        return t.chunk(world, 0)[rank] if sp else t

    if kind == "row":
        return {
            "output": tokens(full.output),
            "x": grads["x"].chunk(world, -1)[rank],
            "weight": grads["weight"].chunk(world, -1)[rank],
            "bias": grads["bias"],
        }
    parts = {"column": [OUT], "merged": [OUT, 4, 8], "qkv": [16, 4, 4]}[kind]
    index = []
    start = 0
    for part in parts:
        # A KV head, 2 rows, is not divided further: it is repeated.
        pieces = torch.arange(start, start + part).split(max(part // world, 2 if kind == "qkv" else 1))
        index.append(pieces[rank * len(pieces) // world])
        start += part
    rows = torch.cat(index)
    return {
        "output": full.output[:, rows],
        "x": tokens(grads["x"]),
        "weight": grads["weight"][rows],
        "bias": grads["bias"][rows],
    }


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *[(kind, {"sequence_parallel": sp}) for kind in LAYERS for sp in (False, True)],
]


def close(results: list[Result], kind: str, options: dict[str, Any], full: Result, rtol: float) -> None:
    for rank, result in enumerate(results):
        got = {"output": result.output} | {name: grad for name, grad in result.grads.items() if grad is not None}
        expected = expected_on_rank(kind, rank, len(results), options, full)
        expected = {name: expected[name] for name in got}
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("world", [1, 4])  # 2 in `test_linear_shapes`
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_outputs_and_gradients(ranks: RankPool, kind: str, options: dict[str, Any], world: int) -> None:
    full = full_tensors(kind)
    results = ranks.run(run_layer, kind, full, options, world=world)
    assert all(grad is not None for r in results for grad in r.grads.values())
    close(results, kind, options, reference(full), 1e-13)


@pytest.mark.parametrize("kind", list(LAYERS))
def test_fp32(ranks: RankPool, kind: str) -> None:
    full = full_tensors(kind, torch.float32)
    for sp in (False, True):
        results = ranks.run(run_layer, kind, full, {"sequence_parallel": sp}, world=4)
        close(results, kind, {"sequence_parallel": sp}, reference(full), 1e-5)


@pytest.mark.parametrize("kind", list(LAYERS))
def test_without_a_group(kind: str) -> None:
    full = full_tensors(kind)
    close([run_layer(None, kind, full, {"sequence_parallel": True})], kind, {}, reference(full), 1e-13)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_frozen_weight_with_trainable_bias(ranks: RankPool, kind: str, sp: bool) -> None:
    full = full_tensors(kind)
    options = {"sequence_parallel": sp}
    results = ranks.run(run_layer, kind, full, options | {"frozen": True}, world=4)
    assert all(r.grads["weight"] is None and r.grads["bias"] is not None for r in results)
    close(results, kind, options, reference(full), 1e-13)


COUNTS = [
    ("column", 2, False, [], ["all_reduce"]),
    ("merged", 2, False, [], ["all_reduce"]),
    ("qkv", 2, False, [], ["all_reduce"]),
    ("qkv", 4, False, [], ["all_reduce"] * 3),  # x, and the weight's and the bias's rows of shared heads
    ("row", 2, False, ["all_reduce"], []),
    ("column", 2, True, ["all_gather_into_tensor"], ["all_gather_into_tensor", "reduce_scatter_tensor"]),
    ("row", 2, True, ["reduce_scatter_tensor"], ["all_gather_into_tensor"]),
]


@pytest.mark.parametrize(("kind", "world", "sp", "forward", "backward"), COUNTS)
def test_how_often_it_communicates(
    ranks: RankPool, kind: str, world: int, sp: bool, forward: list[str], backward: list[str]
) -> None:
    for result in ranks.run(run_layer, kind, full_tensors(kind), {"sequence_parallel": sp}, world=world):
        assert result.calls == {"forward": forward, "backward": backward}


def low_rank_adapter(group: ProcessGroup, full: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """A frozen layer and a trained adapter beside it: two partial input gradients, reduced once together."""
    base = ColumnParallelLinear(IN, OUT, placement=Placement(group), reduce_gradient=False, dtype=torch.float64)
    adapter = ColumnParallelLinear(IN, OUT, placement=Placement(group), reduce_gradient=False, dtype=torch.float64)
    load_full_(base, {"weight": full["weight"]})
    load_full_(adapter, {"weight": 2 * full["weight"]})
    base.requires_grad_(False)
    x = full["x"].clone().requires_grad_()
    (base(x) + adapter(x)).backward(local_rows(base, full["dy"]))
    assert x.grad is not None
    return {"x": reduce_from_tensor_parallel(x.grad, group), "base": base.weight.grad}


def test_unreduced_gradients_add_up(ranks: RankPool) -> None:
    full = full_tensors("column")
    for result in ranks.run(low_rank_adapter, full, world=4):
        torch.testing.assert_close(result["x"], 3 * full["dy"] @ full["weight"])
        assert result["base"] is None


def compile_two_lengths(
    group: ProcessGroup, kind: str, options: dict[str, Any], dtype: torch.dtype
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(eager, compiled) outputs and gradients at each length."""
    torch._dynamo.reset()
    layer = LAYERS[kind](bias=True, group=group, dtype=dtype, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    pairs = []
    for tokens in (8, 12):
        features = IN // group.size() if kind == "row" else IN
        rows = tokens // group.size() if options.get("sequence_parallel") and kind != "row" else tokens
        x = torch.randn(rows, features, dtype=dtype, requires_grad=True)
        eager, ours = (
            [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
            for y in (run(x) for run in (layer, compiled))
        )
        pairs.append((eager, ours))
    return pairs


# A merged layer compiles like one with columns. On 4 ranks "qkv" has KV heads on several ranks. --slow has all.
COMPILED = [("column", True, 2)]
COMPILED_SLOWLY = [
    ("qkv", True, 2),
    *(
        case
        for kind in LAYERS
        for sp in (False, True)
        if (case := (kind, sp, 4 if kind == "qkv" else 2)) not in COMPILED
    ),
]


@pytest.mark.parametrize(
    ("kind", "sp", "world"),
    [*COMPILED, *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED_SLOWLY)],
)
def test_compiles_without_a_graph_break(ranks: RankPool, kind: str, sp: bool, world: int) -> None:
    options = {"sequence_parallel": sp}
    for pairs in ranks.run(compile_two_lengths, kind, options, torch.float32, world=world):
        assert len(pairs) == 2
        for eager, compiled in pairs:
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def refused(group: ProcessGroup) -> list[str]:
    partial_sums = {"placement": Placement(group, sequence_parallel=True), "reduce_gradient": False}
    messages = []
    for build in (
        lambda: ColumnParallelLinear(4, 10, placement=Placement(group)),
        lambda: RowParallelLinear(10, 4, placement=Placement(group)),
        lambda: MergedColumnParallelLinear(4, [8, 6], placement=Placement(group)),
        lambda: QKVParallelLinear(4, 14, 2, 4, placement=Placement(group)),
        lambda: QKVParallelLinear(4, 12, 6, 4, placement=Placement(group)),
        lambda: QKVParallelLinear(4, 12, 5, 4, placement=Placement(group)),
        lambda: QKVParallelLinear(4, 12, 0, 4, placement=Placement(group)),
        lambda: ColumnParallelLinear(4, 8, **partial_sums),
        lambda: column_parallel_linear(torch.ones(1, 4), torch.ones(2, 4), **partial_sums),
    ):
        with pytest.raises(ValueError, match="=") as caught:
            build()
        messages.append(str(caught.value))
    return messages


def test_what_does_not_divide_is_refused_by_name(ranks: RankPool) -> None:
    for messages in ranks.run(refused):
        assert messages[:7] == [
            "out_features=10 is not divisible by tp=4; use tp in {1, 2, 5, 10}",
            "in_features=10 is not divisible by tp=4; use tp in {1, 2, 5, 10}",
            "out_features=6 is not divisible by tp=4; use tp in {1, 2, 3, 6}",
            "num_attention_heads=14 is not divisible by tp=4; use tp in {1, 2, 7, 14}",
            "num_key_value_heads=6 neither divides tp=4 nor is divisible by it; use tp in {1, 2, 3, 6, 12}",
            "num_attention_heads=12 is not a multiple of num_key_value_heads=5",
            "num_attention_heads=12 is not a multiple of num_key_value_heads=0",
        ]
        assert len(messages) == 9
        assert all("gather x with gather_from_sequence_parallel" in message for message in messages[7:])


def shared_heads(group: ProcessGroup) -> tuple[int, int, Any, list[bool]]:
    layer = QKVParallelLinear(*QKV, placement=Placement(group))
    counted = [block.counted for block in get_sharding(layer, "weight")[0].blocks]
    return layer.num_heads_local, layer.num_kv_heads_local, layer.shared_rows, counted


def test_kv_heads_are_repeated_and_counted_once(ranks: RankPool) -> None:
    once, repeated = [True, True, True], [True, False, False]
    assert ranks.run(shared_heads, world=2) == [(4, 1, None, once)] * 2
    assert ranks.run(shared_heads, world=4) == [(2, 1, (4, 8, 2), once), (2, 1, (4, 8, 2), repeated)] * 2


def two_grids(group: ProcessGroup, pair_ranks: list[list[int]], full: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    pairs = [new_group(members) for members in pair_ranks]
    mine = pairs[group.rank() // 2]
    wide = ColumnParallelLinear(IN, OUT, placement=Placement(group), dtype=torch.float64)
    narrow = ColumnParallelLinear(IN, OUT, placement=Placement(mine, sequence_parallel=True), dtype=torch.float64)
    for layer in (wide, narrow):
        load_full_(layer, {"weight": full["weight"]})
    assert isinstance(mine, ProcessGroup)
    tokens = full["x"].chunk(2)[mine.rank()]
    return gather_from_tensor_parallel(wide(full["x"]), group), gather_from_tensor_parallel(narrow(tokens), mine)


def test_two_grids_in_one_process(ranks: RankPool) -> None:
    full = full_tensors("column")
    for wide, narrow in ranks.run(two_grids, [[0, 1], [2, 3]], full):
        torch.testing.assert_close(wide, full["x"] @ full["weight"].t())
        torch.testing.assert_close(narrow, wide)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kind", list(LAYERS))
def test_one_gpu(kind: str) -> None:
    full = full_tensors(kind)
    result = run_layer(None, kind, full, {"cuda": True})
    result.output = result.output.cpu()
    result.grads = {name: grad.cpu() for name, grad in result.grads.items() if grad is not None}
    close([result], kind, {}, reference(full), 1e-12)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_two_gpus(nccl_ranks: RankPool, kind: str, options: dict[str, Any]) -> None:
    full = full_tensors(kind)
    results = nccl_ranks.run(run_layer, kind, full, options | {"cuda": True})
    close(results, kind, options, reference(full), 1e-12)
