"""Where kernels are tested: on a GPU, and on a CPU in the interpreter of an installed Triton (`TRITON_INTERPRET=1`).

The interpreter of Triton 3.6 wants a NumPy before 2.4.
"""

from __future__ import annotations

import os

import pytest
import torch

from parallel_layers.kernels.runtime import HAS_TRITON


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "interpreter"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda")
    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def unit(device: torch.device) -> dict[torch.dtype, float]:
    """The largest relative error of rounding once to each dtype; the interpreter truncates bf16, where GPUs round."""
    return {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8 if device.type == "cuda" else 2.0**-7}
