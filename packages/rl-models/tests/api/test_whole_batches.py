"""`WholeBatches`: every public method of a worker is divided over dp, or takes no batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.api.model_calls import ModelCalls
from rl_models.api.whole_batches import WholeBatches
from rl_models.calls import PROMPT_TOKENS_COMPUTED
from rl_models.calls.dispatch import dispatched, methods_of, per_sequence
from rl_models.losses import LossTerms

ROWS = [[1, 4, 5, 6], [7, 8], [2, 3, 4, 5, 6, 7]]


class Perplexed(ActorCritic):
    """A user's actor with methods of its own."""

    @dispatched(per_sequence)
    def surprise(self, batch: Batch) -> Tensor:
        """`[N]`: minus the log-probability of each sequence."""
        return torch.stack([-row.sum() for row in batch.split(self.log_probs(batch).log_probs)])

    def undeclared(self, batch: Batch) -> Tensor:
        return self.surprise(batch)

    def predict(self, batch: Batch, **options: Any) -> dict[str, Tensor]:
        """An override, which is divided as what it overrides."""
        self.seen = len(batch)
        return super().predict(batch, **options)


def push_up(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs * inputs["advantages"] + inputs.values.square())


def use(group: ProcessGroup, path: Path, dp: int) -> dict[str, Any]:
    dims = ParallelDims(dp=dp)
    mesh = mesh_of(dims)
    optimizer = OptimizerOptions(learning_rate=0.1, eps=1.0)
    worker = Perplexed.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", optimizer=optimizer)
    whole = WholeBatches(worker)
    batch = Batch.from_sequences(ROWS, advantages=[[float(len(row))] * len(row) for row in ROWS])
    found: dict[str, Any] = {
        "predict": whole.predict(batch, temperature=0.7),
        "surprise": whole.call("surprise", batch=batch),
    }
    if dp > 1:
        assert worker.seen < len(batch)
    found["step"] = whole.update(batch, push_up)
    found["after"] = whole.log_probs(batch)._asdict()
    assert len(dict(whole.stream_weights())) == len(dict(worker.stream_weights()))
    assert whole.held_weights().key == worker.held_weights().key
    assert (worker.steps, whole.worker_class) == (1, Perplexed)
    assert (whole.grid, whole.engine) == (worker.grid, worker.engine)
    with pytest.raises(AttributeError, match=r"Perplexed.undeclared does not say how .* are divided over dp; declare"):
        whole.call("undeclared", batch)
    return found


def test_predictions_updates_and_a_subclasss_methods_are_divided(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    (expected,) = ranks.run(use, tiny("llama"), 1, world=1)
    for found in ranks.run(use, tiny("llama"), 2, world=2, timeout=60):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected["after"]["log_probs"] - expected["predict"]["log_probs"]).abs().max() > 1e-3


def converse(group: ProcessGroup, path: Path) -> list[list[float]]:
    """Return the numbers of prompt tokens that a second turn computes, first with the cache of the first turn."""
    dims, how = ParallelDims(dp=2), {"max_new_tokens": 5, "max_length": 512, "keep_cache": True}
    whole = WholeBatches(Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu"))
    numbers = []
    for ends in (False, True):
        prompts = [[1 + (3 * place + number) % 60 for place in range(70 + 40 * number)] for number in range(5)]
        first = whole.generate(prompts, **how, seed=1)
        # The first conversation has ended, and the others come in another order.
        second = [[*row.tolist(), *range(9, 50)] for row in first.split()][:0:-1]
        if ends:
            whole.log_probs(Batch.from_sequences(second))
        drawn = whole.generate(second, **how, seed=2)
        numbers.append(drawn[PROMPT_TOKENS_COMPUTED][drawn[PROMPT_TOKENS_COMPUTED] > 0].tolist())
        assert whole._affinity.engine([*drawn.split()[0].tolist(), 1]) is not None
        whole.log_probs(drawn)
        assert whole._affinity.engine([*drawn.split()[0].tolist(), 1]) is None, "the cache has ended"
    return numbers


def test_a_turn_goes_to_the_rank_that_has_its_conversation(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    for kept, anew in ranks.run(converse, tiny("llama", max_position_embeddings=512), world=2):
        assert len(kept) == len(anew) == 4
        assert max(kept) < 64 + 42 < min(anew), "what is new alone"


def learn_by_group(
    group: ProcessGroup, path: Path, dp: int, field: str
) -> tuple[dict[str, float], Tensor, list[set[int]]]:
    """The metrics of an update, the log-probs after it, and the groups of each of this rank's micro-batches."""
    dims = ParallelDims(dp=dp)
    optimizer = OptimizerOptions(learning_rate=0.1, eps=1.0)
    options: dict[str, Any] = {"device": "cpu", "optimizer": optimizer, "max_tokens_per_micro_batch": 12}
    whole = WholeBatches(Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), **options))
    rows = [[n + 1, *row] for n in range(4) for row in ROWS]
    groups = [[n // len(ROWS)] * len(row) for n, row in enumerate(rows)]
    # The sequences of a group do not stand together, and their division by work alone would part them.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_sequences(rows, **{"kept": groups, field: groups}).select(order)
    seen: list[set[int]] = []

    def loss(inputs: LossInputs) -> LossTerms:
        seen.append(set(inputs["kept"].tolist()))
        return LossTerms(-inputs.log_probs)

    return whole.update(batch, loss), whole.log_probs(batch).log_probs, seen


def test_a_group_is_learned_on_one_rank_with_the_same_result(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    ((metrics, log_probs, _),) = ranks.run(learn_by_group, tiny("llama"), 1, "group", world=1)
    shared = {}
    for field in ("group", "kept"):
        seen = []
        for found, after, of_rank in ranks.run(learn_by_group, tiny("llama"), 2, field, world=2, timeout=60):
            assert found == pytest.approx(metrics, rel=1e-5)
            torch.testing.assert_close(after, log_probs, rtol=1e-5, atol=1e-5)
            assert len(of_rank) > 1, "a group may be in several micro-batches"
            seen.append(set().union(*of_rank))
        shared[field] = seen[0] & seen[1]
    assert not shared["group"]
    assert shared["kept"], "without the field `group` a group is on both ranks"


@pytest.mark.parametrize("kind", [Actor, Critic, ActorCritic])
def test_every_public_method_says_how_it_is_divided(kind: type) -> None:
    public = {name for name, value in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    assert public - methods_of(kind).keys() == {"stream_weights", "held_weights"}
    assert public <= vars(ModelCalls).keys()
