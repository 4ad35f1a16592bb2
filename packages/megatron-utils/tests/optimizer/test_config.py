"""The configs: every field arrives, what is wrong is named, the rates are the formulas'."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_utils.optimizer import OptimizerConfig, ScheduleConfig

ARRIVES = {
    "lr": (3e-4, {"lr": 3e-4}),
    "betas": ((0.8, 0.88), {"adam_beta1": 0.8, "adam_beta2": 0.88}),
    "eps": (1e-5, {"adam_eps": 1e-5}),
    "weight_decay": (0.3, {"weight_decay": 0.3}),
    "clip_grad": (None, {"clip_grad": 0.0}),
    "precision": ("bf16", {"bf16": True, "fp16": False, "params_dtype": torch.bfloat16}),
    "distributed": (True, {"use_distributed_optimizer": True}),
    "cpu_offload_fraction": (0.5, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}),
    "loss_scale": (8.0, {"loss_scale": 8.0}),
    "initial_loss_scale": (4.0, {"initial_loss_scale": 4.0}),
    "min_loss_scale": (2.0, {"min_loss_scale": 2.0}),
    "loss_scale_window": (7, {"loss_scale_window": 7}),
    "hysteresis": (3, {"hysteresis": 3}),
}


@pytest.mark.parametrize("name", ARRIVES)
def test_every_field_arrives(name: str) -> None:
    value, expected = ARRIVES[name]
    # Which alone may have a loss scale.
    needs = {"precision": "fp16"} if name == "loss_scale" else {}
    made = OptimizerConfig.from_mapping(needs | {name: value}).to_megatron()
    plain = OptimizerConfig.from_mapping(needs).to_megatron()
    assert {key: getattr(made, key) for key in expected} == expected
    # and nothing else moves
    changed = {f.name for f in dataclasses.fields(made) if getattr(made, f.name) != getattr(plain, f.name)}
    assert changed <= expected.keys()


def test_no_field_is_left_out() -> None:
    # Where parameter groups are made: tests/optimizer/test_build.py.
    assert ARRIVES.keys() | {"no_weight_decay"} == {field.name for field in dataclasses.fields(OptimizerConfig)}


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (
            OptimizerConfig,
            {"weight_deacy": 0.1},
            "OptimizerConfig has no field 'weight_deacy'; did you mean 'weight_decay'",
        ),
        (ScheduleConfig, {"quux": 1}, "ScheduleConfig has no field 'quux'; known: kind, "),
        (OptimizerConfig, {"lr": -1.0}, r"lr=-1\.0 is out of range"),
        (OptimizerConfig, {"betas": (0.9, 1.0)}, "betas="),
        (OptimizerConfig, {"precision": "fp8"}, "precision='fp8'"),
        (OptimizerConfig, {"lr": "1e-5"}, "lr='1e-5' must be of type float"),
        (OptimizerConfig, {"lr": True}, "lr=True must be of type float"),
        (OptimizerConfig, {"betas": 0.9}, r"betas=0\.9 must be of type tuple\[float, float\]"),
        (OptimizerConfig, {"betas": [0.9]}, r"betas=\[0\.9\] must be of type tuple\[float, float\]"),
        (
            OptimizerConfig,
            {"no_weight_decay": "*.bias"},
            r"no_weight_decay='\*\.bias' must be of type tuple\[str, \.\.\.\]",
        ),
        (OptimizerConfig, {"distributed": 1}, "distributed=1 must be of type bool"),
        (OptimizerConfig, {"precision": None}, "precision=None must be of type"),
        (ScheduleConfig, {"warmup_steps": 1.5}, r"warmup_steps=1\.5 must be of type int"),
        (ScheduleConfig, {"total_steps": "9"}, r"total_steps='9' must be of type int \| None"),
        *(
            (
                OptimizerConfig,
                {"loss_scale": 8.0, "precision": precision},
                rf"loss_scale=8\.0 is for precision='fp16' alone, not '{precision}'; leave it out",
            )
            for precision in ("fp32", "bf16")
        ),
        (OptimizerConfig, {"loss_scale": 0.0}, r"loss_scale=0\.0 is out of range"),
        (OptimizerConfig, {"min_loss_scale": 2.0**17}, r"min_loss_scale=131072\.0 is out of range"),
        (OptimizerConfig, {"loss_scale_window": 0}, "loss_scale_window=0 is out of range"),
        (OptimizerConfig, {"hysteresis": 0}, "hysteresis=0 is out of range"),
        (
            ScheduleConfig,
            {"kind": "step"},
            "kind='step' is unknown; known: constant, linear, cosine, inverse_sqrt, wsd",
        ),
        (ScheduleConfig, {"kind": "linear"}, "kind='linear' needs total_steps"),
        (ScheduleConfig, {"kind": "linear", "total_steps": 0}, "total_steps=0 must be at least 1"),
        (ScheduleConfig, {"kind": "cosine", "total_steps": 5, "warmup_steps": 5}, "warmup_steps=5"),
        (ScheduleConfig, {"kind": "wsd", "total_steps": 5}, "decay_steps=None with kind='wsd'"),
        (ScheduleConfig, {"kind": "linear", "total_steps": 5, "decay_steps": 2}, "decay_steps=2 with kind='linear'"),
        (
            ScheduleConfig,
            {"kind": "wsd", "total_steps": 5, "warmup_steps": 2, "decay_steps": 4},
            "decay_steps=4 must fit",
        ),
        (ScheduleConfig, {"kind": "wsd", "total_steps": 5, "decay_steps": 2, "decay": "cubic"}, "decay='cubic'"),
    ],
)
def test_mistakes_are_named(config: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.from_mapping(values)


def test_what_a_file_says_fits() -> None:
    config = OptimizerConfig.from_mapping(
        {"lr": 1, "betas": [0.8, 0], "no_weight_decay": ["*.bias"], "clip_grad": None}
    )
    assert config.to_megatron().adam_beta1 == 0.8
    assert ScheduleConfig.from_mapping({"kind": "linear", "total_steps": 3}).total_steps == 3


@pytest.mark.parametrize("values", [{"min_lr": 2e-3}, {"init_lr": 2e-3}, {"min_lr": -1.0}])
def test_rates_lie_between_zero_and_the_peak(values: dict[str, float]) -> None:
    ((name, rate),) = values.items()
    with pytest.raises(ValueError, match=rf"{name}={rate} is not between 0 and the peak rate lr=0\.001"):
        ScheduleConfig(**values).to_megatron(None, OptimizerConfig(lr=1e-3))


PEAK, FLOOR, WARMUP, TOTAL, DECAY = 1.0, 0.1, 4, 20, 8
FORMS = {
    "linear": lambda y: 1 - y,
    "cosine": lambda y: (1 + math.cos(math.pi * y)) / 2,
    "exponential": lambda y: 2 * 0.5**y - 1,
    "minus_sqrt": lambda y: 1 - math.sqrt(y),
}
SCHEDULES = [
    ScheduleConfig("constant", WARMUP),
    ScheduleConfig("linear", WARMUP, TOTAL, min_lr=FLOOR),
    ScheduleConfig("cosine", WARMUP, TOTAL, init_lr=0.05, min_lr=FLOOR),
    ScheduleConfig("inverse_sqrt", WARMUP, TOTAL, min_lr=FLOOR),
    *(ScheduleConfig("wsd", WARMUP, TOTAL, min_lr=FLOOR, decay_steps=DECAY, decay=form) for form in FORMS),
]


def formula(schedule: ScheduleConfig, n: int) -> float:
    """The rate after n steps, by the class's docstring."""
    w, floor = schedule.warmup_steps, schedule.min_lr
    if n <= w:
        return schedule.init_lr + (PEAK - schedule.init_lr) * n / w
    if schedule.kind == "constant":
        return PEAK
    if n > TOTAL:
        return floor
    if schedule.kind == "inverse_sqrt":
        return max(floor, PEAK * math.sqrt(w / n))
    if schedule.kind == "wsd":
        y = max(n - (TOTAL - DECAY), 0) / DECAY
        return floor + (PEAK - floor) * FORMS[schedule.decay](y)
    return floor + (PEAK - floor) * FORMS[schedule.kind]((n - w) / (TOTAL - w))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}-{s.decay}")
def test_the_rates_are_the_formulas_and_go_on_after_a_resume(schedule: ScheduleConfig) -> None:
    from megatron_utils.optimizer import Optimizer

    def fresh() -> Optimizer:
        """An optimizer with a schedule and nothing else: rates need no parameters."""
        optimizer = object.__new__(Optimizer)
        groups = [{"default_config": True, "max_lr": PEAK, "min_lr": schedule.min_lr, "lr": 0.0}]
        optimizer.inner = SimpleNamespace(param_groups=groups)
        optimizer.skipped = 0
        optimizer.scheduler = schedule.to_megatron(optimizer.inner, OptimizerConfig(lr=PEAK))
        assert isinstance(optimizer.scheduler, OptimizerParamScheduler)
        return optimizer

    first = fresh()
    rates = []
    for _ in range(TOTAL + 3):
        rates.append(first.lr)
        first.scheduler.step(1)
    assert rates == pytest.approx([formula(schedule, n) for n in range(TOTAL + 3)], rel=1e-12, abs=1e-15)
    for stop in (2, 9, 15):
        one, other = fresh(), fresh()
        one.scheduler.step(stop)
        one.skipped = 3
        other.scheduler.step(5)  # not at the beginning when the state arrives
        other.load_schedule_state(one.schedule_state())
        assert (other.steps, other.skipped) == (stop, 3)
        for n in range(stop, TOTAL):
            assert other.lr == rates[n]
            other.scheduler.step(1)
