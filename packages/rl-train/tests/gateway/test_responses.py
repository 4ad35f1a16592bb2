"""`/v1/responses`, with OpenAI's own client on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from .endpoint import QUESTION, TOOL, Endpoint


def openai() -> Any:
    """Return the package, which takes a second or two to import."""
    return pytest.importorskip("openai", reason="pip install openai")


FUNCTION = {"type": "function", **TOOL["function"]}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def create(endpoint: Endpoint) -> Iterator[Any]:
    with openai().OpenAI(base_url=endpoint.gateway.base_url(endpoint.session), api_key="none") as client:
        yield lambda **fields: client.responses.create(model="policy", **fields)


def asked(response: Any) -> Any:
    """Return the call of a tool in a response."""
    (call,) = (item for item in response.output if item.type == "function_call")
    assert (call.name, call.arguments) == ("multiply", '{"a": 6}')
    return call


def completed(stream: Any) -> tuple[Any, list[str]]:
    """Return the response at the end of a stream, whose parts are the response's, and the kinds of the events."""
    texts, arguments, kinds, done, log_probs = dict[str, str](), dict[str, str](), [], [], []
    for number, event in enumerate(stream):
        assert event.sequence_number == number
        kinds.append(event.type.removeprefix("response."))
        if kinds[-1] == "output_text.delta":
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            log_probs += [entry.logprob for entry in event.logprobs]
        if kinds[-1] == "function_call_arguments.delta":
            arguments[event.item_id] = event.delta
        if kinds[-1] == "output_item.added":
            assert event.item.status == "in_progress"
        if kinds[-1] == "content_part.added":
            assert event.part.text == ""
        if kinds[-1] == "output_item.done":
            done.append(event.item)
    assert done == event.response.output
    assert kinds.count("output_item.added") == len(done)
    for item in done:
        shown = item.content[0].text if item.type == "message" else item.arguments
        assert (texts if item.type == "message" else arguments)[item.id] == shown
        if item.type == "message":
            assert [entry.logprob for entry in item.content[0].logprobs] == log_probs
    return event.response, kinds


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_and_its_result(endpoint: Endpoint, create: Any, stream: bool) -> None:
    """The items go back as they came, or the id of the response; the ids are those of chat completions."""
    end = completed if stream else lambda response: (response, [])
    first, _ = end(create(input=[QUESTION], instructions="Be brief.", tools=[FUNCTION], stream=stream))
    assert [item.type for item in first.output] == ["message", "function_call"]
    assert (first.output_text, first.status, first.instructions) == ("I ask.", "completed", "Be brief.")
    result = {"type": "function_call_output", "call_id": asked(first).call_id, "output": "42"}
    fields: dict[str, Any] = {"instructions": "Be brief.", "tools": [FUNCTION], "stream": stream}
    whole, kinds = end(create(input=[QUESTION, *first.output, result], **fields))
    later, _ = end(create(input=[result], previous_response_id=first.id, **fields))
    assert whole.output_text == later.output_text == "It is 42."
    assert later.previous_response_id == first.id
    if stream:
        created = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
        assert kinds == [*created, "output_text.done", "content_part.done", "output_item.done", "completed"]
    calls = endpoint.record.recorded
    assert calls[1].tokens == calls[2].tokens
    assert calls[0].tokens == endpoint.codec.chat([SYSTEM, QUESTION], [TOOL])
    assert calls[1].tokens[: len(calls[0].tokens + calls[0].part.tokens)] == calls[0].tokens + calls[0].part.tokens
    assert later.usage.input_tokens == len(calls[2].tokens)
    assert later.usage.output_tokens == len(calls[2].part.tokens)
    chat = [SYSTEM, QUESTION, calls[0].answer, {"role": "tool", "tool_call_id": result["call_id"], "content": "42"}]
    endpoint.post("/v1/chat/completions", {"model": "policy", "messages": chat, "tools": [TOOL]})
    assert calls[3].tokens == calls[2].tokens


def test_texts_stream_in_parts(endpoint: Endpoint, create: Any) -> None:
    """Without tools the text comes while it is drawn; log-probs are those of the tokens; a limit ends the response."""
    endpoint.script.say = lambda prompt: "a long answer with an é, " * 5
    fields: dict[str, Any] = {"input": "Tell.", "include": ["message.output_text.logprobs"]}
    response, kinds = completed(create(**fields, stream=True))
    assert kinds.count("output_text.delta") > 2
    whole = create(**fields)
    assert whole.output_text == response.output_text == "a long answer with an é, " * 5
    tokens = endpoint.record.recorded[0].part.tokens
    for shown in (response, whole):
        log_probs = shown.output[0].content[0].logprobs
        assert [entry.logprob for entry in log_probs] == [-number / 8 for number in range(len(tokens))]
    for stream in (False, True):
        cut = create(input="Tell.", max_output_tokens=40, stream=stream)
        cut = completed(cut)[0] if stream else cut
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert cut.output_text == ("a long answer with an é, " * 2)[: len(cut.output_text)]


def test_mistakes(endpoint: Endpoint, create: Any) -> None:
    for fields, error in (
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id='resp_1' is no response of this"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: an item of the type 'item_reference' is no"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "'web_search'} is no function"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "x"}}, "tool_choice=.* is not offered; give auto"),
        ({"input": "x", "background": True}, "background=True is not offered here; give False"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type 'input_image' is not offered"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text=.* is not offered"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "the last message is of the role"),
    ):
        with pytest.raises(openai().BadRequestError, match=error) as raised:
            create(**fields)
        assert raised.value.param in fields
    assert not endpoint.record.recorded


def test_an_error_in_a_stream(endpoint: Endpoint, create: Any) -> None:
    def fail(prompt: str) -> str:
        raise RuntimeError("the engine is gone")

    endpoint.script.say = fail
    assert endpoint.post("/v1/responses", {"model": "policy", "input": "x"}).status_code == 500
    *events, error = create(input="x", stream=True)
    assert error.sequence_number == len(events)
    assert (error.type, error.message) == ("error", "RuntimeError: the engine is gone")
