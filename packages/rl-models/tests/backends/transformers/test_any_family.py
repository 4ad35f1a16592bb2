"""`backend="transformers"` takes text models outside hf-patches' table: they score, generate, learn and are saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_patches.testing import one_by_one, random_sequences, tiny_model
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, OptimizerOptions
from rl_models.losses import LossTerms

needs_cohere2_moe = pytest.mark.skipif("cohere2_moe" not in CONFIG_MAPPING, reason="this transformers lacks the family")
NOTICE = r"is not in hf-patches' table of families; accepted by this proof: a copy with 2 layers"


@pytest.mark.parametrize(
    "family",
    [pytest.param("cohere2_moe", marks=needs_cohere2_moe), "gpt2", pytest.param("nanochat", marks=pytest.mark.slow)],
)
def test_an_actor_acts_and_learns(family: str, tmp_path: Path) -> None:
    model = tiny_model(family).eval()
    model.save_pretrained(tmp_path / "in")
    with pytest.warns(UserWarning, match=NOTICE):
        actor = Actor.from_pretrained(
            tmp_path / "in", backend="transformers", device="cpu", optimizer=OptimizerOptions(learning_rate=1e-2)
        )
    sequences = random_sequences((7, 1, 12), 61)
    batch = Batch.from_sequences(sequences)

    def assert_same_scores(expected_of: torch.nn.Module) -> None:
        expected = one_by_one(expected_of, sequences).log_probs.detach()
        scored = actor.log_probs(batch).log_probs
        torch.testing.assert_close(scored[~batch.first], expected[(~batch.first).roll(-1)], rtol=0, atol=1e-5)

    assert_same_scores(model)
    drawn = actor.generate(sequences, max_new_tokens=6, temperature=0.8, seed=1)
    again = actor.log_probs(drawn, temperature=0.8).log_probs
    torch.testing.assert_close(drawn["log_probs"], torch.where(drawn.mask, again, 0), rtol=0, atol=1e-5)
    actor.update(drawn, lambda inputs: LossTerms(-inputs.log_probs))
    actor.save_pretrained(tmp_path / "out")
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("in", "out"))
    assert before.keys() == after.keys() == dict(actor.stream_weights()).keys()
    assert not any(torch.equal(after[name], tensor) for name, tensor in before.items() if "embed" in name)
    assert_same_scores(AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"))


def test_a_critic(tmp_path: Path) -> None:
    tiny_model("starcoder2").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=NOTICE):
        critic = Critic.from_pretrained(tmp_path, backend="transformers", device="cpu")
    module = critic.engine.module.eval()
    with torch.no_grad():
        module.score.weight.normal_()
    sequences = random_sequences((7, 1, 12), 61)
    rewards = critic.rewards(Batch.from_sequences(sequences))
    critic.engine.patch.remove()
    expected = torch.stack([module(input_ids=ids[None]).logits[0, -1, 0].detach() for ids in sequences])
    torch.testing.assert_close(rewards, expected, rtol=0, atol=1e-5)


def log_probs_on_ranks(group: ProcessGroup, path: Path, dims: ParallelDims, batch: Batch) -> Tensor:
    actor = Actor.from_pretrained(path, backend="transformers", dims=dims, mesh=mesh_of(dims), device="cpu")
    return actor.log_probs(batch).log_probs


@needs_cohere2_moe
@pytest.mark.parametrize("dims", [ParallelDims(cp=2), ParallelDims(dp=2)], ids=["cp", "dp"])
def test_on_ranks(ranks: RankPool, tmp_path: Path, dims: ParallelDims) -> None:
    """Parameters are sharded before they have values, those of experts' biases too."""
    model = tiny_model("cohere2_moe").eval()
    model.save_pretrained(tmp_path)
    sequences = random_sequences((7, 12), 61)
    batch = Batch.from_sequences(sequences)
    expected = one_by_one(model, sequences).log_probs.detach()
    for scored in ranks.run(log_probs_on_ranks, tmp_path, dims, batch, world=dims.dp * dims.cp):
        torch.testing.assert_close(scored[~batch.first], expected[(~batch.first).roll(-1)], rtol=0, atol=1e-5)


def test_what_differed_is_said(tmp_path: Path) -> None:
    tiny_model("falcon").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"family='auto' refuses FalconForCausalLM .*modeling_falcon\.py, line \d+"):
        Actor.from_pretrained(tmp_path, backend="transformers", device="cpu")
