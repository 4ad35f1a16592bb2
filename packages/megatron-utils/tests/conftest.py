"""One pool of gloo ranks for all tests of this package."""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from parallel_layers.testing import RankPool, shared_pool

# Where it is installed, Megatron-Core has Transformer Engine multiply for its routers, which asks cuBLAS for TF32. This
# keeps fp32 fp32; cuBLAS reads it when it is first used, so it is set before any rank starts.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"

# The first example of a session pays for imports; a loaded machine is slow at any time.
settings.register_profile("megatron_utils", deadline=None)
settings.load_profile("megatron_utils")


# What these ranks import and what takes long, or imports of Megatron-Core what does: once, before the ranks are forked.
SLOW_IMPORTS = (
    "megatron_utils.dist_checkpointing",
    "megatron_utils.gpt",
    "megatron_utils.optimizer",
    "transformers.modeling_utils",
)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Four gloo ranks, which have of Megatron-Core what this process has when they are forked."""
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    return shared_pool("megatron.core", "transformers")


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """One rank on each of at most four GPUs; tests that need more than there are were skipped before."""
    with RankPool(min(torch.cuda.device_count(), 4), backend="nccl") as pool:
        yield pool
