"""Environments of verifiers, of a taskset that stands here: prompts, episodes by its TrainClient, and their rewards."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.cli.commands import app
from rl_train.data.prompts import read_prompts
from rl_train.environments.verifiers import _loaded
from rl_train.loop.agent_episodes import AgentEpisodes
from rl_train.loop.checked_run import CheckedRun
from rl_train.options.derived import check
from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve
from rl_train.quickstart.task import VOCABULARY
from rl_train.rewards.function import Rewards
from rl_train.trajectories.episodes import totals

END, A = VOCABULARY.index("</s>"), VOCABULARY.index("a")
TEMPLATE = "<s>{% for message in messages %}{{ message.content }}</s>{% endfor %}"
SOURCE = "verifiers:letters_of_the_test,agent.runtime.type=subprocess"
# A package of the user: tasks with a letter as prompt, and a harness that asks again, in the process of the episodes.
TASKSET = """
import json, os

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import mcp_client

# The process of the tools imports this module, which is not installed.
os.environ["PYTHONPATH"] = os.getcwd()


class Data(vf.TaskData):
    turns: int
    does: str = ""


class LetterTask(vf.Task[Data]):
    @vf.reward
    async def answers(self, trace) -> float:
        if self.data.does == "raise":
            raise KeyError("gone")
        return float(trace.num_turns)

    @vf.reward(weight=0.5)
    async def written(self, trace) -> float:
        lines = [[b.token_ids, b.sampled_mask, b.logprobs] for b in trace.branches]
        masks = [b.sampling_mask for b in trace.branches]
        kept = [None if mask is None else [mask.ids.tolist(), mask.counts.tolist()] for mask in masks]
        with open("traces.jsonl", "a") as file:
            file.write(json.dumps([self.data.idx, lines, kept]) + "\\n")
        return 1.0


class Config(vf.TasksetConfig):
    does: str = ""


class Twice(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def twice(self, text: str) -> str:
        return text * 2


class Letters(vf.Taskset[LetterTask, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Twice(vf.SharedToolsetConfig())] if config.does == "tool" else []

    def load(self):
        for number, letter in enumerate("ca"):
            data = Data(prompt=letter, turns=2 - number, does=self.config.does, name=f"letter {letter}")
            yield LetterTask(data, self.config.task)


class Endless(Letters):
    INFINITE = True


class Asking(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    SUPPORTS_MCP = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=30) as client:
            for turn in range(data.turns):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text)
                answer = reply.json()["choices"][0]["message"]
                text = "ab"
                for url in mcp_urls.values():
                    async with mcp_client({"url": url}) as server:
                        result = await server.call_tool("twice", {"text": answer["content"]})
                    text = result.content[0].text
                messages += [answer, {"role": "user", "content": text}]
        return vf.ProgramResult(0, "", "")


__all__ = ["Letters", "Asking"]

if __name__ == "__main__":
    Twice.run()
"""


def test_an_environment_of_verifiers_is_an_agent_with_prompts(tmp_path: Path) -> None:
    options = resolve(TrainOptions, None, {"model": "m", "environment": SOURCE, "agents.max_calls": 3})
    check(options)
    assert (options.prompts, options.reward, options.converses) == (Path(SOURCE), "environment", False)
    assert (options.runs_agents, options.agent_function) == (True, "rl_train.environments.verifiers:episode")
    with pytest.raises(ValueError, match="needs no agent: both would run the episodes"):
        check(resolve(TrainOptions, None, {"model": "m", "environment": SOURCE, "agent": "a:b"}))


def test_without_the_extra_the_environment_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    _loaded.cache_clear()
    with pytest.raises(ValueError, match=r"gsm8k needs verifiers \(.*\); pip install 'rl-train\[verifiers\]'"):
        read_prompts(Path("verifiers:gsm8k"), model, 999)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the taskset."""
    pytest.importorskip("verifiers")
    (tmp_path / "letters_of_the_test.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")  # which the taskset sets; the old value comes back
    _loaded.cache_clear()
    yield tmp_path
    sys.modules.pop("letters_of_the_test", None)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("verifiers:none_of_these", "taskset 'none_of_these' not found"),
        (f"{SOURCE},select.limt=1", "limt"),
        (f"{SOURCE},agent.harness.id=bsh", "harness 'bsh' not found"),
        (f"{SOURCE},limit", "'limit' must be an option and its value, such as select.limit=100"),
    ],
)
def test_mistakes_in_the_source_are_named(folder: Path, model: Path, source: str, error: str) -> None:
    with pytest.raises(ValueError, match=rf"{source}: (.|\n)*{error}"):
        read_prompts(Path(source), model, 999)


def test_tasks_are_prompts(folder: Path, chat_model: Path) -> None:
    prompts = read_prompts(Path(f"{SOURCE},select.limit=1,taskset.does=nothing"), chat_model, 99)
    assert [(prompt.row["messages"], prompt.tokens) for prompt in prompts] == [("c", [1, A + 2, END])]
    assert {"idx": 0, "turns": 2, "does": "nothing"}.items() <= prompts[0].row["task"].items()
    (folder / "letters_of_the_test.py").write_text(TASKSET.replace('["Letters"', '["Endless"'))
    sys.modules.pop("letters_of_the_test")
    _loaded.cache_clear()
    with pytest.raises(ValueError, match=r"has tasks without end; give the number of tasks, such as select.limit"):
        read_prompts(Path(SOURCE), chat_model, 99)


class Echo:
    """An engine that answers each prompt with the letter of its length and the end."""

    version = 0

    def __init__(self) -> None:
        self.limits = set[int]()

    def generate(self, prompts: Any, sampling: SamplingOptions) -> Batch:
        self.limits.add(sampling.max_new_tokens)
        rows = [[*prompt, A + len(prompt) % 26, END] for prompt in prompts]
        fields: dict[str, Any] = {"log_probs": [[-float(place) for place in range(len(row))] for row in rows]}
        return Batch.from_sequences(rows, response_lengths=[2] * len(rows), **fields)


Draw = Callable[..., tuple[Batch, Echo, list[str]]]


@pytest.fixture
def draw(folder: Path, chat_model: Path) -> Iterator[Draw]:
    """Run the tasks as agents."""
    opened: list[Rewards] = []

    def run(source: str = SOURCE, n: int = 1, **given: Any) -> Any:
        options = TrainOptions(model=chat_model, environment=source, max_new_tokens=24, max_tokens=60, **given)
        prompts = read_prompts(options.prompts, chat_model, 99)
        opened.append(Rewards(options))
        said: list[str] = []
        checked_run, engine = CheckedRun(options, prompts, [], (END,), None), Echo()
        once = lambda make: pickle.loads(pickle.dumps(make()))  # noqa: E731
        episodes = AgentEpisodes(checked_run, engine, opened[-1], once, said.append)  # type: ignore[arg-type]
        batch = episodes.draw(prompts, SamplingOptions(24, n=n, stop_ids=[END])).result()
        return batch, engine, said

    yield run
    for rewards in opened:
        rewards.close()


def test_episodes_have_the_tokens_of_the_train_client(draw: Draw, folder: Path) -> None:
    """Ids, masks and log-probs are those of verifiers' own traces, and the rewards are its sums of rewards."""
    batch, engine, said = draw(n=2)
    assert totals(batch)["environment_reward"].tolist() == [2.5, 2.5, 1.5, 1.5]
    assert totals(batch)["turns"].tolist() == [2, 2, 1, 1]
    assert (engine.limits, said) == ({24}, [])
    traces = {}
    for number, branches, _ in map(json.loads, (folder / "traces.jsonl").read_text().splitlines()):
        ((tokens, mask, log_probs),) = branches
        traces.setdefault(number, []).append((tokens, mask, log_probs))
    begin = [1, A + 2, END, A + 3, END]
    first, second = [*begin, A, A + 1, END, A + 8, END], [1, A, END, A + 3, END]
    assert [row.tolist() for row in batch.split()] == [first, first, second, second]
    for place, (row, mask, log_probs) in enumerate(
        zip(batch.split(), batch.split("mask"), batch.split("log_probs"), strict=True)
    ):
        tokens, sampled, drawn = traces[place // 2][place % 2]
        assert row.tolist() == tokens
        assert mask.tolist() == sampled
        assert log_probs.tolist() == drawn


def test_a_tool_of_an_mcp_server(draw: Draw) -> None:
    """The server of the taskset runs in a process of its own, and the harness calls its tool over HTTP."""
    batch, _, _ = draw(f"{SOURCE},taskset.does=tool,select.limit=1")
    (row,) = batch.split()
    assert row.tolist() == [1, A + 2, END, A + 3, END, A + 3, A + 3, END, A + 8, END]


def test_an_episode_that_fails_is_named_or_counts_as_0(draw: Draw) -> None:
    source = f"{SOURCE},taskset.does=raise,select.limit=1"
    batch, _, said = draw(source, **{"rewards.errors": "zero"})
    assert (totals(batch)["failed"].tolist(), totals(batch)["environment_reward"].tolist()) == ([1], [0])
    assert "counts as 0" in said[0]
    assert "row 1: the agent raised RuntimeError: TaskError: " in said[0]
    assert "KeyError" in said[0]


@pytest.mark.slow
def test_a_model_learns_a_task_of_verifiers(folder: Path, chat_model: Path) -> None:
    """The task is the letter e in replies; the masks of top-k go to TrainClient and are learned from."""
    text = TASKSET.replace("float(trace.num_turns)", "(trace.assistant_messages[-1].content or '').count('e') / 4 - 1")
    text = text.replace('enumerate("ca")', 'enumerate("caefghij")').replace("2 - number", "1")
    (folder / "letters_of_the_test.py").write_text(text)
    command = ["train", "--model", chat_model, "--environment", SOURCE, "--steps", 12, "--prompts-per-step", 8]
    command += ["--samples", 8, "--max-new-tokens", 8, "--learning-rate", 0.01, "--top-k", 20]
    command += ["--sampling.keep-sampling-mask", "--out", "run", "--device", "cpu", "--save-every", "0", "--json"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    print("verifiers:", [round(reward, 3) for reward in rewards])
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 1
    assert all(line["rollout_kl"] < 1e-3 for line in lines)
    kept = [masks for _, _, masks in map(json.loads, Path("traces.jsonl").read_text().splitlines())]
    assert all(count <= 20 for ((ids, counts),) in kept for count in counts)
