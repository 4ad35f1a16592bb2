"""One checkpoint, every backend, every grid: log-probs, entropies, values and gradients are the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForTokenClassification,
)

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, OptimizerOptions
from rl_models.losses import LossTerms

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
PAD = 16
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "mlp_only_layers": [1],
}
FAMILIES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    # A token that serves as padding elsewhere, and that the batch has.
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification, {"pad_token_id": PAD}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForTokenClassification, EXPERTS),
}
PLACES = [
    ("parallel", ParallelDims()),
    ("parallel", ParallelDims(tp=2)),
    ("parallel", ParallelDims(tp=4)),
    ("parallel", ParallelDims(dp=2, tp=2)),
    ("parallel", ParallelDims(pp=2)),
    ("parallel", ParallelDims(cp=2)),
    ("parallel", ParallelDims(pp=2, cp=2)),
    ("parallel", ParallelDims(tp=2, ep=2)),
    ("parallel", ParallelDims(dp=2, ep=2)),
    ("parallel", ParallelDims(pp=2, tp=2, ep=2)),
    ("transformers", ParallelDims()),
    ("transformers", ParallelDims(dp=2)),
    ("transformers", ParallelDims(cp=2)),
    ("transformers", ParallelDims(dp=2, cp=2)),
]
# A few places that have every backend and axis, with dense layers and experts; the slow run has every place.
PLAIN: dict[str, list[tuple[str, ParallelDims]]] = {
    "qwen3_moe": [
        ("parallel", ParallelDims()),
        ("parallel", ParallelDims(pp=2, tp=2, ep=2)),
        ("transformers", ParallelDims(dp=2)),
    ],
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    for family, (config, actor, critic, more) in FAMILIES.items():
        torch.manual_seed(len(family))
        actor(config(**SIZES, **more)).save_pretrained(folder / family / "actor")
        critic(config(**SIZES, **more, num_labels=1)).save_pretrained(folder / family / "critic")
    return folder


def places(family: str) -> list[tuple[str, ParallelDims]]:
    """Return all places of the family: only a mixture has experts to divide."""
    return [place for place in PLACES if "num_experts" in FAMILIES[family][3] or place[1].ep == 1]


CASES = [pytest.param(family, PLAIN[family], id=family) for family in PLAIN]
CASES += [
    pytest.param(family, places(family), id=f"{family} everywhere", marks=pytest.mark.slow) for family in FAMILIES
]


def load(group: ProcessGroup, folder: Path, backend: str, dims: ParallelDims) -> tuple[Actor, Critic]:
    mesh = dims.build_mesh("cpu", list(range(group.size()))) if group.size() > 1 else None
    options: dict[str, Any] = {
        "backend": backend, "dims": dims, "mesh": mesh, "device": "cpu", "max_tokens_per_micro_batch": 24,
        # So large an epsilon makes AdamW's first step proportional to the gradient.
        "optimizer": OptimizerOptions(learning_rate=1e5, eps=1e5, max_grad_norm=math.inf),
    }  # fmt: skip
    actor = Actor.from_pretrained(folder / "actor", **options)
    return actor, Critic.from_pretrained(folder / "critic", **options)


def my_part(worker: Actor) -> tuple[list[int], Batch]:
    """The sequences of this data-parallel rank, and their numbers."""
    batch = make_batch()
    indices = list(range(worker.grid.rank("dp"), len(batch), worker.grid.dims.dp))
    return indices, batch.select(indices)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 23, 8, 2, 13)
    rows = [torch.randint(83, (n,), generator=generator) for n in lengths]
    return Batch.from_sequences(rows, advantages=[torch.randn(n, generator=generator) for n in lengths])


class Rank(NamedTuple):
    """The sequences of a data-parallel rank, and `[3, T]`: log-probs, entropies and values of their tokens."""

    indices: list[int]
    numbers: Tensor


class Found(NamedTuple):
    """What a backend computes on a grid, and the folder of actor and critic after a step."""

    ranks: list[Rank]
    folder: Path


def train(group: ProcessGroup, folder: Path, backend: str, dims: ParallelDims, out: Path) -> Rank:
    """Return what actor and critic say; then one step of both, saved."""
    actor, critic = load(group, folder, backend, dims)
    indices, part = my_part(actor)
    numbers = torch.stack([*actor.log_probs(part, temperature=1.3), critic.values(part)])
    actor.update(part, lambda inputs: LossTerms(inputs["advantages"] * inputs.log_probs - 0.1 * inputs.entropy, {}))
    critic.update(part, lambda inputs: LossTerms((inputs.values - inputs["advantages"]).square(), {}))
    actor.save_pretrained(out / "actor")
    critic.save_pretrained(out / "critic")
    return Rank(indices, numbers)


@pytest.fixture(scope="module")
def trained(
    ranks: RankPool, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, ParallelDims], Found]:
    """`trained(family, backend, dims)`: each place runs once."""

    @cache
    def run(family: str, backend: str, dims: ParallelDims) -> Found:
        out = tmp_path_factory.mktemp(family)
        arguments = checkpoints / family, backend, dims, out
        return Found(ranks.run(train, *arguments, world=dims.world_size, timeout=120), out)

    return run


@pytest.mark.parametrize(("family", "where"), CASES)
def test_all_backends_and_grids_give_the_same_numbers_and_gradients(
    trained: Callable[[str, str, ParallelDims], Found],
    checkpoints: Path,
    family: str,
    where: list[tuple[str, ParallelDims]],
) -> None:
    batch = make_batch()
    one = trained(family, *where[0])  # `parallel` on one rank
    expected = one.ranks[0].numbers
    assert expected.abs().max() > 1
    for backend, dims in where:
        found, at = trained(family, backend, dims), f"{backend} {dims}"
        assert {index for rank in found.ranks for index in rank.indices} == set(range(len(batch)))
        for indices, actual in found.ranks:
            wanted = expected[:, batch.positions(indices)]
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5, msg=lambda text, at=at: f"{at}: {text}")
        for kind in ("actor", "critic"):
            assert_same_step(checkpoints / family / kind, one.folder / kind, found.folder / kind, at)


def assert_same_step(start: Path, one: Path, other: Path, at: str) -> None:
    """Compare the steps from `start` of two places, which are proportional to the gradients."""
    before, expected, actual = (load_file(folder / "model.safetensors") for folder in (start, one, other))
    for name, value in before.items():
        step = expected[name] - value
        scale = step.abs().max().item()
        assert scale > 0, name
        # The difference of two parameters is rounded as these are.
        atol = 1e-4 * scale + 1e-6 * value.abs().max().item()
        message = f"{name} {at}: ".__add__
        torch.testing.assert_close(actual[name] - value, step, rtol=0, atol=atol, msg=message)
