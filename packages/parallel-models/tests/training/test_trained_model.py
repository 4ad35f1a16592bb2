"""An engine with its optimizer resumes, streams and offloads without rl-models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parallel_layers import PackedSequence, ParallelDims
from parallel_models import EngineOptions, Grid, MicroBatch, OptimizerOptions, Outputs, load_engine
from parallel_models.training import TrainedModel

PACKED = PackedSequence.from_sequences([torch.tensor([1, 5, 7, 9, 11]), torch.tensor([3, 4, 2])])


def load(path: Path) -> TrainedModel:
    engine = load_engine(str(path), "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())
    return TrainedModel(engine, OptimizerOptions(learning_rate=1e-2))


def learn(model: TrainedModel) -> float:
    def loss(micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        return -outputs[0].sum() / 6

    model.engine.forward_backward([MicroBatch(PACKED)], loss)
    norm = model.optimizer.step(model.learning_rate)
    model.steps += 1
    return norm


def test_a_resumed_model_goes_on_with_the_same_bits(llama: Path, tmp_path: Path) -> None:
    model, resumed = load(llama), load(llama)
    learn(model)
    model.save_training(tmp_path, extra={"seen": 8})
    assert resumed.load_training(tmp_path) == (1, {"seen": 8})
    assert model.offload() > 0
    with pytest.raises(RuntimeError, match=r"save_pretrained needs the weights on the device; call onload\(\) first"):
        model.save_pretrained(tmp_path / "out")
    model.onload()
    assert learn(resumed) == learn(model)
    model.save_pretrained(tmp_path / "out")
    saved, streamed = load_file(tmp_path / "out" / "model.safetensors"), dict(resumed.stream_weights())
    assert saved.keys() == streamed.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in streamed.items())
    with pytest.raises(ValueError, match="the model has no adapters"):
        model.save_adapter(tmp_path / "adapter")
