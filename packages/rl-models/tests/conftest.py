"""The pools of ranks that all tests of this package share, and a hypothesis profile without deadlines."""

import importlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool, shared_pool
from rl_models.launch import prepare
from rl_models.slow_imports import slow_imports

settings.register_profile("shared-machine", deadline=None, max_examples=50)
settings.load_profile("shared-machine")


EVERYTHING = slow_imports(ParallelDims(dp=2, pp=2), saves=True)


@pytest.fixture(scope="session", autouse=True)
def server_of_command_ranks() -> None:
    """The server that forks the ranks of commands imports once what it has when it starts: that of all commands."""
    prepare("rl_models.score", "rl_models.train.run", "rl_models.backends.huggingface", *EVERYTHING)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Four gloo ranks, which have of the slow imports what this process has when they are forked."""
    for name in EVERYTHING:
        importlib.import_module(name)
    return shared_pool()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each; for tests marked `gpu(2)`."""
    with RankPool(2, backend="nccl") as pool:
        yield pool
