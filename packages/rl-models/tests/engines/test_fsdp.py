"""What FSDP2 gathers and sums in an update; that all grids agree, with every gradient, is shown in `test_engine.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch
from rl_models.losses import LossTerms


def loss(log_probs: Tensor, entropy: Tensor, part: Batch) -> LossTerms:
    return LossTerms(log_probs)


def collectives(group: ProcessGroup, path: Path) -> list[tuple[int, int]]:
    """Return the numbers of all-gathers and reduce-scatters of an update, and of another one after a generation."""
    dims = ParallelDims(dp=2)
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu")
    found = []
    for _ in range(2):
        batch = Batch.from_sequences([torch.tensor([3, 1, 2])])
        with CommDebugMode() as counted:
            actor.update(batch, loss)
        counts = {str(call): count for call, count in counted.get_comm_counts().items()}
        found.append((counts["c10d._allgather_base_"], counts["c10d._reduce_scatter_base_"]))
        actor.generate([[1, 2]], max_new_tokens=2)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_gathered_once_and_summed_apart(ranks: RankPool, tiny: Callable[..., Path], tied: bool) -> None:
    """Two layers are gathered in the forward and in the backward, the root and an untied head once."""
    expected = (2 * 2 + 1, 2 + 1) if tied else (2 * 2 + 2, 2 + 2)
    for found in ranks.run(collectives, tiny("llama", tie_word_embeddings=tied), world=2):
        assert found == [expected, expected]
