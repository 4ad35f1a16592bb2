from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from parallel_layers.testing import RankPool, shared_pool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    # Many tests compile on the ranks; each new rank would import these modules again.
    import torch._dynamo.testing
    import torch._functorch.aot_autograd  # noqa: F401

    return shared_pool("transformers", "torch._dynamo", "torch._functorch")


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with a CUDA device each; for tests marked `gpu(2)`."""
    with RankPool(2, backend="nccl") as pool:
        yield pool


@pytest.fixture(scope="session")
def four_nccl_ranks() -> Iterator[RankPool]:
    """Four ranks with a CUDA device each; for tests marked `gpu(4)`."""
    with RankPool(4, backend="nccl") as pool:
        yield pool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def on_two_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs a function that takes a `device` on two ranks: over gloo, and over NCCL with a CUDA device each."""
    pool: RankPool = request.getfixturevalue("ranks" if request.param == "cpu" else "nccl_ranks")
    return partial(pool.run, world=2, device=request.param)
