"""Warnings before a run collapses: series that collapse, series that are healthy, and the options that are named."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rl_train.options.names import SHORT_NAMES, flag
from rl_train.options.options import TrainOptions
from rl_train.report.lines import Metrics, read_lines
from rl_train.report.signs import SIGNS, Sign, Signs, warned

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "metrics.md"
# The metrics of a healthy run in bf16 with adapters: mean and relative noise of a step.
HEALTHY = {
    "entropy": (1.2, 0.1), "reward": (0.4, 0.1), "rollout_kl": (1e-3, 0.5), "rollout_difference_mean": (0.02, 0.2),
    "rollout_difference": (0.8, 0.5), "routing_difference": (0.02, 0.3), "importance_outside": (0.02, 0.3),
    "clip_fraction": (0.12, 0.3), "approx_kl": (0.01, 0.5), "kl": (0.3, 0.2), "response_length": (220.0, 0.1),
    "truncated": (0.05, 0.4), "frac_reward_zero_std": (0.4, 0.3), "grad_norm": (0.8, 0.4),
}  # fmt: skip
# (metric, its value at the end of a collapse over 6 steps) -> a word of the warning
COLLAPSES = {
    ("entropy", 0.01): "stopped exploring",
    ("entropy", 4.0): "becomes random",
    ("rollout_kl", 0.2): "--rollouts.routing",
    ("rollout_difference_mean", 0.3): "--importance-cap",
    ("rollout_difference", 9.0): "p_train / p_rollout",
    ("routing_difference", 0.3): "--rollouts.quantization",
    ("importance_outside", 0.4): "--staleness",
    ("clip_fraction", 0.6): "--learning-rate",
    ("approx_kl", 0.8): "--mini-batch",
    ("kl", 25.0): "--kl-coefficient",
    ("response_length", 900.0): "--rewards.overlong-buffer",
    ("response_length", 12.0): "short responses",
    ("truncated", 0.6): "--max-new-tokens",
    ("frac_reward_zero_std", 1.0): "--equal-groups",
    ("grad_norm", 40.0): "--optimizer.max-grad-norm",
}


def series(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)

    def draw(mean: float, noise: float) -> float:
        return mean * (1 + generator.uniform(-noise, noise))

    return [{"step": step, **{name: draw(*HEALTHY[name]) for name in HEALTHY}} for step in range(1, steps + 1)]


def collapsing(metric: str, end: float, steps: int = 40) -> list[dict[str, Any]]:
    """A healthy run whose metric goes elsewhere over 6 steps from step 21 on; the reward falls with the entropy."""
    records = series(steps)
    for number, record in enumerate(records[20:]):
        share = min(1.0, (number + 1) / 6)
        record[metric] = record[metric] ** (1 - share) * end**share
        if metric == "entropy":
            record["reward"] *= 1 - 0.9 * share
    return records


@pytest.mark.parametrize(("metric", "end"), COLLAPSES)
def test_a_collapse_is_warned_of_once_with_its_values_and_an_option(metric: str, end: float) -> None:
    warnings = warned(collapsing(metric, end))
    (warning,) = [warning for warning in warnings if warning["text"].startswith(metric + " ")]
    assert len(warnings) == 1
    assert 21 <= warning["step"] <= 28, "it comes before the run has ended"
    assert COLLAPSES[metric, end] in warning["text"]
    recent, usual = re.findall(r"(?:to|is) ([\d.e-]+) \(usually ([\d.e-]+)\)", warning["text"])[0]
    assert (float(recent) - float(usual)) * (end - HEALTHY[metric][0]) > 0
    assert "\n" not in warning["text"]


def test_each_sign_is_tried() -> None:
    assert len(COLLAPSES) == len(SIGNS)
    assert [metric for metric, _ in COLLAPSES] == [sign.metric for sign in SIGNS]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_has_no_warning(seed: int) -> None:
    assert warned(series(200, seed)) == []


def test_the_recorded_quickstart_has_no_warning_though_its_entropy_falls_to_0() -> None:
    records = read_lines(Path(__file__).with_name("quickstart_metrics.jsonl"))
    assert records[-1]["entropy"] < 0.03 < 3 < records[0]["entropy"]
    assert warned(records) == []
    for record in records[25:]:
        record["reward"] = 0.05
    assert ["entropy" in warning["text"] for warning in warned(records)] == [True], "the same fall without a reward"


def test_a_metric_that_recovers_is_warned_of_again() -> None:
    records = [{"step": step, "grad_norm": 1.0} for step in range(1, 61)]
    for record in [*records[20:50], *records[55:]]:
        record["grad_norm"] = 30.0
    assert [warning["step"] for warning in warned(records)] == [22, 57], "30 steps do not become the usual value"
    signs = Signs()
    for record in records[:53]:
        signs.add(record)
    assert signs.shown == {}
    signs.add({"grad_norm": 1e9})
    assert signs.shown == {}, "one step alone is no sign"


def test_an_evaluation_before_step_1_and_steps_without_a_metric_are_no_steps_of_it() -> None:
    signs = Signs()
    for step in range(100):
        assert signs.add({"eval/reward": 0.0} | ({"grad_norm": 1.0} if step % 10 == 0 else {})) == []
    assert signs.add({"grad_norm": 99.0}) == signs.add({}) == []
    assert len(signs.add({"grad_norm": 99.0})) == 1


def test_a_resumed_run_knows_its_earlier_steps(tmp_path: Path) -> None:
    records = collapsing("grad_norm", 40.0)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:30]))
    resumed = Metrics(tmp_path, done=29)
    assert [text.split()[0] for text in resumed.signs.shown.values()] == ["grad_norm"], "warned of before the stop"
    assert resumed.signs.add(records[29]) == []
    assert Metrics(tmp_path, done=0).signs.shown == {}


def test_warnings_name_options_of_ours() -> None:
    options = {leaf.name for leaf in TrainOptions.model_construct().leaves()} | set(SHORT_NAMES)
    flags = {flag(name) for name in options}
    named = {option for sign in SIGNS for option in re.findall(r"--[\w.-]*\w", sign.meaning)}
    assert named - flags == set()
    assert all(re.search("--[a-z]", sign.meaning) or "reward" in sign.meaning for sign in SIGNS)


def test_the_page_states_each_threshold() -> None:
    rows = [line.split("|")[1:4] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    stated = {(metric.strip(" `"), times.strip(), limit.strip()) for metric, times, limit in rows}

    def shown(sign: Sign) -> tuple[str, str, str]:
        side = "below" if sign.times is not None and sign.times < 1 else "above"
        times = "" if sign.times is None else f"{side} {sign.times:g} times"
        return sign.metric, times, "" if sign.limit == float("inf") else f"{side} {sign.limit:g}"

    assert {shown(sign) for sign in SIGNS} <= stated
