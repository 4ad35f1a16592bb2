"""The pools of ranks that all tests of this package share, and a hypothesis profile without deadlines."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from parallel_layers.testing import RankPool, shared_pool

settings.register_profile("shared-machine", deadline=None, max_examples=50)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each; for tests marked `gpu(2)`."""
    with RankPool(2, backend="nccl") as pool:
        yield pool
