"""The pool of ranks that all tests of compositions share."""

import pytest

from parallel_layers.testing import RankPool, shared_pool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()
