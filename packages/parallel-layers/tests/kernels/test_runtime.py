from __future__ import annotations

import pytest
import torch

from parallel_layers.kernels import runtime
from parallel_layers.kernels.runtime import cdiv, next_power_of_2, use_triton


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
    absent = runtime._Absent()

    @absent.jit(noinline=True)
    def kernel(x: absent.constexpr) -> None: ...

    with pytest.raises(RuntimeError, match="needs Triton"):
        kernel[(1,)](0)


def test_powers_and_pieces() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
