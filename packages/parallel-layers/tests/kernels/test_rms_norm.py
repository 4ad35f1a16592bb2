from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels.rms_norm import MAX_SIZE, fused_rms_norm


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6, unit_offset: bool = False) -> Tensor:
    return fused_rms_norm(x, weight, eps=eps, unit_offset=unit_offset)[0]


def reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight if unit_offset else weight)


def assert_close(actual: Tensor, expected: Tensor, unit: dict[torch.dtype, float], scale: float = 1.0) -> None:
    """Every element within one rounding, and fp32 arithmetic on inputs of unit size, of the fp64 truth."""
    error = (actual.double() - expected).abs()
    bound = unit[actual.dtype] * expected.abs() + 4e-6 * scale * expected.abs().max().clamp(min=1)
    assert (error <= bound).all(), f"largest excess {(error - bound).max():.3g}"


def leaf(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "unit_offset"),
    [
        ((5, 96), False),
        ((3, 7, 128), True),
        ((1, 1), False),
        ((130, 257), False),
        ((9, 2560), True),
        ((2, 3, 2, 40), False),
    ],
)
def test_norm_and_gradients(
    device: torch.device, unit: dict[torch.dtype, float], shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x, weight = leaf(*shape, dtype=dtype, device=device), leaf(shape[-1], dtype=dtype, device=device)
    y = norm(x, weight, eps=1e-5, unit_offset=unit_offset)
    dy = torch.randn_like(y)
    y.backward(dy)

    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y64 = reference(x64, weight64, 1e-5, unit_offset)
    y64.backward(dy.double())
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype
    assert_close(y, y64, unit)
    assert_close(x.grad, x64.grad, unit)
    assert_close(weight.grad, weight64.grad, unit, scale=4.0)


def check_residual(
    device: torch.device, unit: dict[torch.dtype, float], use: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(2)
    x, residual = (leaf(*shape, dtype=dtype, device=device) for _ in range(2))
    weight = leaf(shape[1], dtype=torch.float32, device=device)
    normed, total = fused_rms_norm(x, weight, residual, eps=1e-5)
    grads = [torch.randn_like(normed), torch.randn_like(total)]
    outputs = {"both": [0, 1], "normed": [0], "total": [1]}[use]
    torch.autograd.backward([(normed, total)[i] for i in outputs], [grads[i] for i in outputs])

    assert_close(total, x.double() + residual.double(), unit)
    total64, weight64 = total.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    normed64 = reference(total64, weight64, 1e-5, False)
    pair64 = (normed64, total64 * 1.0)
    torch.autograd.backward([pair64[i] for i in outputs], [grads[i].double() for i in outputs])
    assert_close(normed, normed64, unit)
    assert_close(x.grad, total64.grad, unit)
    assert torch.equal(x.grad, residual.grad)
    if use == "total":
        assert weight.grad is None
    else:
        assert_close(weight.grad, weight64.grad, unit, scale=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", ["both", "normed", "total"])
def test_residual_is_added_and_gets_the_whole_gradient(
    device: torch.device, unit: dict[torch.dtype, float], use: str, dtype: torch.dtype
) -> None:
    check_residual(device, unit, use, dtype, (11, 384))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", ["both", "normed", "kept"])
def test_what_goes_on_beside_its_norm_gets_one_gradient(
    device: torch.device, unit: dict[torch.dtype, float], use: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    x, weight = leaf(11, 384, dtype=dtype, device=device), leaf(384, dtype=torch.float32, device=device)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    pair = fused_rms_norm(x, weight, eps=1e-5)
    assert torch.equal(pair[0], norm(x, weight, eps=1e-5))
    assert pair[1].data_ptr() == x.data_ptr()
    pair64 = reference(x64, weight64, 1e-5, False), x64 * 1.0
    # One of them as a transposed product leaves it.
    grads = [torch.randn(11, 384, device=device).to(dtype), torch.randn(384, 11, device=device).to(dtype).t()]
    outputs = {"both": [0, 1], "normed": [0], "kept": [1]}[use]
    torch.autograd.backward([pair[i] for i in outputs], [grads[i] for i in outputs])
    torch.autograd.backward([pair64[i] for i in outputs], [grads[i].double() for i in outputs])
    assert_close(x.grad, x64.grad, unit)
    if use == "kept":
        assert weight.grad is None
    else:
        assert_close(weight.grad, weight64.grad, unit, scale=4.0)


def test_what_goes_on_is_compiled_whole(device: torch.device) -> None:
    torch.manual_seed(5)
    torch._dynamo.reset()
    x, weight = (leaf(*shape, dtype=torch.float32, device=device) for shape in ((6, 40), (40,)))

    def block(x: Tensor) -> Tensor:
        normed, kept = fused_rms_norm(x * 2, weight)
        return normed.sin() + kept

    expected = torch.autograd.grad(block(x).sum(), (x, weight))
    actual = torch.autograd.grad(torch.compile(block, fullgraph=True, backend="aot_eager")(x).sum(), (x, weight))
    torch.testing.assert_close(actual, expected)


def test_strided_heads_are_read_in_place(device: torch.device) -> None:
    torch.manual_seed(3)
    qkv = torch.randn(7, 10 * 24, device=device)
    heads, weight = qkv[:, 48:192].view(7, 6, 24), torch.randn(24, device=device)
    expected = norm(heads.contiguous(), weight)
    assert torch.equal(norm(heads, weight), expected)
    assert norm(heads, weight).is_contiguous()

    wide = torch.randn(7, 300, device=device)
    assert torch.equal(norm(wide[:, 4:28], weight), norm(wide[:, 4:28].contiguous(), weight))
    assert torch.equal(norm(wide.t()[:24].t(), weight), norm(wide[:, :24].contiguous(), weight))


def test_an_expanded_gradient(device: torch.device, unit: dict[torch.dtype, float]) -> None:
    x, weight = (leaf(*shape, dtype=torch.float32, device=device) for shape in ((6, 40), (40,)))
    norm(x, weight).sum().backward()
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    reference(x64, weight64, 1e-6, False).sum().backward()
    assert_close(x.grad, x64.grad, unit, scale=4.0)
    assert_close(weight.grad, weight64.grad, unit, scale=4.0)


def test_no_rows(device: torch.device) -> None:
    x, weight = (leaf(*shape, dtype=torch.float32, device=device) for shape in ((0, 40), (40,)))
    normed, total = fused_rms_norm(x, weight, x)
    assert normed.shape == total.shape == (0, 40)
    normed.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_repeated_runs_agree_bitwise(device: torch.device) -> None:
    x, weight = (leaf(*shape, dtype=torch.float32, device=device) for shape in ((300, 64), (64,)))
    first, second = (torch.autograd.grad(norm(x, weight).square().sum(), (x, weight)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_mistakes_are_named(device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match=r"float32 \[2, 8\], torch.float32 \[4\]; the weight must have shape \[8\]"):
        norm(x, torch.ones(4, device=device))
    with pytest.raises(ValueError, match=r"torch.float32 \[2, 4\]; .* the residual must be like x"):
        fused_rms_norm(x, torch.ones(8, device=device), torch.zeros(2, 4, device=device))
    wide = torch.zeros(1, MAX_SIZE + 1, device=device)
    with pytest.raises(ValueError, match=f"rows may have at most {MAX_SIZE} elements"):
        norm(wide, wide[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4096, 5120, 8192, 16384, MAX_SIZE])
def test_long_rows_fit_the_device(size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
    check_residual(device, unit, "both", dtype, (300, size))


@pytest.mark.gpu
def test_compiles_whole_for_two_lengths() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        normed, total = fused_rms_norm(x, weight, residual)
        return norm(normed * 2, weight) + total

    compiled = torch.compile(block, fullgraph=True)
    for rows in (16, 33):
        x, residual, weight = (leaf(*s, dtype=torch.float32, device="cuda") for s in ((rows, 64), (rows, 64), (64,)))
        expected = block(x, residual, weight)
        grads = torch.autograd.grad(expected.square().sum(), (x, residual, weight))
        actual = compiled(x, residual, weight)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), (x, residual, weight)), grads)
