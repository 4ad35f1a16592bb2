"""The pools of ranks that all tests of compositions share."""

from collections.abc import Iterator

import pytest
import torch

from parallel_layers.testing import RankPool, shared_pool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """One rank on each of at most four GPUs; tests that need more than there are were skipped before."""
    with RankPool(min(torch.cuda.device_count(), 4), backend="nccl") as pool:
        yield pool
