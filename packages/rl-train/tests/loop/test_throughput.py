"""The FLOPs of a step by its calls, and the shares of the devices' peak."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt import Checkpoint
from rl_models import Actor, Batch, Critic
from rl_models.api import ModelCalls
from rl_train.loop import throughput as throughput_file
from rl_train.loop.recipe_run import ModelMaker
from rl_train.loop.throughput import Throughput
from rl_train.options.options import TrainOptions
from rl_train.planner.flops import ModelFlops

BATCH = Batch.from_sequences([[1, 2, 3, 4, 5], [6, 7, 8]])
PEAK = 1e9


class Calls(ModelCalls):
    """Calls that do nothing."""

    grid: Any = None

    def __init__(self, kind: Any) -> None:
        self.worker_class, self.methods = kind, list[str]()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.methods.append(method)


@pytest.fixture
def options(model: Path, prompts: Path) -> Any:
    def make(**options: Any) -> TrainOptions:
        return TrainOptions(model=model, prompts=prompts, reward="r:f", device="cpu", **options)

    return make


def with_peak(options: TrainOptions) -> Throughput:
    throughput = Throughput(options)
    throughput.peak = PEAK
    return throughput


def test_the_calls_of_all_models_count(options: Any, model: Path) -> None:
    run = options(dims="dp=2", **{"rollouts.devices": "4,5"})
    throughput = with_peak(run)
    make = ModelMaker(run, lambda kind, path, arguments: Calls(kind), throughput)
    actor = make(Actor, model, run.grid, 0.1)
    critic = make(Critic, model, run.grid, 0.1)
    throughput.begin()
    actor.predict(BATCH, temperature=1.0)
    critic.values(BATCH)
    actor.update(BATCH, None)
    actor.wait_for_save()
    assert actor._model.methods == ["predict", "update", "wait_for_save"], "each call arrives"
    policy, value = (ModelFlops.of(Checkpoint(model), role) for role in ("causal_lm", "value"))
    lengths = [5, 3]
    values = throughput.describe({"tokens": 8, "seconds": 4.0}, {"seconds_learning": 0.5}, [7, 5, 3])
    step = policy.forward(lengths) + value.forward(lengths) + policy.update(lengths) + policy.forward([7, 5, 3])
    assert values["mfu"] == pytest.approx(step / (4.0 * 4 * PEAK))
    assert values["mfu_learning"] == pytest.approx(policy.update(lengths) / (0.5 * 2 * PEAK))
    assert values["tokens_per_second_per_device"] == 8 / 4 / 4
    throughput.begin()
    assert throughput.describe({"tokens": 8, "seconds": 4.0}, {}, []) == {"tokens_per_second_per_device": 0.5, "mfu": 0}


def test_the_cpu_has_no_peak_and_no_counts(options: Any, model: Path) -> None:
    events = list[Any]()
    throughput = Throughput(options(), events.append)
    calls = Calls(Actor)
    assert throughput.peak is None
    assert events == []
    assert throughput.counted(calls, Checkpoint(model), "causal_lm", None) is calls
    rates = throughput.describe({"tokens": 8, "seconds": 4.0}, {"seconds_learning": 1.0}, [8])
    assert rates == {"tokens_per_second_per_device": 2}


def test_a_family_that_is_not_described_has_no_mfu(options: Any, tmp_path: Path) -> None:
    throughput, events = with_peak(options()), list[Any]()
    throughput._tell = events.append
    (tmp_path / "config.json").write_text('{"model_type": "falcon", "architectures": ["FalconForCausalLM"]}')
    calls = Calls(Actor)
    assert throughput.counted(calls, Checkpoint(tmp_path), "causal_lm", None) is calls
    assert throughput.describe({"tokens": 8, "seconds": 4.0}, {}, []) == {"tokens_per_second_per_device": 2}
    assert throughput.counted(calls, Checkpoint(tmp_path), "causal_lm", None) is calls
    assert events == [{"message": f"no MFU: the FLOPs of {tmp_path} are not known"}]


def test_the_name_of_the_device_and_the_dtype_choose_the_peak(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(current=torch.device("cuda", 1))
    monkeypatch.setattr(throughput_file.Devices, "find", lambda name: device)
    named = SimpleNamespace(get_device_name=lambda device: f"NVIDIA H{device.index}00")
    monkeypatch.setattr(throughput_file.torch, "get_device_module", lambda device: named)
    events = list[Any]()
    assert Throughput(options(dtype="bfloat16"), events.append).peak == 989e12
    assert events == []
    assert Throughput(options(dtype="float32")).peak == Throughput(options()).peak == 67e12, "as stored"
    named.get_device_name = lambda device: "NVIDIA A10"
    assert Throughput(options(dtype="bfloat16"), events.append).peak is None
    assert events == [{"message": "no MFU: the peak of NVIDIA A10 in bfloat16 is not known"}]


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({}, 1),
        ({"dims": "dp=2,tp=2"}, 4),
        ({"dims": "dp=2", "rollouts.devices": "4,5,6"}, 5),
        ({"dims": "dp=2", "rollouts.devices": "3", "ray": True}, 5),
    ],
)
def test_the_devices_of_a_run_are_the_policy_s_and_the_engines(options: Any, given: Any, devices: int) -> None:
    assert options(**given).num_devices == devices
