"""Ranks that are given different arguments are told so, all of them, and nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import MixtralConfig, MixtralForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, OptimizerOptions
from rl_models.losses import LossTerms
from rl_models.workers.agreement import described
from rl_models.workers.whole_batches import WholeBatches


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("same") / "mixtral"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=31, num_hidden_layers=1, num_local_experts=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(path)
    return path


def push_up(log_probs: Tensor, entropy: Tensor, part: Batch) -> LossTerms:
    return LossTerms(-log_probs)


LONG, LONGER = Batch.from_sequences([[1, 2, 3]]), Batch.from_sequences([[1, 2, 3, 4]])
OTHER = Batch.from_sequences([[1, 2, 4]])
MASKED = Batch.from_sequences([[1, 2, 3]], response_lengths=[1])
ROUTED = LONG.with_fields(routing=torch.tensor([[[0, 1]], [[0, 1]], [[0, 1]]]))

# (actor, rank) -> what each rank does.
Call = Callable[[Actor, int], Any]
CALLS: dict[str, Call] = {
    "lengths": lambda actor, rank: actor.log_probs((LONG, LONGER)[rank]),
    "tokens": lambda actor, rank: actor.log_probs((LONG, OTHER)[rank]),
    "mask": lambda actor, rank: actor.update((LONG, MASKED)[rank], push_up),
    "temperature": lambda actor, rank: actor.log_probs(LONG, temperature=(1.0, 2.0)[rank]),
    "no temperature": lambda actor, rank: actor.log_probs(LONG, temperature=(1.0, 0.0)[rank]),
    "aggregation": lambda actor, rank: actor.update(LONG, push_up, aggregation=("token-mean", "sequence-mean")[rank]),
    "no aggregation": lambda actor, rank: actor.update(LONG, push_up, aggregation=("token-mean", "mean")[rank]),
    "routing": lambda actor, rank: actor.log_probs((ROUTED, LONG)[rank]),
    "recording": lambda actor, rank: actor.log_probs(LONG, record_routing=bool(rank)),
    "prompts": lambda actor, rank: actor.generate([[1, 2], [3]][: 1 + rank], max_new_tokens=2),
    "length": lambda actor, rank: actor.generate([[1, 2]], max_new_tokens=2 + rank),
    "no length": lambda actor, rank: actor.generate([[1, 2]], max_new_tokens=rank),
    "whole": lambda actor, rank: WholeBatches(actor).log_probs((LONG, OTHER)[rank]),
    "no whole": lambda actor, rank: WholeBatches(actor).generate([[1], [[2]]][: 1 + rank], max_new_tokens=1),
}


def made_differently(group: ProcessGroup, path: Path, axis: str, expected: dict[str, str]) -> None:
    dims = ParallelDims(**{axis: 2})
    mesh = dims.build_mesh("cpu", [0, 1])
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
                "lengths": "batch: '1 sequences of 3 tokens",
                "tokens": "batch: '1 sequences of 3 tokens",
                "mask": "batch: '1 sequences of 3 tokens",
                "temperature": "rank 0 was given temperature: 1.0 and rank 1 temperature: 2.0",
                "no temperature": "temperature=0.0 must be positive",
                "aggregation": "rank 0 was given aggregation: 'token-mean' and rank 1 aggregation: 'sequence-mean'",
                "prompts": "prompts: '1 sequences of 2 tokens",
                "length": "rank 0 was given max_new_tokens: 2 and rank 1 max_new_tokens: 3",
                "no length": "max_new_tokens=0 must be at least 1",
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
                "whole": "rank 0 was given sequences: '1 sequences of 3 tokens",
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
    mesh = dims.build_mesh("cpu", [0, 1])
    with pytest.raises(ValueError, match=message):
        Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", **options[group.rank()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{}, {"backend": "transformers"}], "backend differs between ranks: 'parallel' on rank 0"),
        ([{}, {"dtype": torch.bfloat16}], "dtype differs between ranks: None on rank 0, torch.bfloat16 on rank 1"),
        ([{}, {"max_tokens_per_micro_batch": 8}], "max_tokens_per_micro_batch differs between ranks: 16384 on rank 0"),
        (
            [{}, {"optimizer": OptimizerOptions(learning_rate=1e-3)}],
            "learning_rate differs between ranks: 1e-06 on rank 0, 0.001 on rank 1",
        ),
    ],
)
def test_a_model_loaded_with_other_options_on_another_rank_is_refused(
    ranks: RankPool, model: Path, options: list[dict[str, Any]], message: str
) -> None:
    ranks.run(loaded_differently, model, options, message, world=2, timeout=60)


def test_a_description_differs_where_sequences_do() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert described([2, 1], *rows) == described([2, 1], torch.tensor([1, 2, 3]))
    assert described([2, 1], *rows).startswith("2 sequences of 3 tokens (checksum ")
    assert described([1, 2], *rows) != described([2, 1], *rows)
    assert described([2, 1], torch.tensor([1, 2, 4])) != described([2, 1], *rows)
    strided = torch.tensor([[1, 0], [2, 0], [3, 0]])[:, 0]
    assert described([2, 1], strided) == described([2, 1], *rows)
    assert described([], torch.tensor([])) == described([])
