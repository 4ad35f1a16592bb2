from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel_layers.testing import RankPool, shared_pool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each; for tests marked `gpu(2)`."""
    with RankPool(2, backend="nccl") as pool:
        yield pool
