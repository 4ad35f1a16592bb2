"""Adapters on every grid of the native backend: PEFT's log-probs, values and gradients on transformers' own models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.adapted_models import (
    ALPHA,
    RANK,
    batch_of,
    check,
    curve,
    peft,
    resumed,
    save_adapted,
    written,
)
from typer.testing import CliRunner

from ckpt.cli import app
from ckpt.layout import NOTES, PLAIN, READ, require_plain_lora
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from rl_models import Actor

GRIDS = {
    "llama": [ParallelDims(), ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(pp=2), ParallelDims(cp=2)],
    "qwen2": [ParallelDims(tp=4), ParallelDims(dp=2, tp=2), ParallelDims(pp=2, tp=2)],
    "experts": [
        ParallelDims(tp=2),
        ParallelDims(dp=2, ep=2),
        ParallelDims(tp=2, ep=2),
        ParallelDims(dp=2, tp=2, ep=2),
        ParallelDims(dp=4, ep=4),
    ],
    "gemma4": [ParallelDims(tp=2), ParallelDims(dp=2, ep=2), ParallelDims(pp=2)],
    "gemma4-e2b": [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(pp=2, tp=2), ParallelDims(pp=4)],
    "shared": [
        ParallelDims(tp=2),
        ParallelDims(dp=2, ep=2),
        ParallelDims(tp=2, ep=2),
        ParallelDims(dp=2, tp=2, ep=2),
        ParallelDims(dp=2, tp=2, ep=4),
    ],
    "latent": [ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(pp=2, cp=2)],
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models."""
    return save_adapted(tmp_path_factory.mktemp("lora"), list(GRIDS))


CASES = [pytest.param(name, dims, id=f"{name} {dims}") for name, grids in GRIDS.items() for dims in grids]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dims"), CASES)
def test_every_grid_gives_what_peft_gives(
    ranks: RankPool, folders: Path, name: str, dims: ParallelDims, tmp_path: Path
) -> None:
    check(ranks, folders, name, dims, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(dp=2), ParallelDims(cp=2), ParallelDims(dp=2, cp=2)])
def test_the_patched_model_gives_what_peft_gives(
    ranks: RankPool, folders: Path, dims: ParallelDims, tmp_path: Path
) -> None:
    check(ranks, folders, "llama", dims, tmp_path, "transformers")
    native = Actor.from_pretrained(folders / "llama" / "base", lora=LoraOptions(RANK, ALPHA, seed=5))
    patched = Actor.from_pretrained(
        folders / "llama" / "base", backend="transformers", lora=LoraOptions(RANK, ALPHA, seed=5)
    )
    for name, model in (("native", native), ("patched", patched)):
        model.save_adapter(tmp_path / name)
    stored = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("native", "patched")]
    assert stored[0] == stored[1]


def test_the_patched_model_refuses_what_it_lacks(folders: Path) -> None:
    for name, target in (("qwen2", "lm_head"), ("experts", "experts.down_proj")):
        with pytest.raises(ValueError, match=f"offers adapters of the layers' linears, and not of .*{target}"):
            Actor.from_pretrained(folders / name / "base", backend="transformers", lora=LoraOptions(targets=[target]))


@pytest.mark.parametrize("name", ["llama", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_grid_gives_what_peft_gives(ranks: RankPool, folders: Path, name: str, tmp_path: Path) -> None:
    check(ranks, folders, name, ParallelDims(tp=2), tmp_path)


def test_experts_that_share_a_factor_must_agree(folders: Path, tmp_path: Path) -> None:
    file = "adapter_model.safetensors"
    for each in (folders / "shared" / "adapter").iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    save_file(load_file(folders / "experts" / "adapter" / file), tmp_path / file, metadata={"format": "pt"})
    config = json.loads((folders / "experts" / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"shared_experts": True}))
    with pytest.raises(ValueError, match="differs between experts, and shared_experts says that they share it"):
        Actor.from_pretrained(folders / "shared" / "base", lora=tmp_path)
    with pytest.raises(ValueError, match="shared_experts=True, and targets='all-linear' has no experts; add"):
        Actor.from_pretrained(folders / "shared" / "base", lora=LoraOptions(shared_experts=True))


def test_files_are_those_of_peft_and_alike_from_every_grid(ranks: RankPool, folders: Path, tmp_path: Path) -> None:
    folder = folders / "experts"
    written(None, folder, ParallelDims(), tmp_path / "one")
    ranks.run(written, folder, ParallelDims(dp=2, tp=2, ep=2), tmp_path / "four", world=4)
    ranks.run(resumed, folder, ParallelDims(pp=2), tmp_path / "four", world=2)
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "merged/model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "four" / file).read_bytes()
    facts = CliRunner().invoke(app, ["inspect", str(tmp_path / "four" / "training"), "--json"]).stdout
    assert json.loads(facts)["tensors"] == len(load_file(tmp_path / "one/learned/adapter_model.safetensors"))
    learned, again = (
        load_file(tmp_path / place / "adapter_model.safetensors") for place in ("one/learned", "four/resumed")
    )
    for name, tensor in learned.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5)
    # What was written loads into PEFT, whose merged weights are those that were written.
    kind, ids = transformers.Qwen3MoeForCausalLM, torch.arange(12)[None]
    base = kind.from_pretrained(folder / "base")
    model = peft().PeftModel.from_pretrained(base, tmp_path / "four" / "adapter")
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    loaded = peft().get_peft_model_state_dict(model)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    merged = kind.from_pretrained(tmp_path / "four" / "merged")
    for ours, theirs in zip(merged.parameters(), model.merge_and_unload().parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(merged(ids).logits).all()


def test_every_field_of_peft_is_known(folders: Path, tmp_path: Path) -> None:
    known = {*READ, *PLAIN, *NOTES}
    fields = {field.name for field in dataclasses.fields(peft().LoraConfig)}
    assert fields <= known, "say in ckpt.layout.adapter_config which values of these fields are plain LoRA"
    peft().LoraConfig(task_type="CAUSAL_LM").save_pretrained(tmp_path)
    require_plain_lora(json.loads((tmp_path / "adapter_config.json").read_text()), "PEFT's defaults")


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_refused(folders: Path, how: str, tmp_path: Path) -> None:
    base = transformers.LlamaForCausalLM.from_pretrained(folders / "llama" / "base")
    options = peft().LoraConfig(r=RANK, target_modules=["q_proj"], init_lora_weights=how, task_type="CAUSAL_LM")
    model = peft().get_peft_model(base, options)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"init_lora_weights='{how}' is not read; .* changes the base"):
        Actor.from_pretrained(folders / "llama" / "base", lora=tmp_path / "adapter")
    # As the error says: PEFT writes what such an adapter changes in the plain base.
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "before")
    model.peft_config["default"].init_lora_weights = how
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    batch, ids = batch_of(), batch_of().split()[0]
    expected = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "before"))
    log_probs = Actor.from_pretrained(folders / "llama" / "base", lora=tmp_path / "plain").log_probs(batch).log_probs
    torch.testing.assert_close(log_probs[1 : len(ids)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_twenty_steps_are_the_same_on_two_grids(ranks: RankPool, folders: Path) -> None:
    one = curve(None, folders / "llama", ParallelDims())
    (four, *_) = ranks.run(curve, folders / "llama", ParallelDims(pp=2, tp=2), world=4)
    assert one[-1] < 0.5 * one[0]
    torch.testing.assert_close(four, one, rtol=1e-3, atol=1e-3)
