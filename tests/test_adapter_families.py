"""Adapters of every family: PEFT and vLLM read the files as the native models do."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.adapted_models import peft
from tests.test_parity_models import ACTORS, MIXTURES, checkpoint, make_batch
from torch import Tensor
from transformers import PreTrainedModel

import ckpt
from ckpt.layout import EXPERTS, adaptable
from parallel_layers.model import LoraOptions
from rl_models import Actor, Batch

RANK, ALPHA = 2, 6.0
# Of a plain run: a dense model; mixtures with dense MLPs, shared experts, files that stack the experts under other
# names; and models whose files and modules have different names.
PLAIN = ("llama", "qwen3-moe", "deepseek-v2", "granitemoe", "qwen2.5-vl", "kimi-k2.5", "kimi-linear")
NAMES = [pytest.param(name, marks=() if name in PLAIN else pytest.mark.slow) for name in ACTORS]


def expert_targets(folder: Path) -> list[str]:
    """The stacked experts of a model, as targets."""
    names, _ = adaptable(ckpt.layout_for(folder))
    experts = (name for local, part in names.items() if local.endswith(EXPERTS) for name in part)
    return sorted({re.sub(r"^.*\.\d+\.", "", name) for name in experts})


def adapted(folder: Path, out: Path, **options: Any) -> Actor:
    """An actor with adapters that are not zero, which are also saved."""
    lora = LoraOptions(RANK, ALPHA, **options)
    actor = Actor.from_pretrained(folder, device="cpu", lora=lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in actor.engine.adapters().parameters.values():  # type: ignore[union-attr]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    actor.save_adapter(out)
    return actor


def log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    found = []
    with torch.no_grad():
        for ids in batch.split():
            log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            found.append(torch.cat([log_p.new_zeros(1), log_p[:-1].gather(1, ids[1:, None])[:, 0]]))
    return torch.cat(found)


@pytest.mark.families("name")
@pytest.mark.parametrize("name", NAMES)
def test_peft_reads_what_was_computed(name: str, tmp_path: Path) -> None:
    model, batch = checkpoint(tmp_path / "base", name, 2), make_batch()
    experts = expert_targets(tmp_path / "base")
    assert bool(experts) == (name in MIXTURES)
    for targets in (["all-linear"], ["all-linear", *experts])[: 1 + bool(experts)]:
        actor = adapted(tmp_path / "base", tmp_path / "adapter", targets=targets)
        ours = actor.log_probs(batch).log_probs
        assert not torch.allclose(ours, actor.log_probs(batch, adapters=False).log_probs, atol=0.1)
        with warnings.catch_warnings():
            # PEFT warns of adapters that the file lacks, or that match no layer.
            warnings.filterwarnings("error", ".*(adapter keys|rank_pattern|were set but).*")
            theirs = peft().PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        torch.testing.assert_close(log_probs(theirs, batch), ours, rtol=1e-5, atol=1e-5)
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        loaded = peft().get_peft_model_state_dict(theirs)
        assert {key: tensor.shape for key, tensor in stored.items()} == {k: t.shape for k, t in loaded.items()}
        model = theirs.unload()
        again = Actor.from_pretrained(tmp_path / "base", device="cpu", lora=tmp_path / "adapter")
        assert torch.equal(again.log_probs(batch).log_probs, ours)


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_what_peft_makes_of_all_linears_of_a_mixture(name: str, tmp_path: Path) -> None:
    """PEFT adapts the experts then, with twice the rank: refused, and what the error says is read."""
    model, batch = checkpoint(tmp_path / "base", name, 2), make_batch()
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    for targets in ({"target_modules": "all-linear"}, {"target_modules": ["o_proj"], "target_parameters": parameters}):
        theirs = peft().get_peft_model(model, peft().LoraConfig(r=RANK, task_type="CAUSAL_LM", **targets)).eval()
        for key, parameter in theirs.named_parameters():
            if "lora" in key:
                torch.nn.init.normal_(parameter, 0, 0.2)
        theirs.save_pretrained(tmp_path / "adapter")
        if targets["target_modules"] == "all-linear":
            with pytest.raises(ValueError, match=r"rank_pattern=.*PEFT doubles .*give PEFT target_parameters="):
                Actor.from_pretrained(tmp_path / "base", device="cpu", lora=tmp_path / "adapter")
            model = theirs.unload()
    ours = Actor.from_pretrained(tmp_path / "base", device="cpu", lora=tmp_path / "adapter").log_probs(batch).log_probs
    torch.testing.assert_close(log_probs(theirs, batch), ours, rtol=1e-5, atol=1e-5)


def test_peft_reads_adapters_that_were_trained_with_dropout(tmp_path: Path) -> None:
    """PEFT has no dropout for parameters, such as the weights of shared experts; ours goes on in a later run."""
    model, batch = checkpoint(tmp_path / "base", "deepseek-v3", 2), make_batch()
    actor = adapted(tmp_path / "base", tmp_path / "adapter", dropout=0.25)
    theirs = peft().PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    torch.testing.assert_close(log_probs(theirs, batch), actor.log_probs(batch).log_probs, rtol=1e-5, atol=1e-5)
    again = Actor.from_pretrained(tmp_path / "base", device="cpu", lora=tmp_path / "adapter")
    assert {module.dropout for module in again.engine.adapter_dropouts()} == {0.25}


@pytest.mark.parametrize(
    "name",
    [
        *("kimi-k2.5", "nemotron-h"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "qwen2-vl",
                "qwen2.5-vl",
                "glm4v-moe",
                "qwen3-next",
                "olmo-hybrid",
                "kimi-linear",
                "granite-hybrid",
                "granite-hybrid-moe",
            )
        ),
    ],
)
def test_patched_models_name_layers_as_their_modules(name: str, tmp_path: Path) -> None:
    """The files of some models name layers in another way: the merged weights have the adapters all the same."""
    checkpoint(tmp_path / "base", name, 2)
    adapted(tmp_path / "base", tmp_path / "adapter")
    options: dict[str, Any] = {"device": "cpu", "lora": tmp_path / "adapter"}
    native, patched = (
        Actor.from_pretrained(tmp_path / "base", backend=backend, **options) for backend in ("parallel", "transformers")
    )
    batch = make_batch()
    expected = native.log_probs(batch).log_probs
    torch.testing.assert_close(patched.log_probs(batch).log_probs, expected, rtol=1e-5, atol=1e-5)
    patched.save_adapter(tmp_path / "again")
    patched.save_pretrained(tmp_path / "merged")
    merged = Actor.from_pretrained(tmp_path / "merged", device="cpu")
    torch.testing.assert_close(merged.log_probs(batch).log_probs, expected, rtol=1e-5, atol=1e-5)
    files = [(tmp_path / part / "adapter_model.safetensors").read_bytes() for part in ("adapter", "again")]
    assert files[0] == files[1]
