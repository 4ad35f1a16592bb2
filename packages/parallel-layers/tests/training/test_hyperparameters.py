"""Schedules of the learning rate, and the rule of weight decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel_layers.training.hyperparameters import SCHEDULES, Schedule, has_weight_decay

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"kind": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"kind": "linear", "total_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        (
            {"kind": "linear", "warmup_steps": 2, "total_steps": 6, "min_ratio": 0.2},
            [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        ({"kind": "cosine", "total_steps": 4}, [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0]),
        (
            {"kind": "cosine", "warmup_steps": 1, "total_steps": 5, "min_ratio": 0.1},
            [1, 1, 0.1 + 0.9 * (1 + HALF) / 2, 0.55, 0.1 + 0.9 * (1 - HALF) / 2, 0.1, 0.1],
        ),
        (
            {"kind": "wsd", "warmup_steps": 2, "total_steps": 8, "decay_steps": 4, "min_ratio": 0.2},
            [0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        ({"kind": "inverse-sqrt", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, math.sqrt(4 / 5), math.sqrt(4 / 6)]),
        ({"kind": "inverse-sqrt"}, [1, HALF, math.sqrt(1 / 3)]),
        ({"kind": "inverse-sqrt", "min_ratio": 0.7}, [1, HALF, 0.7]),
    ],
)
def test_every_factor(options: dict[str, Any], factors: list[float]) -> None:
    schedule = Schedule(**options)
    assert [schedule.factor(step) for step in range(len(factors))] == pytest.approx(factors, abs=1e-12)


def test_all_kinds_are_named_in_the_table_above() -> None:
    assert set(SCHEDULES) == {"constant", "linear", "cosine", "wsd", "inverse-sqrt"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cosin"}, "schedule 'cosin' is unknown; known: constant, linear"),
        ({"kind": "cosine"}, "schedule 'cosine' needs total_steps"),
        ({"kind": "wsd", "total_steps": 5}, "schedule 'wsd' needs decay_steps"),
        ({"kind": "wsd", "total_steps": 5, "decay_steps": 4, "warmup_steps": 2}, "decay_steps=4 must"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_ratio": 1.5}, "min_ratio=1.5"),
        ({"min_ratio": "0"}, "min_ratio='0' must be a number"),
        ({"total_steps": "9"}, "total_steps='9' must be an integer, not str"),
        ({"kind": "linear", "total_steps": 3, "warmup_steps": 3}, "total_steps=3 must be more than warmup_steps=3"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**options)


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("model.embed_tokens.weight", (8, 4), True),
        ("mlp.experts.gate_up_proj", (2, 4, 8), True),
        ("mlp.experts.gate_up_proj_bias", (2, 8), False),
        ("self_attn.q_proj.bias", (4,), False),
        ("self_attn.sinks", (2,), False),
        ("linear_attn.decay.dt_bias", (2,), False),
        ("model.norm.weight", (4,), False),
        ("linear_attn.in_proj_qkvz.weight", (8, 4), True),
        ("linear_attn.decay.A_log", (4,), False),
        ("linear_attn.decay.A_log", (4, 1), False),
    ],
)
def test_matrices_alone_decay(name: str, shape: tuple[int, ...], decays: bool) -> None:
    assert has_weight_decay(name, torch.empty(shape, device="meta")) == decays
