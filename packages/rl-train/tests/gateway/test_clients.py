"""The endpoint on a socket, with OpenAI's own client."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from rl_train.data.codec import TextCodec

from .endpoint import QUESTION, TOOL, Endpoint


def openai() -> Any:
    """Return the package, which takes a second or two to import."""
    return pytest.importorskip("openai", reason="pip install openai")


def client_of(endpoint: Endpoint, **options: Any) -> Any:
    return openai().OpenAI(base_url=endpoint.gateway.base_url(endpoint.session), api_key="none", **options)


def test_openais_client_talks_with_tools(endpoint: Endpoint) -> None:
    """A loop of calls and results as users write it; the messages of the client go back as they came."""
    client = client_of(endpoint)
    messages: list[Any] = [QUESTION]
    for _ in range(4):
        message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
    assert message.content == "It is 42."
    assert len(endpoint.record.recorded) == 2
    stream = client.chat.completions.create(model="policy", messages=messages[:-1], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "It is 42."
    assert client.models.list().data[0].id == "policy"
    reply = client.completions.create(model="policy", prompt="42<|im_end|><|im_start|>assistant\n", max_tokens=6)
    assert reply.choices[0].text == "It is "


def test_openais_client_names_mistakes(endpoint: Endpoint) -> None:
    client = client_of(endpoint)
    with pytest.raises(openai().BadRequestError, match="frequency_penalty=2 is not offered here"):
        client.chat.completions.create(model="policy", messages=[QUESTION], frequency_penalty=2)
    with pytest.raises(openai().NotFoundError, match="there is no model 'gpt-5'"):
        client.chat.completions.create(model="gpt-5", messages=[QUESTION])
    wrong = openai().OpenAI(base_url=endpoint.gateway.url + "/v1", api_key="none")
    with pytest.raises(openai().AuthenticationError, match="no open session"):
        wrong.chat.completions.create(model="policy", messages=[QUESTION])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(endpoint: Endpoint, stream: bool) -> None:
    endpoint.script.answers = False
    client = client_of(endpoint, timeout=0.3, max_retries=0)
    with pytest.raises(openai().APITimeoutError):
        list(client.chat.completions.create(model="policy", messages=[QUESTION], stream=stream))
    client.close()
    _wait(lambda: endpoint.script.open[0].cancelled())
    assert not endpoint.record.recorded
    _wait(lambda: endpoint.session.tokens == 0)


def test_the_end_of_a_session_ends_its_requests(endpoint: Endpoint) -> None:
    endpoint.script.answers = False
    error: list[Any] = []

    def call() -> None:
        try:
            client_of(endpoint).chat.completions.create(model="policy", messages=[QUESTION])
        except openai().APIStatusError as raised:
            error.append(raised)

    thread = threading.Thread(target=call)
    thread.start()
    _wait(lambda: endpoint.script.open)
    endpoint.gateway.end(endpoint.session)
    thread.join(10)
    assert error[0].code == "episode_ended"
    assert endpoint.script.open[0].cancelled()


def test_a_call_has_a_time_limit(tokenizer: TextCodec, tmp_path: Path) -> None:
    endpoint = Endpoint(tokenizer, lambda prompt: "x", seconds=0.05)
    endpoint.script.answers = False
    reply = endpoint.post("/v1/chat/completions", {"model": "policy", "messages": [QUESTION]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline")
    assert endpoint.script.open[0].cancelled()


def _wait(happens: Any) -> None:
    deadline = time.monotonic() + 10
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happens()
