"""RMSNorm against transformers' own, its gradients when rows or heads are sharded, and its backends."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.kernels.rms_norm import supports_rms_norm
from parallel_layers.norm import backends
from parallel_layers.norm.backends import available_norm_backends
from parallel_layers.norm.rms_norm import HeadShardedRMSNorm, RMSNorm, rms_norm
from parallel_layers.testing import RankPool


@pytest.mark.parametrize(("family", "unit_offset"), [("llama", False), ("gemma2", True)])
def test_equals_transformers(family: str, unit_offset: bool) -> None:
    # Imported here: the ranks, which load this file too, do without transformers.
    theirs = resolve_name(f"transformers.models.{family}.modeling_{family}:{family.title()}RMSNorm")
    torch.manual_seed(0)
    ours, reference = RMSNorm(24, eps=1e-5, unit_offset=unit_offset), theirs(24, eps=1e-5)
    assert torch.equal(ours.weight, reference.weight)
    weight = torch.randn(24)
    x, seed = torch.randn(7, 24) * 3, torch.randn(7, 24)
    results = []
    for module in (ours, reference):
        module.weight.data.copy_(weight)
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        results.append((out, *torch.autograd.grad(out, (leaf, module.weight), seed)))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unit_offset", [False, True])
def test_bf16_is_rounded_once(unit_offset: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = rms_norm(x.double(), weight.double(), unit_offset=unit_offset)
    ours = rms_norm(x, weight, unit_offset=unit_offset)
    assert ours.dtype == torch.bfloat16
    # Half a unit in the last of bf16's 8 binary places, and what fp32 statistics add.
    assert ((ours.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()


@pytest.mark.parametrize("unit_offset", [False, True])
def test_gradcheck(unit_offset: bool) -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, unit_offset=unit_offset), (x, weight))


def test_add_and_norm() -> None:
    norm = RMSNorm(8)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    normed, total = norm.add_and_norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


def test_the_kernel_leaves_a_wider_residual_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is under autocast, whose products are bf16 beside a residual stream in fp32."""
    monkeypatch.setattr("parallel_layers.kernels.rms_norm.use_triton", lambda *tensors: True)
    x, weight = torch.randn(3, 8), torch.ones(8)
    assert supports_rms_norm(x, weight, x)
    assert not supports_rms_norm(x.bfloat16(), weight, x)
    assert not supports_rms_norm(x, weight, x[:1])


@pytest.mark.gpu
def test_a_wider_residual_on_a_gpu() -> None:
    norm = RMSNorm(64, device="cuda")
    x, residual = torch.randn(3, 64, device="cuda").bfloat16(), torch.randn(3, 64, device="cuda")
    normed, total = norm.add_and_norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 5), size=st.integers(1, 33), scale=st.sampled_from([1e-12, 1.0, 1e12]))
def test_finite_at_any_scale(rows: int, size: int, scale: float) -> None:
    x = torch.randn(rows, size) * scale
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(RMSNorm(size)(x).double(), expected, rtol=1e-5, atol=1e-30)


def _run_sharded(group: ProcessGroup, x: Tensor, seed: Tensor, weight: Tensor, sequence_parallel: bool) -> list[Tensor]:
    norm = RMSNorm(x.shape[1], group=group, sequence_parallel=sequence_parallel)
    norm.weight.data.copy_(weight)
    if sequence_parallel:
        x, seed = x.chunk(group.size())[group.rank()], seed.chunk(group.size())[group.rank()]
    leaf = x.clone().requires_grad_()
    out = norm(leaf)
    out.backward(seed)
    return [out, leaf.grad, norm.weight.grad]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_sharded(ranks: RankPool, world: int, sequence_parallel: bool) -> None:
    x, seed, weight = torch.randn(8, 6), torch.randn(8, 6), torch.randn(6)
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = rms_norm(leaf, leaf_weight)
    d_x, d_weight = torch.autograd.grad(out, (leaf, leaf_weight), seed)
    results = ranks.run(_run_sharded, x, seed, weight, sequence_parallel, world=world)
    for i, expected in enumerate((out.detach(), d_x)):
        parts = [result[i] for result in results]
        gathered = torch.cat(parts) if sequence_parallel else parts[-1]
        torch.testing.assert_close(gathered, expected, rtol=1e-5, atol=1e-6)
    for result in results:
        torch.testing.assert_close(result[2], d_weight, rtol=1e-5, atol=1e-6)


def _run_head_sharded(group: ProcessGroup, x_TND: Tensor, seed: Tensor, weight: Tensor) -> list[Tensor]:
    rank, size, heads = group.rank(), group.size(), x_TND.shape[1]
    first, count = rank * heads // size, max(1, heads // size)
    norm = HeadShardedRMSNorm(heads, x_TND.shape[2], group=group)
    norm.weight.data.copy_(weight)
    leaf = x_TND[:, first : first + count].clone().requires_grad_()
    out = norm(leaf)
    # Ranks that hold the same head use its output for different queries: each has a share of the gradient.
    out.backward(seed[:, first : first + count] / max(1, size // heads))
    return [out, leaf.grad, norm.weight.grad]


@pytest.mark.parametrize(("world", "heads"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 1)])
def test_heads_sharded(ranks: RankPool, world: int, heads: int) -> None:
    """All heads of a token are normalised together although each rank has some; some ranks may share one."""
    x, seed, weight = torch.randn(5, heads, 3), torch.randn(5, heads, 3), torch.randn(heads * 3)
    leaf, leaf_weight = x.flatten(1).clone().requires_grad_(), weight.clone().requires_grad_()
    out = rms_norm(leaf, leaf_weight)
    d_x, d_weight = torch.autograd.grad(out, (leaf, leaf_weight), seed.flatten(1))
    results = ranks.run(_run_head_sharded, x, seed, weight, world=world)
    d_x, out = d_x.view_as(x), out.detach().view_as(x)
    summed = torch.zeros_like(x)
    for rank, (ours, d_ours, d_weight_ours) in enumerate(results):
        local = slice(rank * heads // world, rank * heads // world + max(1, heads // world))
        torch.testing.assert_close(ours, out[:, local], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(d_weight_ours, d_weight, rtol=1e-5, atol=1e-6)
        summed[:, local] += d_ours
    torch.testing.assert_close(summed, d_x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.filterwarnings("error")
def test_compiles_without_a_graph_break(backend: str) -> None:
    norm = RMSNorm(16, backend=backend)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        x = torch.randn(tokens, 16, requires_grad=True)
        torch.testing.assert_close(compiled(x), norm(x))
        compiled(x).sum().backward()


class _TEFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module.mathematics(x.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            # Transformer Engine, too, reads its module's weight here.
            weight = ctx.module.weight.detach().to(dy.dtype).requires_grad_()
            dx, dw = torch.autograd.grad(ctx.module.mathematics(x, weight), (x, weight), dy)
        return dx, dw, None


class TERMSNorm(nn.Module):
    """Stands for `transformer_engine.pytorch.RMSNorm`: the same arguments and mathematics, output in weight's dtype."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, normalized_shape: int, **options: Any) -> None:
        super().__init__()
        self.made.append({"normalized_shape": normalized_shape, **options})
        self.eps, self.zero_centered_gamma = options["eps"], options["zero_centered_gamma"]
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=options["dtype"], device=options["device"]))

    def mathematics(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, 1 + weight if self.zero_centered_gamma else weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return _TEFunction.apply(x, self.weight, self)


@contextmanager
def stand_in_for_te() -> Iterator[list[dict[str, Any]]]:
    """Transformer Engine as if it were installed and took CPU tensors; the arguments of the modules made."""
    with pytest.MonkeyPatch.context() as patch:
        package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
        package.__spec__ = ModuleSpec("transformer_engine", None)
        pytorch.RMSNorm = TERMSNorm  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "transformer_engine", package)
        patch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
        anything = replace(backends.BACKENDS["te"], takes=lambda x, weight, residual: True)
        patch.setitem(backends.BACKENDS, "te", anything)
        patch.setattr(TERMSNorm, "made", [])
        backends._is_installed.cache_clear()
        yield TERMSNorm.made
    backends._is_installed.cache_clear()


def _run_backend(
    group: ProcessGroup | None, backend: str, x: Tensor, seed: Tensor, weight: Tensor, unit_offset: bool
) -> list[Tensor]:
    """Output of x, of x added to itself, and the gradients of both; tokens sharded over the group."""
    norm = RMSNorm(
        x.shape[1], eps=1e-5, unit_offset=unit_offset, group=group, sequence_parallel=True, backend=backend,
        dtype=weight.dtype,
    )  # fmt: skip
    norm.weight.data.copy_(weight)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    if group is not None:
        x, seed = x.chunk(group.size())[group.rank()], seed.chunk(group.size())[group.rank()]
    leaf = x.clone().requires_grad_()
    out, (normed, total) = norm(leaf), norm.add_and_norm(leaf, leaf)
    torch.autograd.backward([out, normed, total], [seed, 2 * seed, 3 * seed])
    return [out, normed, total, leaf.grad, norm.weight.grad]


def _run_te(group: ProcessGroup | None, *arguments: Any) -> list[Tensor]:
    with stand_in_for_te():
        return _run_backend(group, "te", *arguments)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "unit_offset"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_transformer_engine(ranks: RankPool, dtype: torch.dtype, unit_offset: bool, world: int) -> None:
    """Outputs and gradients, the residual's included, are torch's; bf16 activations with an fp32 weight stay bf16."""
    torch.manual_seed(0)
    x, seed, weight = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype), torch.randn(6)
    arguments = (x, seed, weight, unit_offset)
    expected = _run_backend(None, "torch", *arguments)
    results = [_run_te(None, *arguments)] if world == 1 else ranks.run(_run_te, *arguments, world=world)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.1}
    for i, theirs in enumerate(expected[:-1]):
        ours = torch.cat([result[i] for result in results])
        torch.testing.assert_close(ours, theirs.detach(), **tolerance)
    for result in results:
        torch.testing.assert_close(result[-1], expected[-1], **tolerance)


def test_what_transformer_engine_is_asked_for() -> None:
    with stand_in_for_te() as made:
        assert "te" in available_norm_backends()
        norm = RMSNorm(6, eps=1e-5, unit_offset=True, backend="te", dtype=torch.bfloat16)
        assert norm.active_backend(torch.randn(2, 6)) == "te"
        assert "backend='te'" in repr(norm)
        with pytest.raises(ValueError, match=r"use RMSNorm\(\.\.\., backend='te'\)"):
            rms_norm(torch.randn(2, 6), norm.weight, backend="te")
    options = {"eps": 1e-5, "zero_centered_gamma": True, "dtype": torch.bfloat16, "device": "meta"}
    assert made == [{"normalized_shape": 6, **options}]


def test_backends_are_named() -> None:
    norm, x = RMSNorm(6), torch.randn(2, 6)
    assert norm.active_backend(x) == "torch"
    assert torch.equal(norm(x), RMSNorm(6, backend="torch")(x))
    assert available_norm_backends()[-1] == "torch"
    with pytest.raises(ValueError, match="backend='apex' is unknown; use 'auto' or one of triton, te, torch"):
        RMSNorm(6, backend="apex")
    for name, package in (("te", r"transformer-engine package \(extra parallel-layers\[te\]\)"), ("triton", "Triton")):
        if name not in available_norm_backends():
            with pytest.raises(ValueError, match=rf"backend='{name}' needs .*{package}"):
                RMSNorm(6, backend=name)


def test_tensors_that_a_backend_does_not_take_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "te", replace(backends.BACKENDS["te"], is_installed=lambda: True))
    backends._is_installed.cache_clear()
    with pytest.raises(
        ValueError, match=r"backend='te' takes fp32, fp16 and bf16 on CUDA, not torch.float32 \[2, 6\] on cpu"
    ):
        rms_norm(torch.randn(2, 6), torch.randn(6), backend="te")
    backends._is_installed.cache_clear()


def test_nothing_optional_is_imported() -> None:
    RMSNorm(6)(torch.randn(2, 6))
    assert "transformer_engine" not in sys.modules


@pytest.mark.gpu
@pytest.mark.parametrize("unit_offset", [False, True])
def test_transformer_engine_itself(unit_offset: bool) -> None:
    if "te" not in available_norm_backends():
        pytest.skip("needs transformer-engine")
    x, seed, weight = (torch.randn(shape, device="cuda") for shape in ((64, 256), (64, 256), (256,)))
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        results = []
        for backend in ("te", "torch"):
            norm = RMSNorm(256, unit_offset=unit_offset, backend=backend, device="cuda")
            norm.weight.data.copy_(weight)
            leaf = x.to(dtype).requires_grad_()
            out, total = norm.add_and_norm(leaf, leaf)
            torch.autograd.backward([out, total], [seed.to(dtype)] * 2)
            results.append((out, total, leaf.grad, norm.weight.grad / 8))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
