from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels import runtime
from parallel_layers.kernels.rms_norm import fused_rms_norm
from parallel_layers.kernels.rotary import fused_rotary
from parallel_layers.kernels.runtime import cdiv, next_power_of_2, use_triton
from parallel_layers.kernels.swiglu import fused_swiglu


def test_cpu_and_wide_tensors_take_torch() -> None:
    assert not use_triton(torch.zeros(2))
    assert not use_triton(None, torch.zeros(2))


@pytest.mark.gpu
def test_kernels_take_cuda_tensors_of_their_dtypes() -> None:
    x = torch.zeros(2, device="cuda")
    assert use_triton(x, None, x.bfloat16(), x.half())
    assert not use_triton(x, x.double())
    assert not use_triton(x, x.cpu())


def test_without_triton_kernels_are_defined_and_say_what_is_missing() -> None:
    absent = runtime._MissingTriton()

    @absent.jit(noinline=True)
    def kernel(x: absent.constexpr) -> None: ...

    with pytest.raises(RuntimeError, match="needs Triton"):
        kernel[(1,)](0)


def test_powers_and_pieces() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.gpu(2)
def test_kernels_run_on_the_gpu_of_their_tensors() -> None:
    """With another one current: forward and backward, to the bit what they are with it current."""

    def run() -> list[torch.Tensor]:
        generator = torch.Generator("cuda:1").manual_seed(0)
        x = torch.randn(6, 4, 16, device="cuda:1", generator=generator).requires_grad_()
        weight = torch.ones(16, device="cuda:1", requires_grad=True)
        normed, total = fused_rms_norm(x, weight, x)
        q, k = fused_rotary(normed, total, total[:, 0], total[:, 1])
        y = fused_swiglu(q + k)
        return [y.detach(), *torch.autograd.grad(y.sum(), (x, weight))]

    with torch.cuda.device(1):
        expected = run()
    assert torch.cuda.current_device() == 0
    for actual, same in zip(run(), expected, strict=True):
        assert torch.equal(actual, same)
