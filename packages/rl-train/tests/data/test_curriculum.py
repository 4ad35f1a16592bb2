"""Prompts near a target reward come up more often, the same ones on every rank and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rl_train.data.curriculum import Curriculum
from rl_train.data.mixture import Mixture
from rl_train.data.prompts import Prompt

# The mean reward of each of ten prompts.
MEANS = [0.0, 0.0, 0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0, 1.0]


def drawn(curriculum: Curriculum, mixture: Mixture[Prompt], steps: int) -> list[int]:
    lines = []
    for _ in range(steps):
        curriculum.begin()
        keys, prompts = zip(*mixture.take(5, curriculum.skips), strict=True)
        curriculum.observe(keys, [MEANS[prompt.line] for prompt in prompts])
        lines += [prompt.line for prompt in prompts]
    return lines


def made() -> tuple[Curriculum, Mixture[Prompt]]:
    return Curriculum(0.5, 7), Mixture.of_rows([Prompt([line], {}, line) for line in range(10)], seed=7)


def test_prompts_near_the_target_are_drawn_most_and_none_is_lost() -> None:
    lines = drawn(*made(), 400)
    assert sorted(lines[:10]) == list(range(10)), "all prompts once, before rewards are known"
    counts = Counter(lines)
    turns = counts[4]
    assert counts[4] == counts[5]
    for line, mean in enumerate(MEANS):
        chance = max(0.1, 1 - abs(mean - 0.5) / 0.5)
        assert abs(counts[line] / turns - chance) < 0.06, (line, counts)
    assert min(counts.values()) > 0


def test_the_same_prompts_after_a_resume() -> None:
    whole = drawn(*made(), 60)
    curriculum, mixture = made()
    assert drawn(curriculum, mixture, 23) == whole[: 5 * 23]
    resumed, rows = made()
    resumed.resume(json.loads(json.dumps(curriculum.state)))
    rows.resume(json.loads(json.dumps(mixture.state)), 0)
    assert drawn(resumed, rows, 37) == whole[5 * 23 :]


def test_a_new_reward_counts_half() -> None:
    curriculum = Curriculum(0.5, 0)
    for mean in (1.0, 0.0, 0.0):
        curriculum.observe([(0, 0, 3)], [mean])
    assert curriculum.means == {(0, 0, 3): 0.25}
    assert curriculum.state == [[0, 0, 3, 0.25]]


def test_equal_means_are_all_drawn(tmp_path: Path) -> None:
    curriculum, mixture = made()
    curriculum.observe([(0, 0, row) for row in range(10)], [0.5] * 10)
    curriculum.begin()
    assert len({prompt.line for _, prompt in mixture.take(10, curriculum.skips)}) == 10
