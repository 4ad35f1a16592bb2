"""An update under FSDP2 has no more collectives than it needs, and replicas agree on the norm of the gradient.

`test_engine.py` compares the gradients of all grids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs
from rl_models.losses import LossTerms


class Counted(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs)


def collectives(group: ProcessGroup, path: Path) -> list[tuple[int, int]]:
    """Return the numbers of all-gathers and reduce-scatters of an update, and of another one after a generation."""
    dims = ParallelDims(dp=2)
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu")
    found = []
    for _ in range(2):
        batch = Batch.from_sequences([torch.tensor([3, 1, 2])])
        with Counted() as counted:
            actor.update(batch, loss)
        found.append((counted.calls["_allgather_base_"], counted.calls["_reduce_scatter_base_"]))
        actor.generate([[1, 2]], max_new_tokens=2)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_gathered_once_and_summed_apart(ranks: RankPool, tiny: Callable[..., Path], tied: bool) -> None:
    """Two layers are gathered in the forward and in the backward, the root and an untied head once."""
    expected = (2 * 2 + 1, 2 + 1) if tied else (2 * 2 + 2, 2 + 2)
    for found in ranks.run(collectives, tiny("llama", tie_word_embeddings=tied), world=2):
        assert found == [expected, expected]


def norm_of_differing_replicas(group: ProcessGroup, path: Path, backend: str) -> float:
    """Return the norm of an update whose gradients differ between the replicas, as by the last bits of a sum."""
    dims = ParallelDims(dp=4, replicate=2)
    actor = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu")
    actor.forward_backward(Batch.from_sequences([torch.tensor([3, 1, 2])]), loss)
    for parameter in actor.engine.module.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1.0 + 0.1 * actor.grid.rank("dp")
    return actor.optimizer_step()["grad_norm"]


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_replicas_clip_by_one_norm(ranks: RankPool, tiny: Callable[..., Path], backend: str) -> None:
    """Else their weights would drift apart."""
    assert len(set(ranks.run(norm_of_differing_replicas, tiny("llama"), backend, world=4))) == 1
