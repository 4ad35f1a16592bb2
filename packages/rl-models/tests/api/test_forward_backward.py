"""`update` is `forward_backward` and `optimizer_step`; gradients of several passes add."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, OptimizerOptions, Policy
from rl_models.api import WholeBatches
from rl_models.losses import LossTerms

# The halves have 3 + 4 and 5 + 2 tokens in their masks.
ROWS = [[1, 4, 5, 6], [7, 8, 2, 3, 9], [2, 3, 4, 5, 6, 7], [8, 9, 1]]
HALVES = [0, 1], [2, 3]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", tie_word_embeddings=True)


def load(path: Path, backend: str = "parallel", dims: ParallelDims | None = None) -> Actor:
    dims = dims or ParallelDims()
    optimizer = OptimizerOptions(learning_rate=0.1, eps=1.0)
    options: dict[str, Any] = {"device": "cpu", "optimizer": optimizer, "max_tokens_per_micro_batch": 6}
    return Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh_of(dims), **options)


def push_up(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs, {"entropy": inputs.entropy})


def whole(actor: Actor) -> Policy:
    policy: Any = WholeBatches(actor)
    return policy


def in_parts(group: ProcessGroup, path: Path, backend: str, dims: ParallelDims) -> dict[str, Any]:
    """The metrics and the log-probs after an update, after its two steps, and after passes of halves and a step."""
    found: dict[str, Any] = {}
    batch = Batch.from_sequences(ROWS)
    share = [int(batch.select(half).mask.sum()) / int(batch.mask.sum()) for half in HALVES]
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        for name in ("update", "two steps", "halves"):
            policy = whole(load(path, backend, dims))
            if name == "update":
                metrics = policy.update(batch, push_up, temperature=0.7)
            elif name == "two steps":
                metrics = policy.forward_backward(batch, push_up, temperature=0.7) | policy.optimizer_step()
            else:
                for part, half in zip(share, HALVES, strict=True):
                    loss = lambda inputs, part=part: part * push_up(inputs)  # noqa: E731
                    metrics = policy.forward_backward(batch.select(half), loss, temperature=0.7)
                metrics = policy.optimizer_step()
            found[name] = metrics, policy.log_probs(batch).log_probs
    return found


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        pytest.param("parallel", ParallelDims(), marks=pytest.mark.slow),
        pytest.param("parallel", ParallelDims(tp=2), marks=pytest.mark.slow),
        pytest.param("parallel", ParallelDims(dp=2), marks=pytest.mark.slow),
        ("parallel", ParallelDims(pp=2)),
        pytest.param("transformers", ParallelDims(dp=2), marks=pytest.mark.slow),
        ("megatron", ParallelDims(dp=2)),
    ],
    ids=str,
)
def test_an_update_is_both_steps_and_passes_add(ranks: RankPool, model: Path, backend: str, dims: ParallelDims) -> None:
    for found in ranks.run(in_parts, model, backend, dims, world=dims.world_size, timeout=60):
        (metrics, after), (metrics_of_both, after_both), (metrics_of_halves, after_halves) = found.values()
        assert metrics == metrics_of_both
        assert torch.equal(after, after_both)
        assert metrics_of_halves["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
        torch.testing.assert_close(after_halves, after, rtol=1e-4, atol=1e-5)


def test_a_step_needs_gradients_and_a_failed_pass_drops_them(model: Path) -> None:
    actor, batch = load(model), Batch.from_sequences(ROWS)
    policy: Policy = actor  # mypy holds that an actor is one
    before = actor.log_probs(batch).log_probs
    with pytest.raises(ValueError, match="no gradients since the last step; call forward_backward first"):
        actor.optimizer_step()
    actor.forward_backward(batch, push_up)
    with pytest.raises(ValueError, match="the loss must be one number per token"):
        actor.forward_backward(batch, lambda inputs: inputs.log_probs.sum())
    with pytest.raises(ValueError, match="call forward_backward first"):
        actor.optimizer_step()
    assert (actor.steps, torch.equal(actor.log_probs(batch).log_probs, before)) == (0, True)
    policy.update(batch, push_up)
    with pytest.raises(ValueError, match="call forward_backward first"):
        actor.optimizer_step()
