from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels.rotary import fused_rotary, fused_split_and_rotary
from parallel_layers.rotary import apply_rotary
from parallel_layers.rotary.embedding import RotaryEmbedding


def angles(lengths: list[int], dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])
    cos, sin = RotaryEmbedding(dim)(positions)
    return cos.to(device), sin.to(device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "head_dim", "dim"),
    [(4, 2, 16, 16), (7, 1, 24, 24), (40, 3, 64, 32), (1, 1, 2, 2), (3, 5, 96, 36)],
)
def test_rotation_and_gradients(
    device: torch.device,
    unit: dict[torch.dtype, float],
    q_heads: int,
    k_heads: int,
    head_dim: int,
    dim: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    torch.manual_seed(1)
    cos, sin = angles([5, 0, 1, 7], dim, device)
    q = torch.randn(13, q_heads, head_dim, device=device).to(dtype).requires_grad_()
    k = torch.randn(13, k_heads, head_dim, device=device).to(dtype).requires_grad_()
    rotated = fused_rotary(q, k, cos, sin, interleaved)
    grads = [torch.randn_like(x) for x in rotated]
    torch.autograd.backward(rotated, grads)

    for x, actual, grad in zip((q, k), rotated, grads, strict=True):
        x64 = x.detach().double().requires_grad_()
        expected = apply_rotary(x64, cos.double(), sin.double(), interleaved=interleaved)
        expected.backward(grad.double())
        for ours, truth in ((actual, expected), (x.grad, x64.grad)):
            assert ours.dtype == dtype
            assert ((ours - truth).abs() <= unit[dtype] * truth.abs() + 1e-6).all()


def test_slices_of_a_fused_projection_are_read_in_place(device: torch.device) -> None:
    cos, sin = angles([6], 16, device)
    qkv = torch.randn(6, 8 * 16, device=device)
    q, k = qkv[:, :64].view(6, 4, 16), qkv[:, 64:96].view(6, 2, 16)
    for actual, expected in zip(
        fused_rotary(q, k, cos, sin), fused_rotary(q.contiguous(), k.contiguous(), cos, sin), strict=True
    ):
        assert torch.equal(actual, expected)
        assert actual.is_contiguous()


def test_heads_far_apart(device: torch.device) -> None:
    """The last head begins 2^31 elements after the first: past 32 bits."""
    apart = 2**30
    memory = torch.empty(2 * apart + 64, dtype=torch.bfloat16, device=device)
    q = memory.as_strided((4, 3, 16), (16, apart, 1)).copy_(torch.randn(4, 3, 16))
    cos, sin = angles([4], 16, device)
    for actual, expected in zip(
        fused_rotary(q, q, cos, sin), fused_rotary(q.contiguous(), q.contiguous(), cos, sin), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "dim"), [(4, 2, 16, 16), (24, 3, 24, 8), (1, 1, 96, 36)])
def test_a_fused_projection_is_taken_apart_and_its_gradient_put_together(
    device: torch.device, q_heads: int, kv_heads: int, head_dim: int, dim: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """Bit for bit the split and the rotation of its parts, forward and backward."""
    torch.manual_seed(2)
    cos, sin = angles([5, 0, 1, 7], dim, device)
    qkv = torch.randn(13, q_heads + 2 * kv_heads, head_dim, device=device).to(dtype).requires_grad_()
    q, k, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
    expected = *fused_rotary(q, k, cos, sin, interleaved), v
    actual = fused_split_and_rotary(qkv, kv_heads, cos, sin, interleaved)
    # Gradients as attention may leave them: not of contiguous tokens, nor of contiguous dims.
    grads = [torch.randn(head_dim, 13, heads, device=device).to(dtype).movedim(0, -1) for heads in (q_heads, kv_heads)]
    grads.append(torch.randn(kv_heads, 13, head_dim, device=device).to(dtype).transpose(0, 1))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)
    ours, theirs = (torch.autograd.grad(results, qkv, grads)[0] for results in (actual, expected))
    assert ours.is_contiguous()
    assert torch.equal(ours, theirs)


def test_no_tokens(device: torch.device) -> None:
    cos, sin = angles([0], 16, device)
    q = torch.zeros(0, 4, 16, device=device, requires_grad=True)
    sum(x.sum() for x in fused_rotary(q, q[:, :1], cos, sin)).backward()
    assert q.grad.shape == q.shape


def test_mistakes_are_named(device: torch.device) -> None:
    cos, sin = angles([6], 16, device)
    q = torch.zeros(6, 4, 16, device=device)
    with pytest.raises(ValueError, match=r"equal T and head_dim"):
        fused_rotary(q, q[:3], cos, sin)
    with pytest.raises(ValueError, match=r"one even D <= 8"):
        fused_rotary(q[..., :8], q[..., :8], cos, sin)


@pytest.mark.gpu
def test_compiles_whole_for_two_lengths() -> None:
    device = torch.device("cuda")
    compiled = torch.compile(fused_rotary, fullgraph=True)
    for tokens in (16, 33):
        cos, sin = angles([tokens], 32, device)
        q = torch.randn(tokens, 4, 32, device=device, requires_grad=True)
        eager, ours = (sum(x.square().sum() for x in f(q * 2, q[:, :2], cos, sin)) for f in (fused_rotary, compiled))
        torch.testing.assert_close(torch.autograd.grad(ours, q), torch.autograd.grad(eager, q))
