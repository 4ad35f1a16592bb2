"""Every family on every backend: its weights saved, streamed and in training checkpoints, and which of them decay."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.canonical import canonical
from tests.test_families import BACKENDS_OF, CELLS, WEIGHTS_ON, what_it_needs
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_patches.testing import random_sequences, tiny_model
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_layers.training import has_weight_decay
from rl_models import Actor, Batch, OptimizerOptions, losses


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`published(family)`: a checkpoint as the family's publisher writes it, of random numbers that all differ."""

    @cache
    def save(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        model, generator = tiny_model(family), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
        model.save_pretrained(folder)
        stored = canonical(load_file(folder / "model.safetensors"), folder)
        if family == "qwen3_vl_moe":  # transformers saves the matrices of experts the other way round
            stored = with_experts_transposed(stored)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return save


def with_experts_transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the last two dimensions of stacked experts exchanged."""
    return {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in tensors.items()}


def whole(step: Path, prefix: str = "model/") -> dict[str, Tensor]:
    """Return the weights of a training checkpoint; its files hold boxes, such as `model/NAME@8,0`."""
    boxes: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in step.glob("*.safetensors"):
        for key, box in load_file(file).items():
            if key.startswith(prefix):
                name, _, offset = key.removeprefix(prefix).partition("@")
                boxes.setdefault(name, []).append(([int(x) for x in offset.split(",") if x], box))
    tensors = {}
    for name, parts in boxes.items():
        ends = [[a + b for a, b in zip(offset, box.shape, strict=True)] for offset, box in parts]
        tensors[name] = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], torch.nan)
        for (offset, box), stops in zip(parts, ends, strict=True):
            tensors[name][tuple(slice(*sides) for sides in zip(offset, stops, strict=True))] = box
    return tensors


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The tensors have the same names, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.families("family")
@pytest.mark.parametrize(
    ("family", "backend"),
    [pytest.param(*cell, marks=() if WEIGHTS_ON[cell[0]] == cell[1] else pytest.mark.slow) for cell in CELLS],
)
def test_weights_come_out_as_they_went_in(
    published: Callable[[str], Path], tmp_path: Path, family: str, backend: str
) -> None:
    path = published(family)
    stored = load_file(path / "model.safetensors")
    with what_it_needs(backend):
        actor = Actor.from_pretrained(path, backend=backend, device="cpu", optimizer=OptimizerOptions())
        actor.save_pretrained(tmp_path / "out")
        assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), stored)
        assert_same_bits({name: tensor.clone() for name, tensor in actor.stream_weights()}, stored)
        actor.save_training(tmp_path / "run")
        assert_same_bits(whole(tmp_path / "run" / "step-00000000"), stored)
        for parameter in actor.engine.shards().parameters.values():
            parameter.detach().zero_()
        actor.load_training(tmp_path / "run")
        assert_same_bits({name: tensor.clone() for name, tensor in actor.stream_weights()}, stored)
    kinds = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (path, tmp_path / "out")]
    assert kinds[0] == kinds[1]


def updated(path: Path, backend: str, run: Path) -> tuple[dict[str, Tensor], ...]:
    """Return the experts in the training checkpoint of an actor after an update, see `experts`."""
    batch = Batch.from_sequences(random_sequences((7, 12), 32))
    with what_it_needs(backend):
        actor = Actor.from_pretrained(path, backend=backend, device="cpu", optimizer=OptimizerOptions())
        actor.update(batch, lambda inputs: losses.LossTerms(-inputs.log_probs))
        actor.save_training(run)
    return experts(run)


def experts(run: Path) -> tuple[dict[str, Tensor], ...]:
    """Return the weights of experts, and their AdamW state, in the only checkpoint of a run."""
    (step,) = run.glob("step-*")
    parts = (whole(step, prefix) for prefix in ("model/", "optimizer/"))
    return tuple({name: tensor for name, tensor in part.items() if ".experts." in name} for part in parts)


@pytest.mark.parametrize("order", ["as published", pytest.param("as transformers saves", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "size", [pytest.param(24, marks=pytest.mark.slow), pytest.param(16, id="square", marks=pytest.mark.slow)]
)
def test_experts_in_either_order_resume_on_every_backend(tmp_path: Path, size: int, order: str) -> None:
    """Files of Qwen3-VL-MoE have its experts in the order of transformers' model, or in the other one."""
    tiny_model("qwen3_vl_moe", moe_intermediate_size=size).save_pretrained(tmp_path / "in")
    if order == "as published":
        file = tmp_path / "in" / "model.safetensors"
        save_file(with_experts_transposed(load_file(file)), file, metadata={"format": "pt"})
    stored = load_file(tmp_path / "in" / "model.safetensors")
    published = stored if order == "as published" else with_experts_transposed(stored)
    backends = BACKENDS_OF["qwen3_vl_moe"]
    assert len(backends) == 3
    trained = {backend: updated(tmp_path / "in", backend, tmp_path / backend) for backend in backends}
    for backend in backends:
        for tensors, expected in zip(trained[backend], trained["parallel"], strict=True):
            torch.testing.assert_close(tensors, expected, rtol=1e-4, atol=1e-5)
    for backend, source in itertools.permutations(backends, 2):
        with what_it_needs(backend):
            actor = Actor.from_pretrained(tmp_path / "in", backend=backend, device="cpu", optimizer=OptimizerOptions())
            assert_same_bits({name: tensor.clone() for name, tensor in actor.stream_weights()}, published)
            actor.load_training(tmp_path / source)
            actor.save_training(tmp_path / f"{source} to {backend}")
        for tensors, expected in zip(experts(tmp_path / f"{source} to {backend}"), trained[source], strict=True):
            assert_same_bits(tensors, expected)


def resume(group: ProcessGroup, path: Path, run: Path, out: Path) -> None:
    dims = ParallelDims(dp=group.size())
    options: dict[str, Any] = {"dims": dims, "mesh": dims.build_mesh("cpu", [0, 1]), "optimizer": OptimizerOptions()}
    actor = Actor.from_pretrained(path, backend="transformers", device="cpu", **options)
    actor.load_training(run)
    actor.save_training(out)


def test_divided_experts_resume_from_another_backend(
    published: Callable[[str], Path], ranks: RankPool, tmp_path: Path
) -> None:
    """FSDP2 divides the experts: the views in the other order are DTensors."""
    path = published("qwen3_vl_moe")
    trained = updated(path, "parallel", tmp_path / "run")
    ranks.run(resume, path, tmp_path / "run", tmp_path / "out", world=2)
    for tensors, expected in zip(experts(tmp_path / "out"), trained, strict=True):
        assert_same_bits(tensors, expected)


@pytest.mark.parametrize(
    ("family", "backend"),
    [pytest.param(*cell, marks=() if cell[0] in ("gpt_oss", "gemma4") else pytest.mark.slow) for cell in CELLS],
)
def test_the_same_weights_decay_on_every_backend(published: Callable[[str], Path], family: str, backend: str) -> None:
    """Without gradients a step changes the tensors with weight decay alone."""
    with what_it_needs(backend):
        options = OptimizerOptions(learning_rate=0.1, weight_decay=0.5)
        actor = Actor.from_pretrained(published(family), backend=backend, device="cpu", optimizer=options)
        before = {name: tensor.clone() for name, tensor in actor.stream_weights()}
        for parameter in actor.engine.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        actor.optimizer.step(0.1)
        changed = {name for name, tensor in actor.stream_weights() if not torch.equal(tensor, before[name])}
    shards = actor.engine.shards()
    trained = {
        name
        for place, tensors in shards.chunks
        for local_name, tensor in tensors.items()
        if tensor.requires_grad  # vision towers are carried along on some backends
        for name in shards.layout.at(place)[local_name].names
    }
    assert changed == {name for name, tensor in before.items() if name in trained and has_weight_decay(name, tensor)}
