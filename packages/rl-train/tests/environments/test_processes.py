"""Environments in their processes: calls of tools, and environments that fail in every way."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rl_train.environments import Environment, worker
from rl_train.environments.pool import Environments
from rl_train.environments.tools import Call, calls_in
from rl_train.environments.worker import Request, Turn, plain_messages
from rl_train.options.options import TrainOptions
from rl_train.rewards import Response


def options(name: str, **given: Any) -> TrainOptions:
    values = {"model": Path("m"), "prompts": Path("p"), "environment": f"talks:{name}", "rewards.timeout": 0.3}
    return TrainOptions(**values | given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1])
        yield


@pytest.fixture(scope="module")
def counters(folder: None) -> Iterator[Environments]:
    with closing(Environments(options("Counter"))) as environments:
        yield environments


@pytest.fixture(scope="module")
def talks(folder: None) -> Iterator[Environments]:
    with closing(Environments(options("Talk"))) as environments:
        yield environments


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", 'so <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call></s>', [Call("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>[{"name": "g"}]', [Call("f"), Call("g")]),
        ("hermes", "the answer", []),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": {}}}<|eom_id|>', [Call("f", {"a": {}})]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]</s>', [Call("f"), Call("g")]),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": "</s>"}[TOOL_CALLS]g.h[ARGS]{}</s>',
            [Call("f", {"a": "</s>"}), Call("g.h")],
        ),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}</s>', [Call("f", {"a": 1})]),
        ("mistral", "[THINK][TOOL_CALLS]g[ARGS]{}[/THINK]so [TOOL_CALLS]f[ARGS]{}", [Call("f")]),
        ("llama", '{"name": "f"}; {"name": "g", "parameters": {"a": 1}}<|eom_id|>', [Call("f"), Call("g", {"a": 1})]),
        ("llama", '<think>{"name": "g"}</think>{"name": "f"}', [Call("f")]),
        ("llama", 'so {"name": "f"}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        ("hermes", '<think><tool_call>{"name": "g"}</tool_call></think><tool_call>{"name": "f"}', [Call("f")]),
        ("hermes", '<think>or <tool_call>{"name": "g"}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "<think>"}</tool_call><tool_call>{"name": "f"}', [Call("<think>"), Call("f")]),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', [Call("?")]),
    ],
)
def test_calls_are_read_in_the_formats_of_models(form: str, text: str, expected: list[Call]) -> None:
    assert calls_in(text, form) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "g"}</tool_call></think><tool_call>{"name": "f"}</tool_call>', [Call("f")]),
        ('I may <tool_call>{"name": "g"}</tool_call>', []),
    ],
)
def test_a_call_in_a_thought_that_the_template_began_is_none(text: str, expected: list[Call]) -> None:
    assert calls_in(text, "hermes", thinking=True) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": f}', "the call is not valid JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "the call is not valid JSON: NaN is no number of JSON"),
        ('{"name": "f", "arguments": {"a": -1e999}}', "the call is not valid JSON: -1e999 is no number of JSON"),
        ('{"name": "f", "arguments": "{\\"a\\": Infinity}"}', '"arguments" is a text that is not valid JSON: Infinity'),
        ('{"name": "f"} so', "the call is not valid JSON: there is more after it, ' so</tool_call>'"),
        ('{"name": "f", "arguments": "{a"}', '"arguments" is a text that is not valid JSON'),
        ("5", "a call must be an object"),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be an object, got list'),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, error: str) -> None:
    (call,) = calls_in(f"<tool_call>{text}</tool_call>", "hermes")
    assert call.error is not None
    assert error in call.error


def test_messages_are_a_text_or_messages_with_roles() -> None:
    assert plain_messages("a") == ([{"role": "user", "content": "a"}], None)
    for wrong in (5, {"role": "user"}, [{"content": "a"}]):
        assert "messages are a text or a list" in str(plain_messages(wrong)[1])
    assert "are not JSON" in str(plain_messages([{"role": "user", "content": {1}}])[1])


def test_a_parameter_of_a_tool_may_have_any_name() -> None:
    arguments = {"limit": 1, "function": 2, "file": 3, "self": 4}
    call = worker._Host(Environment)._call
    assert asyncio.run(call(20.0, lambda **given: given, **arguments)) == (arguments, None)


def said(environments: Environments, sample: int, *calls: str, last: bool = False) -> Turn:
    """Return the answer to a response with these calls."""
    raw = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return environments.ask(sample, "step", Response("", raw), last=last).result(20)


def test_tools_are_called_and_the_model_is_told_what_went_wrong(counters: Environments) -> None:
    assert [one["function"]["name"] for one in counters.schemas()] == ["count", "wait", "fail", "look", "panic", "half"]
    for sample in (1, 2):
        assert counters.ask(sample, "reset", {}).result(20) == Turn()
    count = '{"name": "count", "arguments": {"by": 2}}'
    assert said(counters, 1, count).messages == [{"role": "tool", "name": "count", "content": "2"}]
    # Each sample has an environment of its own.
    assert [one["content"] for one in said(counters, 2, count, count).messages] == ["2", "4"]
    wrong = ['{"name": "wait"}', '{"name": "fail"}', '{"name": "sum"}', '{"name": "count"}', "{"]
    turn = said(counters, 1, *wrong, '{"name": "look"}')
    assert turn.tool_errors == 5
    contents = [one["content"] for one in turn.messages]
    errors = ["took longer than .*0.3 s", r"raised OSError: broken \(talks.py", "there is no tool 'sum'; the tools are"]
    for content, error in zip(contents, [*errors, "missing a required argument: 'by'", "not valid JSON"], strict=False):
        assert content.startswith("error: ")
        assert re.search(error, content)
    assert json.loads(contents[-1]) == {"number": 2}
    panic, half = said(counters, 1, '{"name": "panic"}', '{"name": "half"}').messages
    assert panic["content"].startswith("error: raised Panic: index out of bounds (talks.py, line")
    assert half["content"].startswith("\ufffdaaa")
    assert half["content"].endswith("aaa... (2097153 characters)")
    assert len(half["content"]) < 2**20 + 50
    # The last response is scored, and no tool is called.
    assert said(counters, 1, count, last=True) == Turn(reward=2.0, cut=True)
    assert said(counters, 2) == Turn(reward=4.0)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"step": "raise"}, "raised KeyError: 'gone' (talks.py, line"),
        ({"step": "hang"}, "took longer than --rewards.timeout, 0.3 s in step"),
        ({"step": "number"}, "returned 5, which is no Step"),
        ({"step": "nan"}, "returned nan; it must be finite in fp32"),
        ({"step": "robot"}, "messages are a text or a list"),
        ({"step": "panic"}, "raised Panic: index out of bounds (talks.py, line"),
        ({"step": "cancelled"}, "raised CancelledError"),
        ({"step": "huge"}, "returned messages of 16777249 characters, and 16777216 are the most in step"),
        ({"turns": 1, "close": "raise"}, "raised OSError: still open"),
        ({"reset": "raise"}, "raised RuntimeError: no room"),
    ],
)
def test_an_environment_that_fails_says_how(talks: Environments, row: dict[str, Any], error: str) -> None:
    found = [talks.ask(1, "reset", row).result(20), talks.ask(1, "step", Response("")).result(20)]
    assert error in next(turn.error for turn in found if turn.error)


def test_a_conversation_that_ends_without_a_step_closes_its_environment(talks: Environments) -> None:
    talks.ask(1, "reset", {"turns": 9, "close": "raise"}).result(20)
    talks.ask(1, "step", Response("")).result(20)
    assert "raised OSError: still open" in str(talks.ask(1, "close").result(20).error)
    assert talks.ask(1, "step", Response("")).result(20).error == "was lost when its process ended"


def test_a_process_that_ends_is_replaced_and_its_environments_are_lost(talks: Environments) -> None:
    for sample, row in ((1, {"step": "end"}), (2, {})):
        talks.ask(sample, "reset", row).result(20)
    assert talks.ask(1, "step", Response("")).result(20).error == "ended its process (exit status 3)"
    assert talks.ask(2, "step", Response("")).result(20).error == "was lost when its process ended"
    talks.ask(3, "reset", {}).result(20)
    assert talks.ask(3, "step", Response("")).result(20).reward == 1


def test_halves_of_surrogate_pairs_are_replaced(talks: Environments) -> None:
    talks.ask(1, "reset", {"step": "surrogate"}).result(20)
    assert talks.ask(1, "step", Response("")).result(20).messages == [{"role": "user", "content": "a\ufffd"}]


def test_a_fork_that_comes_back_from_an_environment_leaves(talks: Environments) -> None:
    talks.ask(1, "reset", {"step": "fork", "turns": 9}).result(20)
    assert [talks.ask(1, "step", Response("")).result(20).reward for _ in range(3)] == [1, 1, 1]


def test_a_stopped_process_is_replaced(folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_train.environments.pool.BLOCKED_SECONDS", 1.5)
    with closing(Environments(options("Talk"))) as environments:
        environments.ask(1, "reset", {"step": "stop"}).result(20)
        error = environments.ask(1, "step", Response("")).result(20).error
        assert error == "gave no sign of life for 1.8 s: its process is stopped or blocked"
        assert environments.ask(2, "reset", {}).result(20) == Turn()


def test_a_step_that_does_not_end_when_it_is_cancelled_is_late(folder: None) -> None:
    with closing(Environments(options("Stubborn"))) as environments:
        environments.ask(1, "reset", {}).result(20)
        assert "took longer than --rewards.timeout" in str(environments.ask(1, "step", Response("")).result(20).error)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("NoEnvironment", "must be a subclass of rl_train.environments.Environment"),
        ("Nothing", "talks has no function Nothing"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(folder: None, name: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"environment talks:{name}: .*{error}"):
        Environments(options(name))


def test_the_process_answers_while_the_schemas_of_tools_import_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog ends a process whose event loop stands still for seconds, which this import may take."""
    imported = threading.Event()
    monkeypatch.setattr(worker, "_schemas", lambda made: Turn() if imported.wait(20) else Turn(error="alone"))

    async def both() -> Turn:
        host = worker._Host(Environment)
        schemas = asyncio.create_task(host.answer(Request(0, "schemas", 20.0)))
        await asyncio.sleep(0.1)
        await host.answer(Request(1, "reset", 20.0, {}))
        imported.set()
        return await schemas

    assert asyncio.run(both()).error is None


@pytest.mark.slow
def test_the_first_call_may_take_as_long_as_its_limit(folder: None) -> None:
    with closing(Environments(options("Blocks", **{"rewards.timeout": 30.0}))) as environments:
        assert environments.ask(0, "reset", {}).result(60).error is None


def test_a_tool_without_a_docstring_is_refused(folder: None) -> None:
    with (
        closing(Environments(options("NoSchema"))) as environments,
        pytest.raises(ValueError, match="environment talks:NoSchema: the tools need type hints and a docstring"),
    ):
        environments.schemas()
