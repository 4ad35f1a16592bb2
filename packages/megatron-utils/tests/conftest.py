"""One pool of gloo ranks for all tests of this package."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Where it is installed, Megatron-Core has Transformer Engine multiply for its routers, which asks cuBLAS for TF32. This
# keeps fp32 fp32; cuBLAS reads it when it is first used, so it is set before any rank starts.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """Name the modules that these ranks need and that import Megatron-Core."""
    from megatron_utils.core_version import INSTALLED

    if INSTALLED.hybrid:
        # Kernels of layers without attention, where none are installed; ranks start with this path.
        sys.path.append(str(Path(__file__).parent / "kernels"))
    return (
        "megatron_utils.dist_checkpointing",
        "megatron_utils.gpt",
        "megatron_utils.optimizer",
        "transformers.modeling_utils",
    )
