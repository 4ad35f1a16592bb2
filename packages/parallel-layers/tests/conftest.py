from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from parallel_layers.testing import RankPool


@pytest.fixture(scope="session")
def rank_imports() -> Sequence[str]:
    """Many tests compile on the ranks; each new rank would import these modules again."""
    return "torch._dynamo.testing", "torch._functorch.aot_autograd"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def on_two_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs a function that takes a `device` on two ranks: over gloo, and over NCCL with a CUDA device each."""
    pool: RankPool = request.getfixturevalue("ranks" if request.param == "cpu" else "nccl_ranks")
    return partial(pool.run, world=2, device=request.param)
