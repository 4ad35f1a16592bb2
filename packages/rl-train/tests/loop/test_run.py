"""The models of a run on Ray stay until the loop has ended, and an engine apart gets the options of its run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from parallel_layers import ParallelDims
from rl_models.api import WholeBatches
from rl_train.cluster import group, placement
from rl_train.data.prompts import read_prompts
from rl_train.engines import NativeEngine
from rl_train.loop import run
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.folder import write_options
from rl_train.options.options import TrainOptions


class Stub:
    """A placement or a group whose only rank is this process; its model cannot be used after `close`."""

    accelerator = "CPU"

    def __init__(self, kind: Any, dims: Any, path: Any = None, **options: Any) -> None:
        self.model, self.devices = None, kind
        if path is not None:
            options = {name: value for name, value in options.items() if name not in ("wait", "collective_timeout")}
            options.pop("resources")
            self.model = WholeBatches(kind.from_pretrained(path, device="cpu", **options))

    def share(self, fraction: float) -> tuple[int, float]:
        """Return the number of devices and the share."""
        return self.devices, fraction

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.model = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class Vllm(NativeEngine):
    """An engine on Ray that takes the place of vLLM."""

    asked: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, actor: Any, folder: Path, make: Any, share: tuple[int, float], **options: Any) -> None:
        super().__init__(actor)
        assert ("adapter" in make.keywords) == ("adapter" in options["weight_format"].stream_options)
        held_format, sent_format = make.keywords["quantization"], options["weight_format"].stream_options.get("format")
        self.asked.append((*share, options["sleeps"], held_format, sent_format))


@pytest.mark.parametrize(
    ("rollouts", "asked"),
    [
        ({}, []),
        ({"rollouts": "vllm"}, [(1, 1 / 3, True, None, None)]),
        ({"rollouts": "vllm", "rollouts.devices": "3"}, [(3, 1.0, False, None, None)]),
        ({"rollouts": "vllm", "rollouts.quantization": "fp8"}, [(1, 1 / 3, True, "fp8", "fp8")]),
        ({"rollouts": "vllm", "rollouts.adapter": True, "lora_rank": 4}, [(1, 1 / 2, True, None, None)]),
    ],
)
def test_the_groups_of_a_run_on_ray_live_as_long_as_the_loop(
    blocks: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_process: Any,
    rollouts: dict[str, Any],
    asked: list[Any],
) -> None:
    """vLLM has a share of the models' devices, and sleeps while they learn, or it has devices of its own."""
    monkeypatch.setattr(run, "EngineOnRay", Vllm)
    monkeypatch.setattr(Vllm, "asked", [])
    monkeypatch.setattr(group, "RayModelGroup", Stub)
    monkeypatch.setattr(placement, "Placement", Stub)
    rewards = in_process(lambda prompt, response, row: len(set(response)))
    rewards.close = lambda: None
    monkeypatch.setattr(run, "Rewards", lambda options: rewards)
    options = TrainOptions(
        model=blocks, prompts=prompts, reward="r:f", out=tmp_path / "run", ray=True, steps=1,
        prompts_per_step=2, samples=2, max_new_tokens=3, kl_coefficient=0.1,
        **rollouts,
    )  # fmt: skip
    write_options(options)
    values = run._on_ray(CheckedRun(options, read_prompts(prompts, blocks, 99), [], (), None), lambda event: None)
    assert values["responses"] == 4
    assert (tmp_path / "run" / "actor" / "model.safetensors").is_file()
    assert Vllm.asked == asked


def test_an_engine_apart_gets_the_options_of_the_run(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SeparateEngine", lambda actor, model, **given: given)
    values: dict[str, Any] = {
        **{"engine.dtype": "bfloat16", "engine.tp_invariant": True, "collective_timeout": 90, "staleness": 1},
        **{"rollouts.devices": "cpu,cpu", "rollouts.dims": "tp=2", "rollouts.in_flight": True},
        **{"rollouts.stale_cache": "recompute", "rollouts.changed_weights": True, "rollouts.max_sequences": 7},
        **{"rollouts.cache_gib": 0.5, "rollouts.drafts": 2},
    }
    options = TrainOptions(model=model, prompts=prompts, reward="r:f", device="cpu", **values)
    checked_run: Any = SimpleNamespace(options=options, longest=77)
    assert run.rollouts_of(checked_run, None) == {  # type: ignore[arg-type, comparison-overlap]
        **{"devices": ["", ""], "dims": ParallelDims(tp=2), "dtype": torch.bfloat16, "tp_invariant": True},
        **{"in_flight": True, "stale_cache": "recompute", "changed_only": True, "timeout": 90, "max_length": 77},
        **{"max_sequences": 7, "cache_gib": 0.5, "drafts": 2, "float8": False, "float8_cache": False},
        "experts": options.rollouts.experts,
    }
