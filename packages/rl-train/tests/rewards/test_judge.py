"""Judges: rubrics, requests, retries, limits, the judgements of a run, and runs that learn from them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.loop.scoring import Scored
from rl_train.options.options import TrainOptions
from rl_train.rewards import Response, judge
from rl_train.rewards.function import NamedReward, Rewards, Scores, check_rewards, check_rows, parse_rewards
from rl_train.rewards.judge import JUDGEMENTS
from rl_train.rewards.rubric import Rubric

Answer = Callable[[dict[str, Any]], Any]


class Server(ThreadingHTTPServer):
    """A model that judges: `answer` returns its reply to a request, or an HTTP status, or None to hang up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.headers, self.times = list[dict[str, Any]](), list[Any](), list[float]()
        self.answer: Answer = lambda request: f"Fine. Score: {len(request['messages'][-1]['content']) % 11}"
        self.active, self.most, self.lock = 0, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.headers.append(self.headers)
            self.server.times.append(time.monotonic())
            self.server.active += 1
            self.server.most = max(self.server.most, self.server.active)
        answer = self.server.answer(request)
        with self.server.lock:
            self.server.active -= 1
        if answer is None:
            return
        status = answer if isinstance(answer, int) else 200
        reply = {"choices": [{"message": {"content": answer}}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        body = json.dumps(answer if isinstance(answer, dict) else reply if status == 200 else {"error": "busy"})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.shutdown()


PROMPT = "Q: {{ prompt }} A: {{ response }} Right: {{ answer }}"
VALUES: dict[str, Any] = {"model": "judge", "prompt": PROMPT, "score": r"Score: (\S+)", "range": [0, 10]}


@pytest.fixture
def rubric(server: Server, tmp_path: Path) -> Callable[..., Path]:
    """Write the rubric of a judge at the server."""

    def write(**values: Any) -> Path:
        file = tmp_path / "style.yaml"
        file.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}/v1", **VALUES, **values}))
        return file

    return write


def judged(reward: Path | str, responses: str, tmp_path: Path, **given: Any) -> Scores:
    """Score one-letter responses to one row."""
    options = TrainOptions(model=Path("m"), prompts=Path("p"), reward=f"judge:{reward}", out=tmp_path / "run", **given)
    items = [("two?", Response(letter), {"text": "two?", "answer": "b"}) for letter in responses]
    with closing(Rewards(options)) as rewards:
        return rewards.score(items, [f"p.jsonl, line {number}" for number in range(1, 1 + len(items))])


def test_rubrics_are_rewards_by_name(rubric: Callable[..., Path]) -> None:
    rewards = parse_rewards(f"judge:{rubric()}@0.5,judges:judge,tone=judge:a/b.toml")
    assert rewards[0] == NamedReward("style", "", "", 0.5, None, rubric())
    assert [(reward.name, reward.module) for reward in rewards[1:]] == [("judge", "judges"), ("tone", "")]


def test_a_text_is_judged_once_also_after_a_resume(
    server: Server, rubric: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key, the messages and the limits of a request; equal responses share a judgement, and its costs show that."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answer = lambda request: f"It has {request['messages'][1]['content'].count('b')}: Score: 1 no, Score: 9"
    file = rubric(system="Be strict with {{ row.text }}", key="JUDGE_KEY")
    first = judged(file, "bab", tmp_path)
    assert first.total == first.each["style"] == [0.9, 0.9, 0.9]
    assert (first.costs["judge_calls"], first.costs["judge_tokens"], first.costs["judge_cached"]) == (2, 20, 1)
    assert first.costs["judge_seconds"] > 0
    messages = [
        {"role": "system", "content": "Be strict with two?"},
        {"role": "user", "content": "Q: two? A: b Right: b"},
    ]
    assert {"model": "judge", "messages": messages, "max_tokens": 1024, "temperature": 0} in server.requests
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}

    records = (tmp_path / "run" / JUDGEMENTS).read_text()
    (tmp_path / "run" / JUDGEMENTS).write_text(records + '{"request": "cut sho')
    again = judged(file, "bac", tmp_path)
    assert (again.total, again.costs["judge_calls"], again.costs["judge_cached"]) == ([0.9] * 3, 1, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / JUDGEMENTS).read_text().splitlines()]
    assert Counter(line["reply"] for line in lines) == {
        "It has 2: Score: 1 no, Score: 9": 1,
        "It has 1: Score: 1 no, Score: 9": 2,
    }
    assert judged(rubric(system="Be strict with {{ row.text }}", range=[0, 100]), "b", tmp_path).total == [0.09], (
        "another rubric has judgements of its own"
    )
    elsewhere = rubric(system="Be strict with {{ row.text }}", url=f"http://localhost:{server.server_port}/v1")
    assert judged(elsewhere, "b", tmp_path).costs["judge_calls"] == 1, "so has another server"
    (tmp_path / "run" / JUDGEMENTS).write_text("{}\n")
    with pytest.raises(ValueError, match=r"judgements.jsonl, line 1: not a judgement; remove the line"):
        judged(file, "b", tmp_path)


def test_the_costs_of_the_batches_of_a_step_add_up() -> None:
    parts = [Scored(torch.ones(1), {"style": torch.ones(1)}, 1, costs={"judge_calls": calls}) for calls in (2.0, 3.0)]
    step = Scored.concatenate(parts)
    assert (step.scores.tolist(), step.errors, step.costs) == ([1, 1], 2, {"judge_calls": 5})


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("no idea", r"got a reply without a score \(score=.*\): 'no idea'"),
        (None, r"got a reply without a score .*, perhaps since all tokens went into thoughts: ''"),
        ("Score: good", "got the score 'good', which is neither a number nor one of the rubric's values"),
        ("Score: nan", "got the score 'nan', which is neither"),
        ("Score: 11", "got the score 11, which is outside of the rubric's range 0 to 10"),
    ],
)
def test_a_reply_without_a_score_is_counted(
    server: Server, rubric: Callable[..., Path], tmp_path: Path, reply: str | None, error: str
) -> None:
    """Its response has a failed reward, also when the judgement is an earlier one; the others keep theirs."""
    message = {"choices": [{"message": {"content": reply}}]}
    server.answer = lambda request: message if "A: x" in request["messages"][0]["content"] else "Score: 5"
    for _ in range(2):
        scores = judged(rubric(), "bxx", tmp_path, **{"rewards.errors": "zero"})
        assert (scores.total, scores.errors, scores.costs["judge_unreadable"]) == ([0.5, 0, 0], 2, 2)
    with pytest.raises(ValueError, match=rf"p.jsonl, line 2: the reward style {error}"):
        judged(rubric(), "bx", tmp_path)


def test_words_are_scores(server: Server, rubric: Callable[..., Path], tmp_path: Path) -> None:
    server.answer = lambda request: "Verdict: wrong" if "A: x" in request["messages"][0]["content"] else "Verdict: 3"
    file = rubric(score=r"Verdict: (\w+)", range=None, values={"wrong": -1})
    assert judged(file, "bx", tmp_path).total == [3, -1]


def test_requests_that_fail_are_repeated(
    server: Server, rubric: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy servers and lost connections; a refusal is final, and so is the end of the attempts or of the time."""
    monkeypatch.setattr(judge, "_PAUSE", 0.02)
    answers = iter([429, 503, None, "Score: 10"])
    server.answer = lambda request: next(answers)
    scores = judged(rubric(), "b", tmp_path)
    assert (scores.total, scores.costs["judge_calls"]) == ([1], 4)
    assert server.times[3] - server.times[2] > 0.08 > server.times[1] - server.times[0] > 0.02
    for number, (status, calls) in enumerate({400: 1, 500: 2}.items()):
        server.requests.clear()
        server.answer = lambda request, status=status: status
        with pytest.raises(ValueError, match=rf"the reward style was not judged: .*{status}: busy \(attempt {calls}\)"):
            judged(rubric(attempts=2), "xy"[number], tmp_path)
        assert len(server.requests) == calls
    server.answer = lambda request: {"choices": []}
    with pytest.raises(
        ValueError, match=r"the answer has no choices\[0\].message.content \(IndexError.*\): {\"choices\""
    ):
        judged(rubric(), "z", tmp_path)
    server.answer = lambda request: time.sleep(2)
    with pytest.raises(ValueError, match=r"has not answered within 0.1 s"):
        judged(rubric(), "t", tmp_path, **{"rewards.timeout": 0.1})


def test_all_attempts_of_a_judgement_end_within_the_limit(
    server: Server, rubric: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "_PAUSE", 0.01)
    waits = iter([0.6, 2.0])
    server.answer = lambda request: time.sleep(next(waits)) or 500
    with pytest.raises(ValueError, match=r"has not answered within 0.7 s \(attempt 2\)"):
        judged(rubric(), "t", tmp_path, **{"rewards.timeout": 0.7})
    assert time.monotonic() - server.times[0] < 1.1


def test_a_run_that_stops_ends_its_requests(server: Server, rubric: Callable[..., Path], tmp_path: Path) -> None:
    end = threading.Event()
    server.answer = lambda request: "none" if "A: x" in request["messages"][0]["content"] else end.wait(20) and None
    with pytest.raises(ValueError, match="line 1: the reward style got a reply without a score"):
        judged(rubric(), "xyz", tmp_path)
    for thread in threading.enumerate():
        if thread.name.startswith("judge"):
            thread.join(2)
            assert not thread.is_alive()
    end.set()


def test_requests_at_a_time_have_a_limit(server: Server, rubric: Callable[..., Path], tmp_path: Path) -> None:
    server.answer = lambda request: time.sleep(0.02) or "Score: 1"
    judged(rubric(concurrent=3), "abcdefghi", tmp_path)
    assert server.most == 3


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"modle": "x"}, "modle: Extra inputs are not permitted"),
        ({"url": "127.0.0.1:8000"}, "url: .*must be the base URL of a server"),
        ({"url": "reference"}, "url: .*'reference' must be .*; for a model of the run leave url out"),
        ({"prompt": "{{ response"}, "prompt: .*must be a template of Jinja: unexpected end of template.*, line 1"),
        ({"score": "Score: .*"}, "score: .*must have one group, the score, and has 0"),
        ({"score": "("}, "score: .*must be a regular expression: missing"),
        ({"request": {"temperature": 1}}, "request: .*must bound the tokens of a reply; add max_tokens"),
        ({"range": [1]}, "range: List should have at least 2 items"),
        ({"url": "http://a:99999/v1"}, "url: Port out of range"),
        ({"range": [5, 5]}, r"range: must be the lowest and the highest score, such as \[0, 10\], got \[5.0, 5.0\]"),
    ],
)
def test_mistakes_in_a_rubric_are_named(rubric: Callable[..., Path], values: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"style.yaml: {error}"):
        check_rewards(f"judge:{rubric(**values)}")


def test_a_request_holds_json(rubric: Callable[..., Path]) -> None:
    file = rubric(request={"max_tokens": 1, "when": "today"})
    file.write_text(file.read_text().replace('"today"', "2026-01-02"))
    with pytest.raises(ValueError, match=r"style.yaml: request.when: "):
        check_rewards(f"judge:{file}")


def test_the_rubric_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "rl-train.md").read_text()
    ((name, text),) = re.findall(r'^```toml title="([^"\n]*)"\n(.*?)^```', page, re.M | re.S)
    (tmp_path / name).write_text(text)
    rubric = Rubric.read(tmp_path / name)
    rubric.check({"answer": "4", "level": 3})
    assert rubric.outcome("Clear. Score: 10").reward == 1


def test_rows_that_a_rubric_cannot_read_are_found_before_the_run(rubric: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none.toml: .*No such file"):
        check_rewards(f"judge:{tmp_path / 'none.toml'}")
    rows = [("p.jsonl, line 1", {"answer": "b"}), ("p.jsonl, line 2", {})]
    with pytest.raises(
        ValueError, match="line 2: the reward style: the rubric's template raised UndefinedError: 'answer'"
    ):
        check_rows(f"judge:{rubric()}", rows)
    with pytest.raises(ValueError, match=r"judges read text, and the checkpoint has no tokenizer\.json"):
        Rubric.read(rubric()).body([1], [2], {})


@pytest.mark.slow
def test_a_model_learns_what_a_judge_rewards(
    model: Path, prompts: Path, server: Server, rubric: Callable[..., Path], tmp_path: Path
) -> None:
    """The judge counts the letters e of a response; a resumed run with another rubric is refused."""
    server.answer = lambda request: f"Score: {request['messages'][0]['content'].count('e')}"
    rubric(prompt="{{ response }}", range=[0, 8])
    command = ["train", "--model", model, "--prompts", prompts, "--reward", f"judge:{tmp_path / 'style.yaml'}"]
    command += ["--steps", 12, "--prompts-per-step", 8, "--samples", 8, "--max-new-tokens", 8, "--learning-rate", 0.01]
    command += ["--out", tmp_path / "run", "--device", "cpu", "--save-every", 6, "--json"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    print("judged:", [round(reward, 3) for reward in rewards])
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 1
    assert all(line["judge_calls"] + line["judge_cached"] == 64 for line in lines)
    rubric(prompt="{{ response }}!")
    result = CliRunner().invoke(app, [*map(str, command), "--steps", "13"])
    assert "holds a run with other inputs: reward=judge:" in result.output
