"""The norms against transformers' own, and their gradients when rows or heads are sharded."""

from pkgutil import resolve_name

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.kernels.rms_norm import supports_rms_norm
from parallel_layers.norm.layer_norm import LayerNorm
from parallel_layers.norm.rms import HeadShardedRMSNorm, RMSNorm, rms_norm
from parallel_layers.testing import RankPool


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("llama.modeling_llama:LlamaRMSNorm", RMSNorm(24, eps=1e-5)),
        ("gemma2.modeling_gemma2:Gemma2RMSNorm", RMSNorm(24, eps=1e-5, unit_offset=True)),
        ("cohere2.modeling_cohere2:Cohere2LayerNorm", LayerNorm(24, eps=1e-5)),
    ],
)
def test_equals_transformers(theirs: str, ours: RMSNorm | LayerNorm) -> None:
    # Imported here: the ranks, which load this file too, do without transformers.
    reference = resolve_name(f"transformers.models.{theirs}")(24, eps=1e-5)
    torch.manual_seed(0)
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


def test_bf16_layer_norm_is_rounded_once() -> None:
    torch.manual_seed(0)
    norm = LayerNorm(64, dtype=torch.bfloat16)
    norm.weight.data.normal_()
    x = torch.randn(9, 64).bfloat16() + 3
    exact = torch.nn.functional.layer_norm(x.double(), (64,), norm.weight.double(), None, norm.eps)
    assert ((norm(x).double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6) + 1e-7).all()


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


@pytest.mark.filterwarnings("error", "ignore:Guards may run slower on Python 3.13.0")
def test_compiles_without_a_graph_break() -> None:
    norm = RMSNorm(16)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        x = torch.randn(tokens, 16, requires_grad=True)
        torch.testing.assert_close(compiled(x), norm(x))
        compiled(x).sum().backward()
