"""Value heads of several labels: values, steps and saved files on each backend and grid as transformers' own class."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from meshes import mesh_of
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForTokenClassification

from hf_patches.testing import tiny_config
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.api import WholeBatches
from rl_models.losses import LossTerms, label_cross_entropy

LABELS = 3
LENGTHS = (9, 1, 14, 6)
# So large an epsilon makes AdamW's first step proportional to the gradient.
STEP: dict[str, Any] = {"learning_rate": 10.0, "eps": 10.0}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    return Batch.from_sequences(rows, target=[torch.randn(length, LABELS, generator=generator) for length in LENGTHS])


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["target"]).square().sum(-1))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a token classifier of three labels, and the model."""
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(
        tiny_config("qwen3_moe", vocab_size=64, num_labels=LABELS)
    ).eval()
    with torch.no_grad():
        model.score.bias.normal_()
    folder = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(folder)
    return folder, model


def values_of(model: Any, batch: Batch) -> Tensor:
    """Return the values of the state before each token, one sequence at a time."""
    rows = [model(input_ids=ids[None]).logits[0] for ids in batch.split()]
    return torch.cat([torch.cat([row.new_zeros(1, LABELS), row[:-1]]) for row in rows])


@pytest.fixture(scope="module")
def expected(classifier: tuple[Path, Any]) -> tuple[Tensor, Any]:
    """The values `[T, 3]` of transformers, and the model after a step of torch's AdamW."""
    batch, model = make_batch(), copy.deepcopy(classifier[1])
    values = values_of(model, batch)
    loss(LossInputs(batch, {"values": values})).loss[batch.mask].mean().backward()
    torch.optim.AdamW(model.parameters(), STEP["learning_rate"], (0.9, 0.95), STEP["eps"], weight_decay=0.0).step()
    return values.detach(), model


def learn(group: ProcessGroup | None, path: Path, dims: ParallelDims, out: Path, options: dict[str, Any]) -> Any:
    """Return values and rewards, after a step and a resumed training checkpoint the values again."""
    with cpu_stand_in() if options.get("backend") == "megatron" else nullcontext():
        return learned(path, dims, out, options)


def learned(path: Path, dims: ParallelDims, out: Path, options: dict[str, Any]) -> Any:
    optimizer = OptimizerOptions(**STEP, weight_decay=0.0, max_grad_norm=1e9)
    options = {"dims": dims, "mesh": mesh_of(dims), "device": "cpu", "optimizer": optimizer, **options}
    options["max_tokens_per_micro_batch"] = 16
    worker = Critic.from_pretrained(path, **options)
    critic: Any = WholeBatches(worker)
    batch = make_batch()
    values, rewards = critic.values(batch), critic.rewards(batch)
    critic.update(batch, loss)
    worker.save_pretrained(out / "model")
    worker.save_training(out / "training", step=1)
    again = Critic.from_pretrained(path, **options)
    again.load_training(out / "training")
    whole: Any = WholeBatches(again)
    return values, rewards, critic.values(batch), whole.values(batch)


needs_mesh = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="transformers cannot shard over a mesh of ours"
)
PLACES = {
    "parallel": ({}, {}),
    "parallel-tp2": ({"tp": 2}, {}),
    "parallel-tp2-pp2": ({"pp": 2, "tp": 2}, {}),
    "parallel-tp4": ({"tp": 4}, {"sequence_parallel": False}),
    "parallel-cp2": ({"cp": 2}, {}),
    "parallel-pp2": ({"pp": 2}, {}),
    "parallel-dp2-ep2": ({"dp": 2, "ep": 2}, {}),
    "parallel-shared": ({}, {"share_prefixes": True}),
    "megatron-pp2": ({"pp": 2}, {"backend": "megatron"}),
    "megatron-tp2-ep2": ({"tp": 2, "ep": 2}, {"backend": "megatron"}),
    "megatron-cp2": ({"cp": 2}, {"backend": "megatron"}),
    "megatron-dp2": ({"dp": 2}, {"backend": "megatron"}),
    "transformers": ({}, {"backend": "transformers"}),
    "transformers-cp2": ({"cp": 2}, {"backend": "transformers"}),
    "transformers-tp2": ({"tp": 2, "ep": 2}, {"backend": "transformers"}),
}
IN_EVERY_RUN = ("parallel-tp2-pp2", "megatron-pp2", "transformers")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place,
            marks=[pytest.mark.slow] * (place not in IN_EVERY_RUN) + [needs_mesh] * (place == "transformers-tp2"),
        )
        for place in PLACES
    ],
)
def test_values_steps_and_files_of_three_labels_are_transformers(
    ranks: RankPool, classifier: tuple[Path, Any], expected: tuple[Tensor, Any], tmp_path: Path, place: str
) -> None:
    sizes, options = PLACES[place]
    dims = ParallelDims(**sizes)
    arguments = classifier[0], dims, tmp_path, options
    world = dims.world_size
    results = [learn(None, *arguments)] if world == 1 else ranks.run(learn, *arguments, world=world, timeout=120)
    values, model = expected
    after = values_of(model, make_batch()).detach()
    ends = torch.stack([classifier[1](input_ids=ids[None]).logits[0, -1].detach() for ids in make_batch().split()])
    for actual, rewards, stepped, resumed in results:
        assert actual.shape == (sum(LENGTHS), LABELS)
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
        torch.testing.assert_close(rewards, ends, rtol=0, atol=1e-5)
        torch.testing.assert_close(stepped, after, rtol=1e-4, atol=1e-4)
        assert torch.equal(resumed, stepped)
    saved, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert saved.config.num_labels == LABELS
    for (name, ours), theirs in zip(saved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_a_new_head_has_the_labels_that_are_asked_for(tiny: Callable[..., Path], tmp_path: Path, backend: str) -> None:
    batch = Batch.from_sequences([[1, 2, 3], [4, 5]])
    options: dict[str, Any] = {"backend": backend, "device": "cpu", "num_labels": 2}
    critic = Critic.from_pretrained(tiny("llama"), **options)
    assert not critic.values(batch).any()
    assert critic.values(batch).shape == (5, 2)
    critic.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["score.weight"].shape[0] == 2
    assert json.loads((tmp_path / "config.json").read_text())["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    assert Critic.from_pretrained(tmp_path, backend=backend, device="cpu").values(batch).shape == (5, 2)
    both = ActorCritic.from_pretrained(tiny("llama"), **options).predict(batch)
    assert [tuple(both[name].shape) for name in ("log_probs", "entropy", "values")] == [(5,), (5,), (5, 2)]
    with pytest.raises(ValueError, match=r"num_labels=3, and the value head of .* has 2 labels; leave num_labels out"):
        Critic.from_pretrained(tmp_path, **{**options, "num_labels": 3})
    with pytest.raises(ValueError, match="num_labels=2 is of a value head, which an Actor lacks"):
        Actor.from_pretrained(tiny("llama"), **options)


def test_a_process_reward_model_learns_labels_at_given_tokens(classifier: tuple[Path, Any]) -> None:
    """The loss is that of transformers at the labelled tokens, where the model has read them."""
    ids, labels = [[5, 6, 7, 8], [9, 1, 2]], [[-100, 2, -100, 0], [1, -100, -100]]
    batch = Batch.from_sequences(ids).with_ends(torch.tensor([label for row in labels for label in row]))
    assert [row.tolist() for row in batch.split("mask")] == [
        [False, False, True, False, True],
        [False, True, False, False],
    ]
    critic = Critic.from_pretrained(classifier[0], device="cpu")
    metrics = critic.forward_backward(batch, lambda inputs: label_cross_entropy(inputs.values, inputs["labels"]))
    logits = torch.cat([classifier[1](input_ids=torch.tensor([row])).logits[0] for row in ids]).detach()
    targets = torch.tensor([label for row in labels for label in row])
    assert metrics["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), rel=1e-5)
    correct = (logits.argmax(1) == targets)[targets >= 0]
    assert metrics["label_accuracy"] == pytest.approx(float(correct.float().mean()))
