"""A pytest plugin, `-p parallel_layers.testing.fixtures`: pools of ranks that all tests of a session share.

The process that starts the workers of pytest-xdist loads the plugin, too: torch is imported by the fixtures.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from parallel_layers.testing.pool import RankPool

# Packages that take long to import: all ranks have at once, from the process that forks them, what this process has
# imported of them.
_SLOW_PACKAGES = (
    *("megatron.core", "transformers", "torch._dynamo", "torch._functorch"),
    *("parallel_layers", "ckpt", "hf_patches", "megatron_utils", "parallel_models", "rl_models"),
)


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """Slow modules that the ranks of this session need; a conftest overrides this fixture to name them."""
    return ()


@pytest.fixture(scope="session")
def ranks(rank_imports: Sequence[str]) -> RankPool:
    """Four gloo ranks, started by the first call, with the modules of `rank_imports`."""
    from parallel_layers.testing.pool import shared_pool

    for name in rank_imports:
        importlib.import_module(name)
    return shared_pool(*_SLOW_PACKAGES)


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each, for tests marked `gpu(2)`."""
    yield from _nccl_pool(2)


@pytest.fixture(scope="session")
def four_nccl_ranks() -> Iterator[RankPool]:
    """A rank on each of at most four CUDA devices; tests marked `gpu(4)` get four."""
    yield from _nccl_pool(4)


def _nccl_pool(max_ranks: int) -> Iterator[RankPool]:
    from parallel_layers.device.gpus import gpu
    from parallel_layers.testing.pool import RankPool

    with RankPool(min(gpu.device_count(), max_ranks), backend="nccl") as pool:
        yield pool
