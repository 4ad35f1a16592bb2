"""Checkpoints of Megatron-Core that do not fit are refused by name; what is read is in test_to_megatron.py."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt import Grid, merge, to_megatron
from ckpt.files.torch_dist import ChunkWriter, read_index
from ckpt.layout.pieces import Box
from ckpt.transfer.sources import open_source

Checkpoints = Callable[..., Path]


@pytest.fixture
def run(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    to_megatron(checkpoint("llama"), tmp_path / "run", Grid(tp=2))
    return tmp_path / "run"


def rewrite(run: Path, change: Callable[[dict[str, list[tuple[Box, torch.Tensor]]]], None]) -> None:
    """Write the chunks anew after a change."""
    folder = run / "release"
    chunks: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    shapes = {}
    for name, tensor in read_index(folder).items():
        shapes[name] = tensor.shape
        for chunk in tensor.chunks:
            with open(chunk.path, "rb") as file:
                file.seek(chunk.offset)
                values = torch.load(io.BytesIO(file.read(chunk.length)), weights_only=True)
            chunks.setdefault(name, []).append((chunk.box, values))
    change(chunks)
    writer = ChunkWriter(folder)
    writer.write_file(
        0,
        [
            (name, shapes.get(name, tuple(values.shape)), box, values)
            for name, held in chunks.items()
            for box, values in held
        ],
    )
    writer.write_index()


def test_optimizer_and_random_states_are_left_out(run: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    def add(chunks: dict[str, list[tuple[Box, torch.Tensor]]]) -> None:
        for name in ("optimizer.state.exp_avg.output_layer.weight", "chained_0.optimizer.state.x", "random.cpu"):
            chunks[name] = [(((0, 2),), torch.ones(2))]

    rewrite(run, add)
    merge(run, tmp_path / "back")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda chunks: chunks.pop("decoder.final_layernorm.weight"), "final_layernorm.weight is missing; give"),
        (lambda chunks: chunks.pop("embedding.word_embeddings.weight"), "holds no embedding.word_embeddings.weight"),
        (
            lambda chunks: chunks.update({"vision.weight": [(((0, 2),), torch.ones(2))]}),
            "holds 1 tensors that its config.json does not describe: vision.weight",
        ),
        (
            lambda chunks: chunks["decoder.layers.0.mlp.linear_fc2.weight"].pop(),
            "does not hold all of decoder.layers.0.mlp.linear_fc2.weight",
        ),
    ],
)
def test_another_model_and_a_missing_part_are_named(
    change: Callable[[dict[str, list[tuple[Box, torch.Tensor]]]], None], message: str, run: Path
) -> None:
    rewrite(run, change)
    with pytest.raises(ValueError, match=message):
        open_source(run)


def test_a_wrong_config_is_named(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(
        ValueError, match=r"4 tensors of config.json do not fit: decoder.layers.0.mlp.linear_fc1.weight has shape"
    ):
        open_source(run)


def test_layers_of_multi_token_prediction_are_left_out_with_a_warning(run: Path) -> None:
    rewrite(run, lambda chunks: chunks.update({"mtp.layers.0.enorm.weight": [(((0, 2),), torch.ones(2))]}))
    with pytest.warns(UserWarning, match="the 1 tensors of multi-token prediction"):
        open_source(run)


def test_the_format_and_the_step_are_checked(run: Path) -> None:
    (run / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    with pytest.raises(ValueError, match=r"has the format 'fsdp_dtensor'; save it with Megatron-LM's --ckpt-format"):
        open_source(run)
    shutil.rmtree(run / "release")
    with pytest.raises(ValueError, match=r"names 'release', and .*release does not exist; copy the step"):
        open_source(run)
    (run / "latest_checkpointed_iteration.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration.txt names '\\\\xff', and .* does not exist"):
        open_source(run)
