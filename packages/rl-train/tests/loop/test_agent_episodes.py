"""Episodes of agents: their tokens and rewards, their failures and limits, and runs that learn from them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.agents import worker
from rl_train.agents.pool import Agents
from rl_train.agents.worker import Run
from rl_train.cli.commands import app
from rl_train.data.prompts import read_prompts
from rl_train.loop.agent_episodes import AgentEpisodes, Episodes
from rl_train.loop.checked_run import CheckedRun, check_run
from rl_train.loop.scoring import Scorer
from rl_train.options.options import TrainOptions
from rl_train.quickstart.task import VOCABULARY
from rl_train.rewards.function import Rewards
from rl_train.trajectories.episodes import totals

from . import test_environment_turns

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.usefixtures("folder_of_rewards")
TEMPLATE = test_environment_turns.TEMPLATE  # of the fixture `chat_model`
END, A = VOCABULARY.index("</s>"), VOCABULARY.index("a")
COMMAND = f"{sys.executable} programs.py"


class Echo:
    """An engine that answers each prompt with the letter of its length, until a limit or the end."""

    version = 0

    def __init__(self) -> None:
        self.calls = list[tuple[list[list[int]], SamplingOptions]]()

    def generate(self, prompts: Any, sampling: SamplingOptions) -> Batch:
        self.calls.append((prompts, sampling))
        answers = [[A + len(prompt) % 26, END][: sampling.limit(len(prompt))] for prompt in prompts]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        fields: dict[str, Any] = {"log_probs": [[-float(place) for place in range(len(row))] for row in rows]}
        return Batch.from_sequences(rows, response_lengths=[len(answer) for answer in answers], **fields)


Draw = Callable[..., tuple[Batch, Echo, list[str], Scorer]]


@pytest.fixture
def draw(chat_model: Path, tmp_path: Path) -> Iterator[Draw]:
    """Run an agent about rows."""
    opened: list[Rewards] = []

    def run(rows: list[dict[str, Any]], n: int = 1, **given: Any) -> Any:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"messages": "c"} | row) + "\n" for row in rows))
        agent = {} if "agent_command" in given else {"agent": "programs:talk"}
        options: dict[str, Any] = {"max_new_tokens": 12, "max_tokens": 60, **agent, **given}
        resolved = TrainOptions(model=chat_model, prompts=file, **options)
        prompts = read_prompts(file, chat_model, 99)
        rewards = Rewards(resolved)
        opened.append(rewards)
        said: list[str] = []
        checked_run, engine = CheckedRun(resolved, prompts, [], (END,), None), Echo()
        once = lambda make: pickle.loads(pickle.dumps(make()))  # noqa: E731
        episodes = AgentEpisodes(checked_run, engine, rewards, once, said.append)  # type: ignore[arg-type]
        batch = episodes.draw(prompts, SamplingOptions(12, n=n, stop_ids=[END])).result()
        return batch, engine, said, Scorer(checked_run, rewards, once, said.append)

    yield run
    for rewards in opened:
        rewards.close()


def test_an_agents_calls_are_one_sample_and_its_result_the_reward(draw: Draw) -> None:
    """Two agents ask at a time, and the tokens of their answers go on in the next call."""
    batch, engine, said, scorer = draw([{"turns": 2}, {"turns": 1}], n=2)
    first, second = [A + 3, END], [A + 8, END]
    begin = [1, A + 2, END]
    talk = [*begin, *first, A, A + 1, END, *second]
    assert [row.tolist() for row in batch.split()] == [talk, talk, [*begin, *first], [*begin, *first]]
    mask = [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2
    assert [row.tolist() for row in batch.split("mask")] == [mask, mask, mask[:5], mask[:5]]
    places = torch.cat([torch.arange(length) for length in batch.lengths])
    assert batch["log_probs"].tolist() == torch.where(batch.mask, -places, 0).tolist()
    assert totals(batch)["environment_reward"].tolist() == [2, 2, 1, 1]
    assert totals(batch)["turns"].tolist() == [2, 2, 1, 1]
    assert sum(len(prompts) for prompts, _ in engine.calls) == 6
    assert len(engine.calls) < 6, "agents share calls of the engine"
    assert said == ["agents ask for other temperature than the run, which draws all tokens"]
    prompts = [prompt for prompt in scorer.checked_run.prompts for _ in range(2)]
    assert scorer(prompts, batch).scores.tolist() == [2, 2, 1, 1]


def test_an_agent_that_forgets_gives_two_samples_with_one_reward(draw: Draw) -> None:
    batch, _, _, _ = draw([{"turns": 2, "does": "forget"}])
    assert [row.tolist() for row in batch.split()] == [[1, A + 2, END, A + 3, END], [1, A, A + 1, END, A + 4, END]]
    assert totals(batch)["turns"].tolist() == [2]
    assert totals(batch)["environment_reward"].tolist() == [1]


def test_agents_that_call_at_the_same_time_and_by_command(draw: Draw) -> None:
    batch, _, _, _ = draw([{}], agent="programs:gather")
    assert [len(row) for row in batch.split()] == [5, 5]
    assert totals(batch)["environment_reward"].tolist() == [2]
    batch, _, _, _ = draw([{"turns": 2}], agent_command=COMMAND)
    assert totals(batch)["environment_reward"].tolist() == [2]


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("raise", r"raised KeyError: 'gone' \(programs.py, line \d+\)"),
        ("hang", "took longer than --agents.timeout, 1 s"),
        ("exit", r"ended its process \(exit status 3\)"),
        ("nan", "returned nan; it must be finite"),
        ("nothing", "returned no reward and reported none"),
    ],
)
def test_a_failure_stops_the_run_or_counts_as_0(draw: Draw, does: str, error: str) -> None:
    """Its drawn tokens stay; other agents, whose process it may have ended, are asked again by the next draw."""
    options = {"agents.timeout": 1.0}
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 1: the agent {error}"):
        draw([{"does": does}], **options)
    batch, _, said, _ = draw([{"does": does}], **options, **{"rewards.errors": "zero"})
    assert totals(batch)["failed"].tolist() == [1]
    assert totals(batch)["environment_reward"].tolist() == [0]
    assert batch.mask.sum() == 2
    assert any("an agent failed, and its episode counts as 0" in text for text in said)


def test_log_probs_that_are_not_finite_fail_the_episode(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the agent takes the error of the endpoint for an answer."""
    generate = Echo.generate
    monkeypatch.setattr(
        Echo,
        "generate",
        lambda *arguments: (batch := generate(*arguments)).with_fields(
            log_probs=torch.full_like(batch["log_probs"], math.nan)
        ),
    )
    error = r"the agent got an error of the endpoint: the engine drew the token \d+ with the log-prob nan"
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 1: {error}"):
        draw([{}], agent="programs:content")
    batch, _, said, _ = draw([{}], agent="programs:content", **{"rewards.errors": "zero"})
    assert (totals(batch)["failed"].tolist(), totals(batch)["environment_reward"].tolist()) == ([1], [0])
    assert not batch.mask.any()
    assert any(re.search(error, text) for text in said)


def test_samples_are_read_after_the_end_of_all_sessions(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session ends after its agent, in another thread; what an agent's thread asks in between is not lost half."""
    ended, samples = Episodes._ended, Episodes.samples

    def slowly(episodes: Any, session: Any, end: Any) -> None:
        while not all(end.done() for end in episodes._ends):
            time.sleep(0.001)
        time.sleep(0.2 * episodes._sessions.index(session))
        ended(episodes, session, end)

    def read(episodes: Any) -> Any:
        assert all(session.ended for session in episodes._sessions)
        return samples(episodes)

    monkeypatch.setattr(Episodes, "_ended", slowly)
    monkeypatch.setattr(Episodes, "samples", read)
    assert len(draw([{}], n=2)[0]) == 2


def test_commands_that_fail_are_ended(draw: Draw) -> None:
    for does, error in (("status", "ended with status 1: no such tool"), ("hang", "took longer than")):
        with pytest.raises(ValueError, match=f"the agent {error}"):
            draw([{"does": does}], agent_command=COMMAND, **{"agents.timeout": 2.0})
    with pytest.raises(ValueError, match=r"cannot be started: .*no-such-program"):
        draw([{}], agent_command="no-such-program x")


def test_a_command_reads_a_row_with_values_that_json_has_not() -> None:
    """Such as the dates of a Parquet file."""
    command = shlex.join([sys.executable, "-c", "import json, sys; sys.exit(json.loads(sys.stdin.readline())['when'])"])
    run = Run("http://127.0.0.1:9/v1", "key", {"when": date(2026, 1, 2)}, 20.0, command)
    assert asyncio.run(worker._Host(worker.command).answer(run)).error == "ended with status 1: 2026-01-02"


# Logs its arguments and what it has of the run's environment; `run` runs the command behind the image.
DOCKER = """#!{python}
import json, os, sys
log = {{"arguments": sys.argv[1:], "environment": sorted(name for name in os.environ if name.startswith("OPENAI"))}}
with open({log!r}, "a") as file:
    file.write(json.dumps(log) + "\\n")
if sys.argv[1] == "run":
    command = sys.argv[sys.argv.index("an/image:1") + 1 :]
    os.execvp(command[0], command)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Put a program `docker` on PATH; return what it was called with."""
    log = tmp_path / "docker.jsonl"
    (tmp_path / "docker").write_text(DOCKER.format(python=sys.executable, log=str(log)))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


IMAGE = {"agent_command": COMMAND, "agents.image": "an/image:1"}


def test_a_command_in_a_container(draw: Draw, docker: Callable[[], list[Any]]) -> None:
    """Each episode has a container with a name, the endpoint's network and two variables; its end removes it."""
    batch, _, _, _ = draw(
        [{"turns": 2}], n=2, **IMAGE, **{"agents.memory": 1.5, "agents.container": "docker --gpus all"}
    )
    assert totals(batch)["environment_reward"].tolist() == [2, 2]
    keys = ["OPENAI_API_KEY", "OPENAI_BASE_URL"]
    names = [call["arguments"][4] for call in docker()]
    assert len(set(names)) == 2
    size = f"{3 * 2**19}k"
    assert docker() == [
        {
            "arguments": [
                *("run", "--rm", "--interactive", "--name", name, "--network", "host"),
                *("--env", "OPENAI_BASE_URL", "--env", "OPENAI_API_KEY"),
                *("--env", "ANTHROPIC_BASE_URL", "--env", "ANTHROPIC_API_KEY"),
                *("--memory", size, "--memory-swap", size),
                *("--gpus", "all", "an/image:1", *COMMAND.split()),
            ],
            "environment": keys,
        }
        for name in names
    ]


def test_a_container_that_fails_is_removed(draw: Draw, docker: Callable[[], list[Any]]) -> None:
    """After its time, and when the run ends meanwhile."""
    with pytest.raises(ValueError, match=r"the agent took longer than --agents.timeout"):
        draw([{}], **IMAGE | {"agent_command": "sleep 30", "agents.timeout": 1.0})
    run, remove = (call["arguments"] for call in docker())
    assert remove == ["rm", "--force", run[4]]
    assert "--memory" not in run
    agents = Agents(TrainOptions(model=Path("m"), prompts=Path("p"), **IMAGE | {"agent_command": "sleep 30"}))
    end = agents.run(lambda: agents.run_of("http://127.0.0.1:9", "key", {}))
    while len(docker()) < 3:
        time.sleep(0.01)
    agents.close()
    assert end.result(5).error == "was closed"
    assert docker()[-1]["arguments"] == ["rm", "--force", docker()[-2]["arguments"][4]]


@pytest.mark.slow
def test_a_command_in_a_real_container(draw: Draw) -> None:
    """Where a daemon answers, and the image can be had."""
    image = "python:3.12-alpine"
    for program in ("docker", "podman"):
        if shutil.which(program) and not subprocess.run([program, "pull", image], capture_output=True).returncode:
            break
    else:
        pytest.skip("neither docker nor podman has a daemon that answers")
    source = (Path(__file__).parents[1] / "programs.py").read_text()
    command = shlex.join(["python", "-c", source])
    container = {"agents.image": image, "agents.container": program, "agents.memory": 1.0}
    batch, _, _, _ = draw([{"turns": 2}], agent_command=command, **container)
    assert totals(batch)["environment_reward"].tolist() == [2]


def test_rewards_and_limits(draw: Draw) -> None:
    """A reward by a call; a limit of calls, whose error the agent does not catch, and one of tokens."""
    batch, _, _, _ = draw([{"does": "report"}])
    assert totals(batch)["environment_reward"].tolist() == [0.25]
    zero = {"rewards.errors": "zero"}
    batch, _, _, _ = draw([{"turns": 9}], **zero, **{"agents.max_calls": 2})
    assert totals(batch)["turns"].tolist() == [2]
    assert totals(batch)["truncated"].tolist() == [1]
    batch, _, _, _ = draw([{"turns": 9}], **zero, **{"agents.max_tokens": 3})
    assert int(batch.mask.sum()) == 3
    assert totals(batch)["truncated"].tolist() == [2]  # the last answer is cut, and then a call is refused


def test_a_scorer_reads_the_trajectory(draw: Draw) -> None:
    """All drawn texts of an episode, sample by sample, in place of the agent's reward or beside it."""
    sees = ["c", "di", "d</s>ab</s>i</s>", [A + 3, END, A + 8, END], "stop", 2.0]
    forgets = ["c", "de", "d</s>e</s>", [A + 3, END, A + 4, END], "stop", 1.0]
    silent = ["c", "d", "d</s>", [A + 3, END], "stop", 0.0]
    rows = [
        {"turns": 2, "sees": sees},
        {"turns": 2, "does": "forget", "sees": forgets},
        {"does": "nothing", "sees": silent},
        {"does": "raise", "sees": silent},
    ]
    for reward, scores in (
        ("rewards:as_expected", [1, 1, 1, 0]),
        ("rewards:as_expected,environment@0.1", [1.2, 1.1, 1, 0]),
    ):
        batch, _, said, scorer = draw(rows, reward=reward, **{"rewards.errors": "zero"})
        scored = scorer(scorer.checked_run.prompts, batch)
        assert scored.scores.tolist() == pytest.approx(scores)
        assert (scored.errors, len(said)) == (1, 2)
    cut = {"sees": ["c", "d", "d", [A + 3], "length", 1.0]}
    batch, _, _, scorer = draw([cut], reward="rewards:as_expected", **{"agents.max_tokens": 1})
    assert scorer(scorer.checked_run.prompts, batch).scores.tolist() == [1]


def test_mistakes_of_options(chat_model: Path, prompts: Path) -> None:
    for given, error in (
        ({"agent": "programs"}, "agent='programs' must be module:function"),
        ({"agent": "programs:none"}, "programs has no function none"),
        ({"agent": "programs:wrong"}, r"it takes \(base_url: 'str'\) -> 'None'; an agent takes \(base_url, row\)"),
        ({"agent": "programs:talk", "agent_command": "x"}, "agent_command=x needs no other agent"),
        ({"agent": "programs:talk", "environment": "talks:Talk"}, "environment=talks:Talk needs no agent"),
        ({"agent": "programs:talk", "agents.image": "x"}, "agents.image=x needs agent_command"),
        ({"agent_command": "x", "agents.memory": 2.0}, "agents.memory=2.0 needs agents.image"),
        ({"agent_command": "x", "agents.image": "y", "agents.container": "nerd"}, "y needs nerd, which is not on PATH"),
        ({"agents.max_calls": 3, "reward": "environment"}, "agents.max_calls=3 needs agent=module:function"),
    ):
        with pytest.raises(ValueError, match=error):
            check_run(TrainOptions(model=chat_model, prompts=prompts, device="cpu", **given))


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--dims", "dp=2"], marks=pytest.mark.slow),
        pytest.param(["--in-flight", "--staleness", "1", "--rollouts.devices", "cpu"], marks=pytest.mark.slow),
    ],
    ids=["policy", "two ranks", "in flight"],
)
def test_a_run_learns_from_agents(chat_model: Path, tmp_path: Path, more: list[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": letter, "turns": 2}) + "\n" for letter in "abcd"))
    command = ["train", "--model", chat_model, "--prompts", rows, "--agent", "programs:talk", "--steps", 2]
    command += ["--prompts-per-step", 2, "--samples", 2, "--max-new-tokens", 8, "--out", tmp_path / "run", *more]
    result = CliRunner().invoke(app, [*map(str, command), "--device", "cpu", "--save-every", "0", "--json"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["turns"], line["reward"]) for line in lines] == [(1, 2, 2), (2, 2, 2)]
    assert all(line["rollout_kl"] < 1e-3 for line in lines if "rollout_kl" in line)
