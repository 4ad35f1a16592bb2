"""A model with linear attention trains, is saved and goes on elsewhere; what it lacks is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ModelConfig, PackedSequence, ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_models import EngineOptions, Grid, MicroBatch, OptimizerOptions, Outputs, load_engine
from parallel_models.training import TrainedModel, require_fit

TEXTS = [torch.tensor([1, 5, 7, 9, 11]), torch.tensor([3, 4, 2])]
# Tensors of the first layer that stay fp32, by the families in `conftest.py`.
_DELTA = ("A_log", "dt_bias", *(f"{name}_conv1d.weight" for name in "qkv"))
_SPACE = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias")
WIDE = {
    "qwen3_next": {f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias", "conv1d.weight")},
    "kimi_linear": {f"model.layers.0.self_attn.{name}" for name in _DELTA},
    "granitemoehybrid": {f"model.layers.0.mamba.{name}" for name in _SPACE},
    "nemotron_h": {f"backbone.layers.0.mixer.{name}" for name in _SPACE},
}


def load(path: Path, dims: ParallelDims, eps: float = 1e-3, **options: Any) -> TrainedModel:
    """The default `eps` keeps steps of gradients small that are rounding alone."""
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    grid = Grid.build(dims, device="cpu", mesh=mesh)
    engine = load_engine(str(path), "causal_lm", grid, EngineOptions(**options))
    return TrainedModel(engine, OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, eps=eps))


def learn(model: TrainedModel) -> None:
    dims, first = model.grid.dims, model.grid.rank("dp")
    texts = [TEXTS[first : first + 1]] if dims.dp > 1 else [[text] for text in TEXTS] if dims.pp > 1 else [TEXTS]
    packs = [PackedSequence.from_sequences(t, multiple_of=model.engine.tokens_multiple_of) for t in texts]

    def loss(micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        return -outputs[0].sum() / 6

    model.engine.forward_backward([MicroBatch(pack) for pack in packs], loss)
    model.optimizer.step(model.learning_rate)
    model.steps += 1


def begin(group: ProcessGroup, path: Path, out: Path) -> None:
    """One step on tp 2, saved; and one step in bf16 on dp 2."""
    model = load(path, ParallelDims(tp=2))
    learn(model)
    model.save_training(out / "training")
    narrow = load(path, ParallelDims(dp=2), eps=1e-8, dtype=torch.bfloat16)
    learn(narrow)
    narrow.save_pretrained(out / "bf16")
    adapted = load(path, ParallelDims(tp=2), lora=LoraOptions(2, 4.0))
    learn(adapted)
    adapted.save_pretrained(out / "adapted")


def go_on(group: ProcessGroup, out: Path) -> None:
    """The second step on a pipeline."""
    model = load(out, ParallelDims(pp=2))
    model.load_training(out / "training")
    learn(model)
    model.save_pretrained(out / "resumed")


# Granite's and Nemotron-H's states are of one kind.
@pytest.mark.parametrize(
    "hybrid",
    [
        *("qwen3_next", "nemotron_h"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoehybrid", "kimi_linear")),
    ],
    indirect=True,
)
def test_it_learns_and_resumes_on_grids_as_on_one_rank(ranks: RankPool, hybrid: Path, tmp_path: Path) -> None:
    model, adapted = (
        load(hybrid, ParallelDims(), recompute="full"),
        load(hybrid, ParallelDims(), lora=LoraOptions(2, 4.0)),
    )
    learn(adapted)
    adapted.save_pretrained(tmp_path / "one" / "adapted")
    for _ in range(2):
        learn(model)
    model.save_pretrained(tmp_path / "one" / "resumed")
    for file in hybrid.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ranks.run(begin, hybrid, tmp_path, world=2)
    ranks.run(go_on, tmp_path, world=2)
    for name in ("resumed", "adapted"):
        expected, learned = (load_file(folder / name / "model.safetensors") for folder in (tmp_path / "one", tmp_path))
        assert learned.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(
                learned[key], tensor, rtol=1e-4, atol=2e-5, msg=lambda text, at=key: f"{at}: {text}"
            )
    before, after = load_file(hybrid / "model.safetensors"), load_file(tmp_path / "bf16" / "model.safetensors")
    assert {key for key, tensor in after.items() if tensor.dtype == torch.float32} == WIDE[hybrid.name]
    for key in WIDE[hybrid.name]:
        # The first step of AdamW without decay is at most the learning rate, kept to fp32's last bits.
        moved = (after[key] - before[key]).abs()
        assert 0.0099 < moved.median() <= moved.max() < 0.01001


def config_of(hybrid: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((hybrid / "config.json").read_text()))


@pytest.mark.parametrize(
    ("options", "named", "lack"),
    [
        ({"base_format": "fp8", "lora": LoraOptions()}, "base_format='fp8'", "its projections are not held in FP8"),
        ({"share_prefixes": True}, "share_prefixes=True", "the state behind a prompt does not reach its responses"),
        ({"tp_invariant": True}, "tp_invariant=True", "its sums follow the grid"),
    ],
)
def test_what_it_lacks_is_refused(options: dict[str, Any], named: str, lack: str, hybrid: Path) -> None:
    words = f"{named} is not offered with the linear attention of {hybrid.name}: {lack}; leave it"
    with pytest.raises(ValueError, match=words):
        require_fit(config_of(hybrid), ParallelDims(), EngineOptions(**options))
