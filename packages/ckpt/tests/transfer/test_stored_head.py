"""The head in the files of a tied model is treated as transformers treats it, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from ckpt import Grid, Place, layout_for, load_hf, merge, reshard, verify
from ckpt.cli import app

Checkpoints = Callable[..., Path]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def another_head(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


@pytest.fixture
def untied(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A tied model's config, and files with another head beside the embedding, which transformers does not tie then."""
    folder = edited(checkpoint("llama-tied"), tmp_path / "untied", another_head)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    return folder


@pytest.mark.parametrize(
    "read",
    [
        lambda folder, tied, out: load_hf(folder, layout_for(folder)),
        lambda folder, tied, out: load_hf(folder, layout_for(folder), Place(pp=(0, 2))),
        lambda folder, tied, out: verify(tied, folder),
        lambda folder, tied, out: reshard(folder, out, Grid()),
        lambda folder, tied, out: merge(folder, out),
    ],
    ids=["load", "load a stage", "verify", "reshard", "merge"],
)
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    read: Callable[[Path, Path, Path], object], untied: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"lm_head.weight .* differs from model.embed_tokens.weight .*set tie_word_"):
        read(untied, checkpoint("llama-tied"), tmp_path / "out")
    # The mending that the error names.
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    stored = load_file(untied / "model.safetensors")
    assert torch.equal(load_hf(untied, layout_for(untied))[HEAD], stored[HEAD])


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_commands_refuse_it_too(command: str, untied: Path) -> None:
    result = CliRunner().invoke(app, [command, str(untied)])
    assert result.exit_code == 2
    assert "set tie_word_embeddings to false" in result.stderr


@pytest.mark.parametrize("change", [Tensor.double, lambda tensor: tensor[:-1].clone()], ids=["type", "shape"])
def test_a_head_of_another_type_or_shape_is_refused(
    change: Callable[[Tensor], Tensor], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama-tied")
    folder = edited(source, tmp_path / "other", lambda tensors: tensors.update({HEAD: change(tensors[EMBEDDING])}))
    with pytest.raises(ValueError, match=r"differs from model.embed_tokens.weight"):
        load_hf(folder, layout_for(folder))


def test_the_same_head_is_passed_over_and_a_value_model_has_no_use_for_any(
    checkpoint: Checkpoints, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.files.tensor_bytes._CHUNK_BYTES", 100)
    tied = checkpoint("llama-tied")
    both = edited(tied, tmp_path / "both", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert verify(tied, both).equal
    assert HEAD not in load_hf(both, layout_for(both))
    assert HEAD not in load_hf(untied, layout_for(untied, role="value"))


def test_a_tied_embedding_is_found_as_the_head(checkpoint: Checkpoints, tmp_path: Path) -> None:
    tied = checkpoint("llama-tied")
    folder = edited(tied, tmp_path / "head", lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    expected = load_file(tied / "model.safetensors")[EMBEDDING]
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight, expected)
    assert verify(tied, folder).equal
    for place in (Place(), Place(pp=(1, 2))):
        tensors = load_hf(folder, layout_for(folder), place)
        assert torch.equal(tensors[HEAD if place.pp[0] else EMBEDDING], expected)
