"""Which samples the page holds, and how much of each."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from rl_train.report.page_samples import (
    MOST_CHARACTERS,
    MOST_EXTREME,
    MOST_OF_PROMPT,
    MOST_SAMPLED,
    MOST_TOKENS,
    evenly_spaced,
    samples_of_lines,
    samples_of_run,
)
from rl_train.trajectories.saved_rollouts import Response


def sample(step: int, **values: Any) -> dict[str, Any]:
    known = {"step": step, "line": 1, "prompt": [1, 2], "response": "r", "reward": float(step % 3)}
    return known | {"response_length": 1, "truncated": False} | values


def test_a_long_sample_keeps_its_beginning_and_end() -> None:
    count = MOST_TOKENS + 500
    numbers = [float(number) for number in range(count)]
    policy = {"role": "policy", "texts": [f"{x} " for x in numbers], "log_probs": numbers, "versions": 3, "calls": [{}]}
    short = {"role": "policy", "texts": ["x"], "log_probs": [0.0], "versions": 4}
    turns = [short, policy, {"role": "environment", "text": "abcdefgh"}, short]
    (held,) = samples_of_lines([sample(1, turns=turns, prompt="p" * (MOST_OF_PROMPT + 7))])["samples"]
    half = MOST_TOKENS // 2
    assert [turn["role"] for turn in held["turns"]] == ["policy"] * 2 + ["left out", "policy", "environment", "policy"]
    assert held["turns"][1]["log_probs"] == numbers[: half - 1]
    assert held["turns"][1]["texts"] == policy["texts"][: half - 1]
    assert held["turns"][2]["text"] == "504 tokens"
    assert held["turns"][3]["log_probs"] == numbers[-half + 3 :]
    assert (held["turns"][3]["versions"], held["turns"][4]["text"]) == (3, "abcdefgh")
    assert held["prompt"].count("p") == MOST_OF_PROMPT
    assert "[7 characters are left out here]" in held["prompt"]


def test_the_samples_of_a_page_are_bounded() -> None:
    turns = [{"role": "policy", "texts": ["word "] * 9000, "log_probs": [-0.12] * 9000, "advantages": 1.0}]
    records = [sample(step, line=line, turns=turns) for step in range(1, 61) for line in range(1, 4)]
    held = samples_of_lines(records)
    steps = sorted({entry["step"] for entry in held["samples"]})
    assert (steps[0], steps[-1]) == (1, 60)
    assert len(steps) >= MOST_SAMPLED, "each step has one response at least"
    largest = max(len(json.dumps(entry)) for entry in held["samples"])
    assert len(json.dumps(held)) <= MOST_CHARACTERS + (2 * MOST_EXTREME + 1) * largest


def test_of_many_responses_each_step_has_as_many_prompts_as_fit() -> None:
    steps, each, read = 100, 20 * 8, list[int]()
    rewards = [(step, float(number == 77) - (step == 50)) for step in range(steps) for number in range(each)]

    def prompts_of(step: int) -> Iterator[list[Response]]:
        def response(number: int, size: int) -> dict[str, Any]:
            read.append(number)
            return sample(step, line=number // 8, prompt="p", response="r" * size)

        for first in range(step * each, (step + 1) * each, 8):
            sizes = 100 if step < 50 else 9000
            yield [(number, partial(response, number, sizes)) for number in range(first, first + 8)]

    held = samples_of_run(rewards, prompts_of)
    counts = Counter(entry["step"] for entry in held["samples"])
    assert counts.keys() >= {*evenly_spaced(range(steps), MOST_SAMPLED)}
    assert (counts[0], max(counts.values())) == (each, each), "all of a step with short responses"
    assert {count % 8 for step, count in counts.items() if step % 2 == 0} <= {0, 1, 2}, "whole prompts, and extremes"
    assert 0.8 * MOST_CHARACTERS < len(json.dumps(held["samples"])) < 1.1 * MOST_CHARACTERS
    assert len(read) < steps * each / 2, "only what is shown is read"
    best, worst = ([held["samples"][index] for index in held["views"][name]] for name in ("best", "worst"))
    assert [(entry["step"], entry["line"] % 20) for entry in best] == [(99 - n, 9) for n in range(MOST_EXTREME)]
    assert {entry["step"] for entry in worst} == {50}
    assert held["total"] == steps * each


def test_the_extremes_are_those_of_all_steps() -> None:
    rewards = {step: 0.5 for step in range(1, 1001)} | {77: -2.0, 78: 9.0}
    held = samples_of_lines([sample(step, reward=reward) for step, reward in rewards.items()])
    best, worst = ([held["samples"][index]["step"] for index in held["views"][name]] for name in ("best", "worst"))
    assert best[:3] == [78, 1000, 999]
    assert worst[:3] == [77, 1000, 999]


def test_a_run_without_samples() -> None:
    assert samples_of_lines([]) == {"samples": [], "views": {"best": [], "worst": []}, "total": 0}
