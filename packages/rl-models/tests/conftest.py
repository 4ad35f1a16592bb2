"""The pools of ranks that all tests of this package share, and a hypothesis profile without deadlines."""

import importlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

from parallel_layers.testing import RankPool, shared_pool

settings.register_profile("shared-machine", deadline=None, max_examples=50)
settings.load_profile("shared-machine")


# What these ranks import and what takes a second or more: imported once, before the ranks are forked.
SLOW_IMPORTS = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Four gloo ranks, which have of the slow imports what this process has when they are forked."""
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    return shared_pool(preload=["megatron.core", "transformers"])


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each; for tests marked `gpu(2)`."""
    with RankPool(2, backend="nccl") as pool:
        yield pool
