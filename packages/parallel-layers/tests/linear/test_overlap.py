"""Products that overlap with the gather or scatter of their tokens: equal to the serial ones, and cut as they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_peer_memory import peer_memory_on_cpu
from linear_options import placed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel_layers.linear import transports
from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.linear.transports import Overlap, available_overlaps, choose_overlap
from parallel_layers.module.sharding import load_full_
from parallel_layers.testing import RankPool

IN, OUT = 8, 12


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "column": lambda **options: ColumnParallelLinear(IN, OUT, **placed(**options)),
    # At tp 4 a kv head lives on two ranks
    "qkv": lambda **options: QKVParallelLinear(IN, 4, 2, 2, **placed(**options)),
    "row": lambda **options: RowParallelLinear(IN, OUT, **placed(**options)),
}


@contextmanager
def chunks_of(rows: int) -> Iterator[None]:
    """Small chunks for small tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "CHUNK_ROWS", rows)
        yield


def forward_and_backward(layer: nn.Module, x: Tensor, seed: int = 1) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    for parameter in layer.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward((8 * torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))).round().to(y))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}  # type: ignore[dict-item]


def tokens_of(kind: str, group: ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """This rank's input, not contiguous, for `shape[0]` tokens a rank and any dims between tokens and features."""
    torch.manual_seed(group.rank())
    rows, features = (shape[0] * group.size(), IN // group.size()) if kind == "row" else (shape[0], IN)
    return torch.randn(features, rows, *shape[1:]).to(dtype).movedim(0, -1)


def serial_and_overlapped(
    group: ProcessGroup, kind: str, shape: tuple[int, ...], options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    results = []
    ways: tuple[Overlap, ...] = ("serial", "collectives", "symmetric-memory")
    for way in ways:
        torch.manual_seed(0)
        layer = LAYERS[kind](group=group, sequence_parallel=True, overlap=way, **options)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        x = tokens_of(kind, group, shape, options.get("dtype", torch.float32))
        with chunks_of(2), peer_memory_on_cpu() as called:
            results.append(forward_and_backward(layer, x))
        fused = ["scatter", "gather"] if kind == "row" else ["gather", "scatter beside gather"]
        assert called == (fused if x.numel() and way == "symmetric-memory" else []), way
    return results


WORLDS_AND_SHAPES = [(4, (7,)), (2, (4, 3)), (2, (1,)), (2, (0,))]


@pytest.mark.parametrize(
    ("world", "shape"),
    [*WORLDS_AND_SHAPES, *(pytest.param(6 - n, shape, marks=pytest.mark.slow) for n, shape in WORLDS_AND_SHAPES)],
    ids=str,
)
@pytest.mark.parametrize("kind", list(LAYERS))
def test_every_way_computes_the_same(ranks: RankPool, kind: str, shape: tuple[int, ...], world: int) -> None:
    """With tokens that do not divide into chunks, with dims between tokens and features, with one token and none."""
    for bias in (False, True):
        options = {"bias": bias, "dtype": torch.float64}
        for serial, *others in ranks.run(serial_and_overlapped, kind, shape, options, world=world):
            for other in others:
                torch.testing.assert_close(other, serial, rtol=1e-13, atol=1e-13)


def one_gradient(group: ProcessGroup, kind: str, frozen: str) -> list[tuple[Tensor, list[str]]]:
    """By way: the gradient of the input or of the weight, where the other wants none, and what was called."""
    results = []
    ways: tuple[Overlap, ...] = ("serial", "collectives", "symmetric-memory")
    for way in ways:
        torch.manual_seed(0)
        layer = LAYERS[kind](group=group, sequence_parallel=True, overlap=way, bias=False, dtype=torch.float64)
        (weight,) = layer.parameters()
        nn.init.normal_(weight)
        x = tokens_of(kind, group, (7,), torch.float64).requires_grad_(frozen == "weight")
        weight.requires_grad_(frozen == "input")
        with chunks_of(2), peer_memory_on_cpu() as called:
            y = layer(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
        assert (x if frozen == "input" else weight).grad is None
        gradient = (x if frozen == "weight" else weight).grad
        assert gradient is not None
        results.append((gradient, called))
    return results


@pytest.mark.parametrize("frozen", ["weight", "input"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_every_way_computes_one_gradient_alone(ranks: RankPool, kind: str, frozen: str) -> None:
    """With a frozen weight or input, the other gradient is computed with only the communication that it needs."""
    backward = [] if frozen == "input" else ["gather"] if kind == "row" else ["scatter"]
    forward = ["scatter"] if kind == "row" else ["gather"]
    for (serial, none), (other, nothing), (symmetric, called) in ranks.run(one_gradient, kind, frozen, world=2):
        torch.testing.assert_close(other, serial, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(symmetric, serial, rtol=1e-13, atol=1e-13)
        assert none == nothing == []
        assert called == forward + backward


def bf16_errors(group: ProcessGroup, kind: str, dtypes: dict[str, torch.dtype]) -> list[bool]:
    results = []
    for way in ("serial", "collectives"):
        torch.manual_seed(0)
        options = {"dtype": torch.bfloat16, "bias": True, "overlap": way, **dtypes}
        layer = LAYERS[kind](group=group, sequence_parallel=True, **options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_((8 * torch.randn(parameter.shape)).round())
        with chunks_of(2):
            results.append(
                forward_and_backward(layer, (8 * tokens_of(kind, group, (7,), torch.float32)).round().bfloat16())
            )
    assert all(results[0][name].dtype == results[1][name].dtype for name in results[0])
    return [torch.equal(results[0][name], results[1][name]) for name in results[0]]


@pytest.mark.parametrize("dtypes", [{}, {"reduce_dtype": torch.bfloat16}], ids=lambda d: "".join(d))
@pytest.mark.parametrize("kind", ["column", "row"])
def test_bf16_is_rounded_where_the_serial_way_rounds(
    ranks: RankPool, kind: str, dtypes: dict[str, torch.dtype]
) -> None:
    """Bit for bit, with whole numbers: in fp32 their sums are exact in every order, in bf16 they are not."""
    for equal in ranks.run(bf16_errors, kind, dtypes, world=2):
        assert all(equal)


def under_autocast(group: ProcessGroup, kind: str, way: Overlap) -> list[dict[str, Tensor]]:
    """A layer in fp32 under autocast, and one in bf16 with the same numbers: whole ones, which are exact in both."""
    options: dict[str, Any] = {"group": group, "sequence_parallel": True, "overlap": way}
    layer, narrow = LAYERS[kind](**options), LAYERS[kind](dtype=torch.bfloat16, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=2).round_()
    narrow.load_state_dict(layer.state_dict())
    x = tokens_of(kind, group, (5,), torch.float32).round()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = forward_and_backward(layer, x)
    return [wide, forward_and_backward(narrow, x.bfloat16())]


@pytest.mark.parametrize("way", ["serial", "collectives"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_autocast_reaches_every_way(ranks: RankPool, kind: str, way: Overlap) -> None:
    """Outputs and gradients are those of a bf16 layer; the gradients have the dtype of what they are of."""
    for wide, narrow in ranks.run(under_autocast, kind, way, world=2):
        assert wide.pop("y").dtype == narrow.pop("y").dtype == torch.bfloat16
        for name, gradient in wide.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, narrow[name].float()), name


def against_one_layer(group: ProcessGroup, full: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, int]:
    """Column, GELU, row, all overlapped: this rank's tokens of the output and of the input's gradient."""
    options = placed(group, True, "collectives", dtype=torch.float64)
    up, down = ColumnParallelLinear(IN, OUT, **options), RowParallelLinear(OUT, IN, **options)
    load_full_(up, {"weight": full["up"]})
    load_full_(down, {"weight": full["down"]})
    x = full["x"].chunk(group.size())[group.rank()].clone().requires_grad_()
    with chunks_of(2):
        y = down(F.gelu(up(x)))
        y.backward(full["dy"].chunk(group.size())[group.rank()])
    return y.detach(), x.grad, group.rank()


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_come_out_in_order(ranks: RankPool, world: int) -> None:
    torch.manual_seed(0)
    shapes = {"x": (20, IN), "dy": (20, IN), "up": (OUT, IN), "down": (IN, OUT)}
    full = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    x = full["x"].clone().requires_grad_()
    y = F.gelu(x @ full["up"].T) @ full["down"].T
    y.backward(full["dy"])
    assert x.grad is not None
    for own, gradient, rank in ranks.run(against_one_layer, full, world=world):
        torch.testing.assert_close(own, y.detach().chunk(world)[rank])
        torch.testing.assert_close(gradient, x.grad.chunk(world)[rank])


def chosen(group: ProcessGroup) -> list[str]:
    gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16)
    cpu: Any = SimpleNamespace(is_cuda=False, device=torch.device("cpu"), dtype=torch.bfloat16)
    cases = [
        ("auto", gpu, 8192),
        ("auto", gpu, 8191),
        ("auto", cpu, 8192),
        ("collectives", cpu, 1),
        ("serial", gpu, 8192),
    ]
    messages = []
    for call in (
        lambda: choose_overlap("symmetric-memory", cpu, 8192, group),
        lambda: ColumnParallelLinear(
            4, 4, placement=Placement(group, sequence_parallel=True), execution=Execution(overlap="symmetric-memory")
        )(torch.ones(1, 4)),
        lambda: RowParallelLinear(4, 4, placement=Placement(group), execution=Execution(overlap="nvlink")),  # type: ignore[typeddict-item]
    ):
        with pytest.raises(ValueError, match="overlap=") as caught:
            call()
        messages.append(str(caught.value))
    names = []
    for reason in (None, "no NVLink"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transports, "why_not_symmetric_memory", lambda *_, reason=reason: reason)
            names += [choose_overlap(name, x, rows, group) for name, x, rows in cases]
            names += [choose_overlap("symmetric-memory", gpu, rows, group, torch.float32) for rows in (8192, 1)]
    return names + messages


def test_the_way_is_chosen_by_size_and_refused_by_name(ranks: RankPool) -> None:
    refused = "overlap='symmetric-memory' cannot be used: it needs CUDA devices, not cpu"
    unknown = "overlap='nvlink' is unknown; use one of 'auto', 'serial', 'collectives', 'symmetric-memory'"
    for names in ranks.run(chosen, world=2):
        rest = ["serial", "serial", "collectives", "serial"]
        wide = ["collectives", "serial"]  # sums in fp32: by size
        assert names[:7] == ["symmetric-memory", *rest, *wide]
        assert names[7:14] == ["collectives", *rest, *wide]
        use = "; use 'auto', 'collectives' or 'serial'"
        assert names[14:] == [refused + use, refused + use, unknown]
    assert available_overlaps(None, "cpu") == ("collectives", "serial")


def compiled(group: ProcessGroup, kind: str) -> list[dict[str, Tensor]]:
    torch._dynamo.reset()
    layer = LAYERS[kind](group=group, sequence_parallel=True, overlap="collectives")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = tokens_of(kind, group, (6,), torch.float32)
    with chunks_of(2):
        return [
            forward_and_backward(layer, x),
            {k.removeprefix("_orig_mod."): v for k, v in forward_and_backward(run, x).items()},
        ]


@pytest.mark.parametrize("kind", ["column", pytest.param("row", marks=pytest.mark.slow)])
def test_compiled_code_is_one_graph(ranks: RankPool, kind: str) -> None:
    for eager, ours in ranks.run(compiled, kind, world=2):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def on_gpus(group: ProcessGroup, kind: str, rows: int, options: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """For each way that these GPUs have: the largest error relative to the serial way, and the memory that it takes."""
    device = torch.device("cuda", torch.cuda.current_device())
    results = {}
    serial: dict[str, Tensor] = {}
    torch.manual_seed(0)
    build = ColumnParallelLinear if kind == "column" else RowParallelLinear
    layer = build(1024, 1024, **placed(group, True, dtype=torch.bfloat16, device=device, **options))
    x = torch.randn(rows, 1024, device=device).bfloat16()
    if kind == "row":
        x = torch.randn(rows * group.size(), 1024 // group.size(), device=device).bfloat16()
    for way in ("serial", "auto", *available_overlaps(group, device)):
        layer.execution = replace(layer.execution, overlap=way)
        for _ in range(2):
            got = {name: t.double() for name, t in forward_and_backward(layer, x).items()}
        serial = serial or got
        error = max(float((got[name] - t).norm() / t.norm().clamp(min=1e-30)) for name, t in serial.items())
        del got
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            layer(x)
        torch.cuda.synchronize()
        results[way] = error, torch.cuda.max_memory_allocated() - before
    return results


@pytest.mark.parametrize("world", [pytest.param(world, marks=pytest.mark.gpu(world)) for world in (2, 4)])
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.bfloat16}, {"bias": True}], ids=str)
@pytest.mark.parametrize("rows", [1, 1000, 4097, 12000])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_every_way_on_gpus(
    request: pytest.FixtureRequest, kind: str, rows: int, options: dict[str, Any], world: int
) -> None:
    """Equal within bf16, and with no more memory than the serial way and one chunk take."""
    pool: RankPool = request.getfixturevalue("nccl_ranks" if world == 2 else "four_nccl_ranks")
    for results in pool.run(on_gpus, kind, rows, options, world=world):
        assert {"serial", "auto", "collectives"} <= set(results)
        chunk = 4 * 1024 * world * max(rows, transports.CHUNK_ROWS)
        for way, (error, memory) in results.items():
            assert error <= 5e-3, way
            assert memory <= results["serial"][1] + chunk, way
