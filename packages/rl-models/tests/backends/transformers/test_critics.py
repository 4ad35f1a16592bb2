"""Critics of `backend="transformers"`: a decoder of transformers with a linear head, for every family of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from meshes import mesh_of
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_patches import FAMILIES
from hf_patches.testing import random_sequences, tiny_model
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Batch, Critic, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

TEXT = sorted(name for name, vision in FAMILIES.items() if vision is None)
# So large an epsilon makes AdamW's first step proportional to the gradient.
OPTIMIZER = OptimizerOptions(learning_rate=10.0, eps=10.0, max_grad_norm=1e9, weight_decay=0.0)
on_ranks = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers cannot shard a model over a mesh of ours before 5.23",
)


@pytest.fixture(scope="module")
def critic_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that saves the language model of a family with a value head beside it."""

    def save(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family, vocab_size=64).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        size = AutoModelForCausalLM.from_pretrained(folder).config.hidden_size
        generator = torch.Generator().manual_seed(0)
        score = {"score.weight": torch.randn(1, size, generator=generator) / size**0.5, "score.bias": torch.ones(1)}
        save_file(weights | score, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return save


def make_batch() -> Batch:
    sequences = random_sequences((7, 1, 12, 4), 60)
    targets = [torch.linspace(-1, 1, len(ids)) for ids in sequences]
    return Batch.from_sequences(sequences, target=targets)


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["target"]).square())


class Reference(nn.Module):
    """transformers' decoder and a linear head, which compute one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        language_model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        weights = load_file(folder / "model.safetensors")
        self.model = language_model.base_model.eval()
        self.score = nn.Linear(self.model.config.hidden_size, 1)
        with torch.no_grad():
            self.score.weight.copy_(weights["score.weight"])
            self.score.bias.copy_(weights["score.bias"])

    def values(self, batch: Batch) -> Tensor:
        """Return the value of the state before each token, 0 for first tokens."""
        columns = []
        for ids in batch.split():
            values = self.score(self.model(input_ids=ids[None]).last_hidden_state)[0, :, 0]
            columns.append(torch.cat([values.new_zeros(1), values[:-1]]))
        return torch.cat(columns)


def load(path: Path, dims: ParallelDims | None = None) -> Critic:
    dims = dims or ParallelDims()
    return Critic.from_pretrained(
        path, backend="transformers", dims=dims, mesh=mesh_of(dims), device="cpu", optimizer=OPTIMIZER
    )


@pytest.mark.families("family")
@pytest.mark.parametrize("family", TEXT)
def test_values_and_every_gradient_are_those_of_the_decoder_with_a_linear_head(
    critic_files: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder, batch = critic_files(family), make_batch()
    reference, critic = Reference(folder), load(folder)
    values = reference.values(batch)
    torch.testing.assert_close(critic.values(batch), values.detach(), rtol=0, atol=1e-5)
    loss(LossInputs(batch, {"values": values})).loss[batch.mask].mean().backward()
    critic.forward_backward(batch, loss)
    gradients = {name: parameter.grad for name, parameter in critic.engine.module.named_parameters()}
    assert gradients.keys() == {name for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        actual = torch.zeros_like(parameter) if gradients[name] is None else gradients[name]
        atol = 2e-5 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(actual, wanted, rtol=0, atol=atol, msg=lambda text, at=name: f"{at}: {text}")
    critic.save_pretrained(tmp_path)
    saved, given = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    # A tied head is the embedding, and a critic has none.
    assert {name for name in given if name not in saved} <= {"lm_head.weight"}
    assert all(torch.equal(given[name], tensor) for name, tensor in saved.items())
    assert torch.equal(load(tmp_path).values(batch), critic.values(batch))


def learn(group: ProcessGroup | None, path: Path, dims: ParallelDims, out: Path) -> tuple[Tensor, float, bool]:
    critic, batch = load(path, dims), make_batch()
    is_sharded = any(isinstance(x, DTensor) for x in critic.engine.module.parameters())
    values = critic.values(batch)
    norm = critic.update(batch, loss)["grad_norm"]
    critic.save_pretrained(out)
    return values, norm, is_sharded


@on_ranks
@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("gemma3_text", ParallelDims(tp=2)),
        *(
            pytest.param(family, ParallelDims(**sizes), marks=pytest.mark.slow)
            for family in ("granitemoe", "minimax_m2", "ernie4_5_moe", "glm4_moe", "deepseek_v2", "olmo2", "granite")
            for sizes in ({"tp": 2, "ep": 1 if family in ("olmo2", "granite") else 2}, {"cp": 2})
        ),
    ],
    ids=str,
)
def test_ranks_learn_and_save_what_one_rank_does(
    ranks: RankPool, critic_files: Callable[[str], Path], tmp_path: Path, family: str, dims: ParallelDims
) -> None:
    folder = critic_files(family)
    values, norm, _ = learn(None, folder, ParallelDims(), tmp_path / "one")
    expected = load_file(tmp_path / "one" / "model.safetensors")
    for actual, actual_norm, is_sharded in ranks.run(learn, folder, dims, tmp_path / "ranks", world=2, timeout=120):
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
        assert actual_norm == pytest.approx(norm, rel=1e-5)
        assert is_sharded
    saved = load_file(tmp_path / "ranks" / "model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")
