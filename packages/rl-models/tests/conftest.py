"""The pool of gloo ranks that all tests of this package share, and a hypothesis profile without deadlines."""

import pytest
from hypothesis import settings

from parallel_layers.testing import RankPool, shared_pool

settings.register_profile("shared-machine", deadline=None, max_examples=50)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()
