"""The configs: every field arrives, what is wrong is named, the rates are the formulas'."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_utils.optimizer import OptimizerConfig

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
    made = OptimizerConfig(**needs | {name: value}).to_megatron()
    plain = OptimizerConfig(**needs).to_megatron()
    assert {key: getattr(made, key) for key in expected} == expected
    # and nothing else moves
    changed = {f.name for f in dataclasses.fields(made) if getattr(made, f.name) != getattr(plain, f.name)}
    assert changed <= expected.keys()


def test_no_field_is_left_out() -> None:
    # Where parameter groups are made: tests/optimizer/test_build.py.
    assert ARRIVES.keys() | {"no_weight_decay"} == {field.name for field in dataclasses.fields(OptimizerConfig)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, r"lr=-1\.0 is out of range"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"lr": "1e-5"}, "lr='1e-5' must be of type float"),
        ({"lr": True}, "lr=True must be of type float"),
        ({"betas": 0.9}, r"betas=0\.9 must be of type tuple\[float, float\]"),
        ({"betas": [0.9]}, r"betas=\[0\.9\] must be of type tuple\[float, float\]"),
        (
            {"no_weight_decay": "*.bias"},
            r"no_weight_decay='\*\.bias' must be of type tuple\[str, \.\.\.\]",
        ),
        ({"distributed": 1}, "distributed=1 must be of type bool"),
        ({"precision": None}, "precision=None must be of type"),
        *(
            (
                {"loss_scale": 8.0, "precision": precision},
                rf"loss_scale=8\.0 is for precision='fp16' alone, not '{precision}'; leave it out",
            )
            for precision in ("fp32", "bf16")
        ),
        ({"loss_scale": 0.0}, r"loss_scale=0\.0 is out of range"),
        ({"min_loss_scale": 2.0**17}, r"min_loss_scale=131072\.0 is out of range"),
        ({"loss_scale_window": 0}, "loss_scale_window=0 is out of range"),
        ({"hysteresis": 0}, "hysteresis=0 is out of range"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**values)


def test_what_a_file_says_fits() -> None:
    config = OptimizerConfig(**{"lr": 1, "betas": [0.8, 0], "no_weight_decay": ["*.bias"], "clip_grad": None})
    assert config.to_megatron().adam_beta1 == 0.8
