"""One pool of gloo ranks for all tests of this package."""

import pytest
from hypothesis import settings

from parallel_layers.testing import RankPool, shared_pool

# The first example of a session pays for imports; a loaded machine is slow at any time.
settings.register_profile("megatron_utils", deadline=None)
settings.load_profile("megatron_utils")


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()
