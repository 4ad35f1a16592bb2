"""One checkpoint, every backend, every grid: log-probs, entropies and values are the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool, shared_pool
from rl_models import Actor, Batch, Critic

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification),
}
PLACES = [
    ("parallel", ParallelDims()),
    ("parallel", ParallelDims(tp=2)),
    ("parallel", ParallelDims(tp=4)),
    ("parallel", ParallelDims(dp=2, tp=2)),
    ("transformers", ParallelDims()),
    ("transformers", ParallelDims(dp=2)),
]


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    for family, (config, actor, critic) in FAMILIES.items():
        torch.manual_seed(len(family))
        actor(config(**SIZES)).save_pretrained(folder / family / "actor")
        critic(config(**SIZES, num_labels=1)).save_pretrained(folder / family / "critic")
    return folder


def numbers(group: ProcessGroup, folder: Path, backend: str, dims: ParallelDims) -> tuple[list[int], Tensor]:
    """The sequences of this data-parallel rank, and `[3, T]`: log-probs, entropies and values of their tokens."""
    mesh = dims.build_mesh("cpu", list(range(group.size()))) if group.size() > 1 else None
    options: dict[str, Any] = {
        "backend": backend, "dims": dims, "mesh": mesh, "device": "cpu", "max_tokens_per_micro_batch": 24
    }  # fmt: skip
    actor = Actor.from_pretrained(folder / "actor", **options)
    critic = Critic.from_pretrained(folder / "critic", **options)
    batch = make_batch()
    indices = list(range(actor.grid.rank("dp"), len(batch), dims.dp))
    part = batch.select(indices)
    return indices, torch.stack([*actor.log_probs(part, temperature=1.3), critic.values(part)])


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch.from_sequences([torch.randint(83, (n,), generator=generator) for n in (5, 1, 23, 8, 2, 13)])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_backends_and_grids_give_the_same_numbers(ranks: RankPool, checkpoints: Path, family: str) -> None:
    batch = make_batch()
    ((_, expected),) = ranks.run(numbers, checkpoints / family, "parallel", ParallelDims(), world=1)
    assert expected.abs().max() > 1
    for backend, dims in PLACES:
        results = ranks.run(numbers, checkpoints / family, backend, dims, world=dims.world_size, timeout=120)
        seen = set()
        for indices, actual in results:
            seen.update(indices)
            torch.testing.assert_close(
                actual, expected[:, batch.positions(indices)], rtol=0, atol=1e-5, msg=f"{backend} {dims}"
            )
        assert seen == set(range(len(batch)))
