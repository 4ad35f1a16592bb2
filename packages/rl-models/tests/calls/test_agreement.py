"""Ranks that are given different arguments are told so, all of them, and nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.transfer import all_gather_json
from parallel_layers import ParallelDims
from parallel_layers.distributed import form_group
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, OptimizerOptions
from rl_models.api.whole_batches import WholeBatches
from rl_models.calls.tensor_digests import CHUNK, digests
from rl_models.losses import LossTerms


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("mixture")


def push_up(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


LONG, LONGER = Batch.from_sequences([[1, 2, 3]]), Batch.from_sequences([[1, 2, 3, 4]])
OTHER = Batch.from_sequences([[1, 2, 4]])
MASKED = Batch.from_sequences([[1, 2, 3]], response_lengths=[1])
ROUTED = LONG.with_fields(routing=torch.tensor([0, 1]).expand(3, 2, 2))

SCORED = LONG.with_fields(advantages=torch.tensor([0.0, 1.0, 2.0]))
OTHERWISE_SCORED = LONG.with_fields(advantages=torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))

# (actor, rank) -> what each rank does.
Call = Callable[[Actor, int], Any]
CALLS: dict[str, Call] = {
    "lengths": lambda actor, rank: actor.log_probs((LONG, LONGER)[rank]),
    "tokens": lambda actor, rank: actor.log_probs((LONG, OTHER)[rank]),
    "mask": lambda actor, rank: actor.update((LONG, MASKED)[rank], push_up),
    "field": lambda actor, rank: actor.update((SCORED, OTHERWISE_SCORED)[rank], push_up),
    "missing field": lambda actor, rank: actor.log_probs((SCORED, LONG)[rank]),
    "method": lambda actor, rank: actor.log_probs(LONG) if rank else actor.update(LONG, push_up),
    "temperature": lambda actor, rank: actor.log_probs(LONG, temperature=(1.0, 2.0)[rank]),
    "no temperature": lambda actor, rank: actor.log_probs(LONG, temperature=(1.0, 0.0)[rank]),
    "aggregation": lambda actor, rank: actor.update(LONG, push_up, aggregation=("token-mean", "sequence-mean")[rank]),
    "no aggregation": lambda actor, rank: actor.update(LONG, push_up, aggregation=("token-mean", "mean")[rank]),
    "routing": lambda actor, rank: actor.log_probs((ROUTED, LONG)[rank]),
    "recording": lambda actor, rank: actor.predict(LONG, record_routing=bool(rank)),
    "prompts": lambda actor, rank: actor.generate([[1, 2], [3]][: 1 + rank], max_new_tokens=2),
    "length": lambda actor, rank: actor.generate([[1, 2]], max_new_tokens=2 + rank),
    "no length": lambda actor, rank: actor.generate([[1, 2]], max_new_tokens=rank),
    "paths": lambda actor, rank: actor.save_pretrained(f"/nowhere/{rank}"),
    "training paths": lambda actor, rank: actor.save_training(f"/nowhere/{rank}"),
    "an engine": lambda actor, rank: actor.stream_weights(to="vllm" if rank else None),
    "whole": lambda actor, rank: WholeBatches(actor).log_probs((LONG, OTHER)[rank]),
    "whole prompts": lambda actor, rank: WholeBatches(actor).generate([[1], [2]][: 1 + rank], max_new_tokens=1),
    "no whole": lambda actor, rank: WholeBatches(actor).generate([[1], [[2]]][: 1 + rank], max_new_tokens=1),
}


def made_differently(group: ProcessGroup, path: Path, axis: str, expected: dict[str, str]) -> None:
    dims = ParallelDims(**{axis: 2})
    mesh = mesh_of(dims)
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu")
    for name, message in expected.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            CALLS[name](actor, group.rank())
    actor.update(LONG, push_up)  # the ranks are still in step


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (
            "tp",
            {
                "lengths": "sequences: '1 of 3 tokens",
                "tokens": "rank 0 was given tokens: '[3] int64 (checksum ",
                "mask": "rank 0 was given mask: '[3] bool (checksum ",
                "field": "rank 0 was given advantages: '[3] float32' and rank 1 advantages: '[3] float64'",
                "missing field": "rank 0 was given advantages: '[3] float32' and rank 1 advantages: nothing",
                "method": "rank 0 calls Actor.forward_backward and rank 1 calls Actor.predict; make the same calls",
                "temperature": "rank 0 was given temperature: 1.0 and rank 1 temperature: 2.0",
                "no temperature": "temperature=0.0 must be positive",
                "aggregation": "rank 0 was given aggregation: 'token-mean' and rank 1 aggregation: 'sequence-mean'",
                "prompts": "sequences: '1 of 2 tokens",
                "length": "rank 0 was given max_new_tokens: 2 and rank 1 max_new_tokens: 3",
                "no length": "max_new_tokens=0 must be at least 1",
                "paths": "rank 0 was given path: '/nowhere/0' and rank 1 path: '/nowhere/1'",
                "training paths": "rank 0 was given path: '/nowhere/0' and rank 1 path: '/nowhere/1'",
                "an engine": "rank 0 was given to: None and rank 1 to: 'vllm'",
            },
        ),
        (
            "dp",
            {
                "no temperature": "temperature=0.0 must be positive",
                "aggregation": "rank 0 was given aggregation: 'token-mean' and rank 1 aggregation: 'sequence-mean'",
                "no aggregation": "rank 0 was given aggregation: 'token-mean' and rank 1 aggregation: 'mean'",
                "routing": "rank 0 was given routing: True and rank 1 routing: False",
                "recording": "rank 0 was given record_routing: False and rank 1 record_routing: True",
                "no length": "max_new_tokens=0 must be at least 1",
                "whole": "rank 0 was given tokens: '[3] int64 (checksum ",
                "whole prompts": "rank 0 was given sequences: '1 of 1 tokens",
                "no whole": "prompt 1 must be [L] token ids, got [1, 1] torch.int64",
            },
        ),
    ],
)
def test_a_call_with_other_arguments_on_another_rank_is_refused(
    ranks: RankPool, model: Path, axis: str, expected: dict[str, str]
) -> None:
    ranks.run(made_differently, model, axis, expected, world=2, timeout=60)


def loaded_differently(group: ProcessGroup, path: Path, options: list[dict[str, Any]], message: str) -> None:
    dims = ParallelDims(dp=2)
    mesh = mesh_of(dims)
    with pytest.raises(ValueError, match=message):
        Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", **options[group.rank()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{}, {"backend": "transformers"}], "rank 0 was given backend: 'parallel' and rank 1 backend: 'transformers'"),
        ([{}, {"dtype": torch.bfloat16}], "rank 0 was given dtype: None and rank 1 dtype: torch.bfloat16"),
        ([{}, {"max_tokens_per_micro_batch": 8}], "rank 0 was given max_tokens_per_micro_batch: 16384 and rank 1"),
        (
            [{}, {"optimizer": OptimizerOptions(learning_rate=1e-3)}],
            "rank 0 was given learning_rate: 1e-06 and rank 1 learning_rate: 0.001",
        ),
    ],
)
def test_a_model_loaded_with_other_options_on_another_rank_is_refused(
    ranks: RankPool, model: Path, options: list[dict[str, Any]], message: str
) -> None:
    ranks.run(loaded_differently, model, options, message, world=2, timeout=60)


def test_digests_differ_where_integers_bools_shapes_or_dtypes_do() -> None:
    ids = torch.arange(CHUNK + 3)
    swapped = ids.clone()
    swapped[[0, CHUNK]] = ids[[CHUNK, 0]]
    tensors = {
        "ids": ids,
        "swapped": swapped,
        "longer": torch.arange(CHUNK + 4),
        "small": ids.to(torch.int16),
        "bools": torch.tensor([True, False, True]),
        "other bools": torch.tensor([True, True, False]),
        "numbers": torch.zeros(2),
        "doubles": torch.zeros(2, dtype=torch.float64),
        "more numbers": torch.zeros(3),
        "nothing": torch.zeros(0),
    }
    assert len(set(digests(tensors).values())) == len(tensors)
    strided = torch.stack([ids] * 2, dim=1)[:, 0]
    assert digests({"ids": strided})["ids"] == digests(tensors)["ids"]
    assert digests({"numbers": torch.ones(2)})["numbers"] == digests(tensors)["numbers"] == "[2] float32"


def learn_from_other_numbers(group: ProcessGroup, path: Path, dims: ParallelDims) -> Tensor:
    """The log-probs after an update with advantages that differ between ranks."""
    actor = Actor.from_pretrained(
        path, dims=dims, mesh=mesh_of(dims), device="cpu", optimizer=OptimizerOptions(learning_rate=0.1, eps=1.0)
    )
    batch = LONG.with_fields(advantages=torch.tensor([0.0, 1.0, 2.0]) * (1 + group.rank()))
    actor.update(batch, lambda inputs: LossTerms(-inputs.log_probs * inputs["advantages"]))
    assert batch["advantages"][1] == 1 + group.rank(), "the caller's batch stays the caller's"
    return actor.log_probs(LONG).log_probs


@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(cp=2)], ids=str)
def test_ranks_with_the_same_sequences_learn_from_the_numbers_of_the_first(
    ranks: RankPool, model: Path, dims: ParallelDims
) -> None:
    (expected,) = ranks.run(learn_from_other_numbers, model, ParallelDims(), world=1)
    for log_probs in ranks.run(learn_from_other_numbers, model, dims, world=2, timeout=60):
        torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)


def count_messages(group: ProcessGroup, path: Path, backend: str, dims: ParallelDims) -> dict[str, int]:
    """The small messages that each call waits for."""
    sent = 0

    def counting(message: Any, group: ProcessGroup | None) -> list[Any]:
        nonlocal sent
        sent += 1
        return all_gather_json(message, group)

    mesh = mesh_of(dims)
    actor = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu")
    found = {}
    with (
        patch("rl_models.calls.agreement.all_gather_json", counting),
        patch("ckpt.transfer.agreement.all_gather_json", counting),
    ):
        for name, call in {
            "update": lambda: actor.update(ROUTED, push_up),
            "log_probs": lambda: actor.log_probs(ROUTED),
            "generate": lambda: actor.generate([[1, 2]], max_new_tokens=2),
        }.items():
            sent = 0
            call()
            found[name] = sent
    return found


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("parallel", ParallelDims(tp=2)),
        ("parallel", ParallelDims(dp=2)),
        ("parallel", ParallelDims(pp=2)),
        ("transformers", ParallelDims(dp=2)),
    ],
    ids=str,
)
def test_a_call_waits_for_two_messages_at_most(ranks: RankPool, model: Path, backend: str, dims: ParallelDims) -> None:
    for found in ranks.run(count_messages, model, backend, dims, world=2, timeout=60):
        assert found["update"] == 2
        assert found["log_probs"] == 1
        assert found["generate"] <= 2


def call_alone(group: ProcessGroup, path: Path) -> str:
    """Return what rank 0 is told that makes a call alone."""
    dims = ParallelDims(tp=2)
    actor = Actor.from_pretrained(path, dims=dims, mesh=dims.build_mesh("cpu", [0, 1]), device="cpu")
    impatient = form_group([0, 1])
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), impatient)
    actor.engine.grid = replace(actor.grid, everyone=impatient)
    actor.log_probs(LONG)
    told = ""
    if group.rank() == 0:
        with pytest.raises(RuntimeError) as error:
            actor.update(LONG, push_up)
        told = str(error.value)
    dist.barrier(group)
    return told


def test_a_call_that_only_some_ranks_make_names_the_others(ranks: RankPool, model: Path) -> None:
    told, _ = ranks.run(call_alone, model, world=2, timeout=60)
    assert re.match(
        r"Actor.forward_backward is called by every rank of the model's grid, and some ranks have not called it in "
        r"time: "
        rf"rank 1 was last in Actor.predict at {re.escape(__file__)}:\d+ on \S+; call it on every rank",
        told,
    )
