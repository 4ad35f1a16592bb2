"""Anthropic's `/v1/messages`, with Anthropic's own client on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from .endpoint import CALL, QUESTION, TOOL, Endpoint


def anthropic() -> Any:
    """Return the package, which takes a second or two to import."""
    return pytest.importorskip("anthropic", reason="pip install anthropic")


FUNCTION = {"name": "multiply", "input_schema": TOOL["function"]["parameters"]}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Any]:
    with anthropic().Anthropic(base_url=endpoint.gateway.url, api_key=endpoint.session.key) as client:
        yield client


def answer(client: Any, *, stream: bool = False, **fields: Any) -> Any:
    """Return the answer to a request, also from the events of a stream."""
    values = {"model": "policy", "max_tokens": 200, **fields}
    if not stream:
        return client.messages.create(**values)
    with client.messages.stream(**values) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_and_its_result(endpoint: Endpoint, client: Any, stream: bool) -> None:
    """The blocks of the answer go back as they came; the ids are those of chat completions."""
    fields: dict[str, Any] = {"system": "Be brief.", "tools": [FUNCTION], "stream": stream}
    first = answer(client, messages=[QUESTION], **fields)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == ("I ask.", "multiply", {"a": 6}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
    history = [QUESTION, {"role": "assistant", "content": first.content}]
    second = answer(client, messages=[*history, {"role": "user", "content": [result]}], **fields)
    assert (second.content[0].text, second.stop_reason) == ("It is 42.", "end_turn")
    calls = endpoint.record.recorded
    assert calls[0].tokens == endpoint.codec.chat([SYSTEM, QUESTION], [TOOL])
    assert calls[1].tokens[: len(calls[0].tokens + calls[0].part.tokens)] == calls[0].tokens + calls[0].part.tokens
    assert second.usage.input_tokens == len(calls[1].tokens)
    assert second.usage.output_tokens == len(calls[1].part.tokens)
    chat = [SYSTEM, QUESTION, calls[0].answer, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    endpoint.post("/v1/chat/completions", {"model": "policy", "messages": chat, "tools": [TOOL]})
    assert calls[2].tokens == calls[1].tokens
    blocks = [result, {"type": "text", "text": "And 43?"}]
    answer(client, messages=[*history, {"role": "user", "content": blocks}], **fields)
    chat.append({"role": "user", "content": "And 43?"})
    endpoint.post("/v1/chat/completions", {"model": "policy", "messages": chat, "tools": [TOOL]})
    assert calls[4].tokens == calls[3].tokens


@pytest.mark.parametrize("stream", [False, True])
def test_ends(endpoint: Endpoint, client: Any, stream: bool) -> None:
    endpoint.script.say = lambda prompt: "a long answer with an é, " * 5
    whole = answer(client, messages=[QUESTION], stream=stream)
    assert (whole.content[0].text, whole.stop_reason) == ("a long answer with an é, " * 5, "end_turn")
    cut = answer(client, messages=[QUESTION], stream=stream, max_tokens=40)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 40)
    assert whole.content[0].text.startswith(cut.content[0].text)
    ended = answer(client, messages=[QUESTION], stream=stream, stop_sequences=["never", "an é"])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "an é")
    assert ended.content[0].text == "a long answer with "


def test_texts_stream_in_parts(endpoint: Endpoint, client: Any) -> None:
    endpoint.script.say = lambda prompt: "a long answer with an é, " * 5
    with client.messages.stream(model="policy", max_tokens=200, messages=[QUESTION]) as events:
        kinds = [event.type for event in events]
        assert events.get_final_text() == "a long answer with an é, " * 5
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert kinds.count("text") > 2


def test_a_key_of_anthropics_header(endpoint: Endpoint) -> None:
    """Older clients send no bearer token."""
    values = {"model": "policy", "max_tokens": 20, "messages": [QUESTION]}
    reply = endpoint.post("/v1/messages", values, key="", headers={"x-api-key": endpoint.session.key})
    assert reply.json()["content"] == [{"type": "text", "text": CALL[:20]}]


def test_tokens_are_counted_and_not_drawn(endpoint: Endpoint, client: Any) -> None:
    """The count is that of the next call, with the ids as drawn; a prompt that is too long is counted, too."""
    endpoint.script.say = lambda prompt: CALL.replace(", ", ",  ") if "42<|im_end|>" not in prompt else "It is 42."
    fields: dict[str, Any] = {"model": "policy", "system": "Be brief.", "tools": [FUNCTION]}
    first = answer(client, messages=[QUESTION], **fields)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "42"}
    history = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    drawn = dict(endpoint.session._drawn)
    count = client.messages.count_tokens(messages=history, **fields).input_tokens
    long = client.messages.count_tokens(messages=[{"role": "user", "content": "x" * 2000}], model="policy")
    assert long.input_tokens > 2000
    assert (endpoint.session.calls, endpoint.session._drawn, len(endpoint.script.requests)) == (1, drawn, 1)
    second = answer(client, messages=history, **fields)
    assert count == second.usage.input_tokens == len(endpoint.record.recorded[1].tokens)
    with pytest.raises(anthropic().BadRequestError, match="the role 'robot'"):
        client.messages.count_tokens(messages=[{"role": "robot", "content": "x"}], model="policy")


def test_mistakes_are_errors_in_anthropics_form(endpoint: Endpoint, client: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
    texts_first = [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "a", "content": "x"}]
    for fields, error in (
        ({"messages": [QUESTION], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice='tool' is not offered"),
        ({"messages": [QUESTION], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of the client"),
        ({"messages": [{"role": "user", "content": [image]}]}, "a content of the type 'image' is not offered"),
        ({"messages": [{"role": "user", "content": texts_first}]}, "results of tools come before texts"),
        ({"messages": [{"role": "user", "content": [3]}]}, "must be a text or a list of blocks"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "the role 'robot' must be user or assistant"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "x"}]}, "the last message is of the role"),
        ({"messages": [QUESTION], "thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking=.* not offered"),
        ({"messages": [QUESTION], "extra_body": {"wings": 2}}, "wings is no field"),
    ):
        with pytest.raises(anthropic().BadRequestError, match=error) as raised:
            answer(client, **fields)
        assert raised.value.body["type"] == "error"
        assert raised.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic().NotFoundError, match="there is no model 'claude'"):
        client.messages.create(model="claude", max_tokens=5, messages=[QUESTION])
    with pytest.raises(anthropic().AuthenticationError, match="no open session") as wrong:
        answer(anthropic().Anthropic(base_url=endpoint.gateway.url, api_key="none"), messages=[QUESTION])
    assert wrong.value.body["error"]["type"] == "authentication_error"
    assert not endpoint.record.recorded

    def fail(prompt: str) -> str:
        raise RuntimeError("the engine is gone")

    endpoint.script.say = fail
    with pytest.raises(anthropic().APIError, match="the engine is gone"):
        answer(client, messages=[QUESTION], stream=True)
