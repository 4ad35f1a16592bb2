"""Conversations through the endpoint: in any dialect they have the template's ids, and the model's log-probs."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from rl_train.data.chat import plain
from rl_train.gateway.sessions import Session
from rl_train.trajectories.episodes import batch_of_episodes
from rl_train.trajectories.recorder import Recorder

from ..trajectories.test_recorder import ADD, STEPS, next_messages
from .endpoint import Endpoint, Record

SLOW = "--slow" in sys.argv
Message = dict[str, Any]


def chat(endpoint: Endpoint, messages: list[Message]) -> Message:
    """Return the answer of chat completions."""
    reply = endpoint.post("/v1/chat/completions", {"model": "policy", "messages": messages, "tools": [ADD]}).json()
    return {name: value for name, value in reply["choices"][0]["message"].items() if name != "refusal"}


def responses(endpoint: Endpoint, messages: list[Message]) -> Message:
    """Return the answer of responses, in the form of chat completions."""
    items = list[Message]()
    for message in messages:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    tool = {"type": "function", **ADD["function"]}
    reply = endpoint.post("/v1/responses", {"model": "policy", "input": items, "tools": [tool]}).json()
    texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
    calls = [
        (item["call_id"], item["name"], item["arguments"])
        for item in reply["output"]
        if item["type"] == "function_call"
    ]
    return answer("".join(texts) or None, calls)


def anthropic(endpoint: Endpoint, messages: list[Message]) -> Message:
    """Return the answer of Anthropic's messages, in the form of chat completions."""
    shown = list[Message]()
    for message in messages:
        if message["role"] == "tool":
            result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            shown.append({"role": "user", "content": [{"type": "tool_result", **result}]})
            continue
        blocks: list[Message] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            values = {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
            blocks.append({"type": "tool_use", **values})
        shown.append({"role": message["role"], "content": blocks})
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    values = {"model": "policy", "max_tokens": 200, "messages": shown, "tools": [tool]}
    reply = endpoint.post("/v1/messages", values).json()
    texts = [block["text"] for block in reply["content"] if block["type"] == "text"]
    calls = [
        (block["id"], block["name"], json.dumps(block["input"]))
        for block in reply["content"]
        if block["type"] == "tool_use"
    ]
    return answer("".join(texts) or None, calls)


def answer(text: str | None, calls: list[tuple[str, str, str]]) -> Message:
    tool_calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": tool_calls} if calls else {})}


DIALECTS = {"chat": chat, "responses": responses, "anthropic": anthropic}


@settings(
    max_examples=100 if SLOW else 5,
    derandomize=not SLOW,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failure is not made smaller: that takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, dialects=st.lists(st.sampled_from(sorted(DIALECTS)), min_size=8, max_size=8))
def test_conversations_in_any_dialect(policy: Endpoint, actor: Any, steps: list[Any], dialects: list[str]) -> None:
    """Every prompt has the template's ids; samples are those of a recorder that gets the same chats and draws."""
    codec = policy.codec
    policy.record = Record(codec, 2000)
    policy.session = policy.gateway.add(Session(policy.record, policy.session.sampling))
    reference = Recorder(policy.record.samples[0].prompt, codec, 2000)
    histories = list[list[Message]]()
    for (kind, number, text, said, calls, _), dialect in zip(steps, dialects, strict=False):
        messages = next_messages(SimpleNamespace(histories=histories), kind, number, text)  # type: ignore[arg-type]
        if messages[-1]["role"] == "tool":
            messages[-1]["tool_call_id"] = messages[-2]["tool_calls"][0]["id"]
        call_text = json.dumps({"name": "add", "arguments": {"a": said}}, ensure_ascii=False)
        text = f"{said if number % 2 else ''}<tool_call>{call_text}</tool_call>" if calls else said
        policy.script.say = lambda _, text=text: text  # type: ignore[misc]
        got = DIALECTS[dialect](policy, messages)
        recorded = policy.record.recorded[-1]
        assert plain(got) == plain(recorded.answer)
        assert recorded.tokens == codec.chat([plain(message) for message in messages], [ADD])
        reference.record(reference.chat(messages, [ADD]), recorded.part, got)
        histories.append([*messages, got])
    samples = policy.record.samples
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in reference.samples]
    assert [[part[:2] for part in sample.parts] for sample in samples] == [
        [part[:2] for part in sample.parts] for sample in reference.samples
    ]
    batch = batch_of_episodes([samples])
    assert int(batch.mask.sum()) == sum(len(call.part.tokens) for call in policy.record.recorded)
    expected = torch.where(batch.mask, actor.log_probs(batch).log_probs, 0)
    torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
