"""Rewards in processes of their own: every form, several with weights, and those that raise, hang or end."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve
from rl_train.rewards import Response
from rl_train.rewards.function import NamedReward, Rewards, check_rewards, parse_rewards

MODULE = """
import asyncio, ctypes, os, time

started = time.monotonic()

def number(prompt, response, row):
    return len(response) + row["more"]

def batch(prompts, responses, rows):
    if "mean" in rows[0]:
        return 1.0
    return [len(responses)] * (len(prompts) - ("short" in rows[0]))

async def waiting(prompt, response, row):
    await asyncio.sleep(row.get("seconds", 0.2))
    if row.get("block"):
        time.sleep(60)
    return row.get("value", 1)

async def judged(prompts, responses, rows):
    await asyncio.sleep(0)
    return list(range(len(rows)))

class Judge:
    async def __call__(self, prompt, response, row):
        return float(row["value"])

judge = Judge()

def wrong(prompt, response, row):
    if "sleep" in row:
        time.sleep(row["sleep"])
    if "lock" in row:  # a call in C that keeps the interpreter's lock
        ctypes.PyDLL(None).sleep(row["lock"])
    if "exit" in row:
        os._exit(row["exit"])
    if row.get("raise") == "panic":
        raise Panic("index out of bounds")
    if row.get("raise") == "much":
        raise ValueError("x" * 10**7)
    odd = {"nan": float("nan"), "text": "much", "none": None, "large": 10**400, "mute": Mute(), "much": "x" * 10**7}
    return odd.get(row["value"], row["value"])

class Panic(BaseException):
    pass

class Mute:
    def __str__(self):
        raise OSError("gone")
    __repr__ = __str__

def several(prompts, responses, rows):
    return [wrong(*item) for item in zip(prompts, responses, rows)]

def forks(prompt, response, row):
    if row.get("fork"):
        child = os.fork()
        if child == 0:
            if row["fork"] == "exit":
                raise SystemExit(5)
            return 100
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + row["value"]
    return row["value"]

def forked(prompts, responses, rows):
    return [forks(*item) for item in zip(prompts, responses, rows)]

async def forking(prompt, response, row):
    return forks(prompt, response, row)

def stopped(prompt, response, row):
    if row.get("stop"):
        os.kill(os.getpid(), 19)
    return row["value"]

def seen(prompt, response, row):
    assert isinstance(response, str) and prompt == "2+2="
    return response.tokens[-1] + 100 * (response.finish_reason == "stop") + 1000 * (response.raw == "4</s>")

def where(prompt, response, row):
    return os.getpid()

def two(prompt, response):
    return 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1

def accuracy(prompts, completions, answer, **kwargs):
    return [1] * len(prompts)

def reward_func(queries, prompts, labels):
    return 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    (path / "judges.py").write_text(textwrap.dedent(MODULE))
    (path / "broken.py").write_text("raise MemoryError('no room')")
    (path / "leaving.py").write_text("import os\nos._exit(7)")
    (path / "sleeping.py").write_text("import time\ntime.sleep(60)")
    (path / "asyncio.py").write_text("raise RuntimeError('a file of the user hides a module of Python')")
    return path


@pytest.fixture(scope="module")
def started_once() -> Iterator[Callable[..., Rewards]]:
    """Rewards by their options; their processes start once and serve all tests."""
    with ExitStack() as stack:

        @cache
        def make(reward: str, **options: Any) -> Rewards:
            given = TrainOptions(model=Path("m"), prompts=Path("p"), reward=reward, **options)
            return stack.enter_context(closing(Rewards(given)))

        yield make


@pytest.fixture
def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, started_once: Callable[..., Rewards]
) -> Callable[..., Rewards]:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as `check_rewards` does
    return started_once


def score(rewards: Rewards, *rows: dict[str, Any]) -> Any:
    return rewards.score([("", "four", row) for row in rows], [f"p.jsonl, line {n}" for n in range(1, len(rows) + 1)])


def test_several_rewards_are_weighed_and_named(start: Any) -> None:
    found = score(
        start("judges:number,all=judges:batch@0.1,only=judges:judge@0"), *({"more": n, "value": n} for n in (1, 2, 3))
    )
    assert found.total == pytest.approx([5.3, 6.3, 7.3])
    assert found.each == {"number": [5, 6, 7], "all": [3, 3, 3], "only": [1, 2, 3]}
    assert (found.errors, found.error) == (0, None)


def test_asynchronous_rewards_wait_at_the_same_time(start: Any) -> None:
    rewards = start("judges:waiting,judges:judged", **{"rewards.workers": 2})
    began = time.monotonic()
    found = score(rewards, *({"value": n} for n in range(20)))
    assert time.monotonic() - began < 2, "one after the other, they take 4 s"
    assert found.each == {"waiting": list(range(20)), "judged": list(range(20))}


def test_the_processes_of_a_reward_work_at_the_same_time(start: Any) -> None:
    rewards = start("judges:where,judges:wrong", **{"rewards.workers": 2})
    began = time.monotonic()
    found = score(rewards, *[{"sleep": 0.3, "value": 1}] * 4)
    assert 0.6 <= time.monotonic() - began < 1.1, "one after the other, they take 1.2 s"
    assert 1 <= len(set(found.each["where"]) - {os.getpid()}) <= 2


def test_a_response_has_its_tokens_its_raw_text_and_the_reason_of_its_end(start: Any) -> None:
    items = [("2+2=", Response("4", "4</s>", [8, 2], "stop"), {}), ("2+2=", Response("4", "4", [8], "length"), {})]
    assert start("judges:seen").score(items, ["", ""]).total == [1102, 8]


FAILURES = [
    ("wrong", {"value": "nan"}, "returned nan; it must be finite in fp32"),
    ("wrong", {"value": 1e39}, "returned 1e+39; it must be finite in fp32"),
    ("wrong", {"value": "text"}, "returned 'much', which is not a number"),
    ("wrong", {"value": "none"}, "returned None, which is not a number"),
    ("wrong", {}, "raised KeyError: 'value' (judges.py, line 42)"),
    ("wrong", {"value": "large"}, "returned inf; it must be finite in fp32"),
    ("wrong", {"value": "mute"}, "returned <Mute, whose repr raises OSError>, which is not a number"),
    ("several", {"value": "large"}, "returned inf; it must be finite in fp32"),
    ("several", {"value": "mute"}, "returned <Mute, whose repr raises OSError>, which is not a number"),
    ("wrong", {"raise": "panic"}, "raised Panic: index out of bounds (judges.py, line 38)"),
    ("stopped", {"stop": True, "value": 1}, "took longer than --rewards.timeout, 0.5 s"),
    ("wrong", {"exit": 3}, "ended its process (exit status 3)"),
    ("wrong", {"sleep": 60}, "took longer than --rewards.timeout, 0.5 s"),
    ("wrong", {"lock": 60}, "took longer than --rewards.timeout, 0.5 s"),
    ("waiting", {"seconds": 60}, "took longer than --rewards.timeout, 0.5 s"),
    ("waiting", {"seconds": 0, "block": True}, "took longer than --rewards.timeout, 0.5 s"),
    ("waiting", {"seconds": 0, "value": "much"}, "returned 'much', which is not a number"),
]


# The quick run waits for one late coroutine.
MORE = [{"sleep": 60}, {"lock": 60}, {"stop": True, "value": 1}, {"seconds": 0, "block": True}]


@pytest.mark.parametrize(
    ("name", "row", "error"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[1] in MORE else [], id=str(case[1])) for case in FAILURES],
)
def test_a_reward_that_fails_counts_as_0_and_loses_no_other(
    start: Any, name: str, row: dict[str, Any], error: str
) -> None:
    good = {"value": 2, "seconds": 0}
    rewards = start(f"judges:{name}", **{"rewards.errors": "zero", "rewards.timeout": 0.5})
    for _ in range(1 if "block" in row else 2):  # the process that has replaced a lost one works, too
        found = score(rewards, good, row, good)
        assert found.total == [2, 0, 2]
        assert (found.errors, found.error) == (1, f"p.jsonl, line 2: the reward {name} {error}")


@pytest.mark.parametrize("name", ["forks", "forked", "forking"])
def test_a_fork_that_comes_back_from_a_reward_leaves(start: Any, name: str) -> None:
    rows: list[dict[str, Any]] = [{"value": number} for number in range(8)]
    rows[1]["fork"], rows[4]["fork"] = "return", "exit"
    rewards = start(f"judges:{name}")
    for _ in range(2):
        assert score(rewards, *rows).total == [0, 1, 2, 3, 9, 5, 6, 7]


@pytest.mark.parametrize("row", [{"value": "much"}, {"value": 0, "raise": "much"}])
def test_foreign_text_is_cut_in_the_process_of_the_reward(start: Any, row: dict[str, Any]) -> None:
    found = score(start("judges:wrong", **{"rewards.errors": "zero"}), row)
    assert len(found.error) < 1000
    assert re.search(r"x\.\.\. \(1000000\d characters\)", found.error)


def test_of_many_responses_only_those_that_fail_count_as_0(start: Any) -> None:
    rows: list[dict[str, Any]] = [{"value": number} for number in range(40)]
    rows[2], rows[3], rows[38] = {"sleep": 60}, {"exit": 1}, {"sleep": 60}
    found = score(start("judges:wrong", **{"rewards.errors": "zero", "rewards.timeout": 0.5}), *rows)
    assert found.total == [0 if number in (2, 3, 38) else number for number in range(40)]
    assert (found.errors, found.error) == (
        3,
        "p.jsonl, line 3: the reward wrong took longer than --rewards.timeout, 0.5 s",
    )


def test_where_every_response_hangs_the_run_stops_after_the_first(start: Any) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"line 1: the reward wrong took longer than --rewards.timeout, 0.5 s"):
        score(start("judges:wrong", **{"rewards.timeout": 0.5}), *[{"sleep": 60}] * 40)
    assert time.monotonic() - began < 2


def test_a_reward_that_fails_stops_the_run_before_the_others_are_called(start: Any) -> None:
    rewards = start("judges:wrong", **{"rewards.timeout": 60})
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"p.jsonl, line 1: the reward wrong raised KeyError: 'value' \(judges.py"):
        score(rewards, {}, *[{"sleep": 30}] * 3)
    rewards.close()
    assert time.monotonic() - began < 5


def test_the_answers_are_those_of_the_first_reward_that_returns_any(start: Any) -> None:
    items = [("", text, {"answer": "7", "more": 1}) for text in ("is 7", "8", "?")]
    found = start("judges:number@0,number-match,exact-match@0").score(items, [""] * 3)
    assert (found.total, found.answers) == ([1, 0, 0], ["7", "8", None])


def test_a_batch_of_another_length_is_named(start: Any) -> None:
    with pytest.raises(ValueError, match=r"line 1: the reward batch returned 1 numbers for 2 responses"):
        score(start("judges:batch"), {"short": 1}, {})


def test_a_batch_that_is_no_list_is_named(start: Any) -> None:
    with pytest.raises(ValueError, match=r"line 1: the reward batch returned 1.0 for 2 responses; return a list"):
        score(start("judges:batch"), {"mean": 1}, {})


def test_a_sum_that_is_not_finite_is_named(start: Any) -> None:
    with pytest.raises(ValueError, match=r"line 1: the sum of the rewards 4e\+38; it must be finite in fp32"):
        score(start("judges:judge,more=judges:judge"), {"value": 2e38})


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        ("broken:f", "reward f: importing broken raised MemoryError: no room"),
        ("leaving:f", r"reward f: importing leaving ended its process \(exit status 7\)"),
        ("sleeping:f", "reward f: importing sleeping took longer than 1 s"),
        ("judges:none", "reward none: judges has no function none"),
        ("judges:started", "reward started: judges has no function started"),
        ("judges:two", r"reward two: it takes \(prompt, response\); a reward takes \(prompt, response, row\), or"),
        (
            "judges:compute_score",
            r"compute_score: .*, and data_source, solution_str, ground_truth belong to verl's rewards; write def",
        ),
        ("judges:accuracy", "completions belong to TRL's rewards; write def reward"),
        ("judges:reward_func", "queries belong to OpenRLHF's rewards; write def reward"),
    ],
)
def test_what_is_no_reward_is_named_before_the_run(start: Any, reward: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        start(reward, collective_timeout=1 if "sleeping" in reward else 60)


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (
            "exact",
            "reward 'exact' must be exact-match, number-match, math-verify, regex, environment, reasoning-gym, mod",
        ),
        ("regex,", "reward '' must be exact-match, number-match, math-verify"),
        ("my name=regex", "reward 'my name=regex' must be exact-match"),
        ("regex@much", "reward 'regex@much': the weight 'much' must be a finite number"),
        ("regex@inf", "reward 'regex@inf': the weight 'inf' must be a finite number"),
        ("rewards:f,others:f", "reward 'others:f': f is the name of another reward, too; write NAME=others:f"),
        ("math.no:f", "reward f: importing math.no raised ModuleNotFoundError"),
    ],
)
def test_a_name_that_is_no_reward_is_refused(reward: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_rewards(reward)


def test_rewards_are_given_by_text_list_or_mapping() -> None:
    expected = [
        NamedReward("number-match", "rl_train.rewards.ready", "number_match", 1),
        NamedReward("brief", "my.rewards", "short", -0.1),
    ]
    needed = {"model": "m", "prompts": "p"}
    for given in (
        "number-match, brief=my.rewards:short@-0.1",
        ["number-match", "brief=my.rewards:short@-0.1"],
        {"number-match": "number-match", "brief": "my.rewards:short@-0.1"},
    ):
        assert parse_rewards(resolve(TrainOptions, None, needed | {"reward": given}).reward) == expected


def test_the_worker_of_a_reward_imports_no_torch(folder: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_train.processes.child.subprocess", subprocess)  # forked, it would have torch
    (folder / "light.py").write_text("import sys\ndef f(prompt, response, row):\n    return 'torch' in sys.modules\n")
    assert score(start("light:f"), {}).total == [0]
