"""Routers' auxiliary losses of an update: those of all its tokens, whichever micro-batch and rank has them.

That all grids agree, with every gradient, is shown in `tests/engines/test_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import RouterLosses
from rl_models import Actor, Batch, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

EXPERTS, TOP_K = 4, 2
LENGTHS = (12, 1, 5, 7, 3)
WEIGHTS = RouterLosses(balance=0.5, sequence_balance=0.3, z=0.2)


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("mixture", initializer_range=0.3)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    return Batch.from_sequences([torch.randint(53, (length,), generator=generator) for length in LENGTHS])


def no_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(0 * inputs.log_probs)


def by_transformers(path: Path) -> float:
    """The norm of the gradient of the routers' losses of all sequences together."""
    model = Qwen3MoeForCausalLM.from_pretrained(path)
    logits = [model(row[None], output_router_logits=True).router_logits for row in make_batch().split()]
    total = torch.zeros(())
    for of_layer in zip(*logits, strict=True):
        together = torch.cat(of_layer)
        total = total + WEIGHTS.balance * load_balancing_loss_func((together,), EXPERTS, TOP_K)
        total = total + WEIGHTS.z * together.logsumexp(-1).square().mean()
        # DeepSeek-V3's is the same for one sequence, but for a factor k.
        alone = [load_balancing_loss_func((of_one,), EXPERTS, TOP_K) / TOP_K for of_one in of_layer]
        total = total + WEIGHTS.sequence_balance * torch.stack(alone).mean()
    gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return float(torch.stack([g.norm() for g in gradients if g is not None]).norm())


def update(
    group: ProcessGroup, path: Path, dims: ParallelDims, sequences: list[list[int]], losses: RouterLosses
) -> float:
    """The gradient norm of the routers' losses alone; `sequences` of each data-parallel rank."""
    mesh = mesh_of(dims)
    actor = Actor.from_pretrained(
        path,
        dims=dims,
        mesh=mesh,
        device="cpu",
        router_losses=losses,
        optimizer=OptimizerOptions(learning_rate=0.0),
        max_tokens_per_micro_batch=12,
    )
    return actor.update(make_batch().select(sequences[actor.grid.rank("dp")]), no_loss)["grad_norm"]


@pytest.mark.parametrize(
    ("dims", "sequences"),
    [
        (ParallelDims(), [[0, 1, 2, 3, 4]]),
        (ParallelDims(dp=2), [[0, 1, 2, 3], [4]]),  # the second rank's further micro-batches are empty
        pytest.param(ParallelDims(dp=2, cp=2), [[0, 1, 2, 3], [4]], marks=pytest.mark.slow),
    ],
    ids=["one", "dp2", "dp2-cp2"],
)
def test_losses_are_those_of_all_tokens_together(
    ranks: RankPool, model: Path, dims: ParallelDims, sequences: list[list[int]]
) -> None:
    expected = by_transformers(model)
    for norm in ranks.run(update, model, dims, sequences, WEIGHTS, world=dims.world_size, timeout=60):
        assert norm == pytest.approx(expected, rel=1e-5)


def test_without_weights_nothing_is_added(ranks: RankPool, model: Path) -> None:
    assert ranks.run(update, model, ParallelDims(), [[0, 1, 2, 3, 4]], RouterLosses(), world=1) == [0]
