"""The endpoint in this process: its answers, its errors, its limits and its keys."""

from __future__ import annotations

import json
import math
import re
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from rl_train.data.codec import TextCodec
from rl_train.gateway import server
from rl_train.gateway.drawing import Sampler
from rl_train.gateway.sessions import Limits

from .endpoint import CALL, CONTEXT, QUESTION, TOOL, Endpoint, Script

CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages) or [QUESTION], **fields}


def chunks(reply: Any) -> list[Any]:
    """Return the chunks of a stream."""
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_chat_is_answered_and_recorded(tokenizer: TextCodec) -> None:
    endpoint = Endpoint(tokenizer, lambda prompt: "forty-two")
    reply = endpoint.post(CHAT, body(logprobs=True, n=2, return_token_ids=True)).json()
    ids = [*tokenizer.encode("forty-two"), tokenizer.vocabulary["<|im_end|>"]]
    prompt = tokenizer.chat([QUESTION], None)
    assert reply["object"] == "chat.completion"
    assert reply["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 2 * len(ids),
        "total_tokens": len(prompt) + 2 * len(ids),
    }
    for index, choice in enumerate(reply["choices"]):
        assert choice["index"] == index
        assert choice["message"] == {"role": "assistant", "content": "forty-two", "refusal": None}
        assert (choice["finish_reason"], choice["token_ids"]) == ("stop", ids)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-n / 8 for n in range(len(ids))]
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "forty-two<|im_end|>"
    for call in endpoint.record.recorded:
        assert (call.tokens, call.part.tokens, call.truncated) == (prompt, ids, False)
        assert call.part.fields["version"].tolist() == [3] * len(ids)
        assert call.answer == {"role": "assistant", "content": "forty-two"}
    first, second = (request for request, _ in endpoint.script.requests)
    assert first.seed != second.seed
    assert endpoint.session.calls == 1
    assert endpoint.session.tokens == 2 * len(ids)


def test_several_answers_are_in_order(tokenizer: TextCodec) -> None:
    """Also where the engine answers the first request last."""
    texts = iter("ab")

    class Late(Script):
        def submit(self, request: Any, sampling: Any) -> Any:
            future = super().submit(request, sampling)
            if len(self.requests) > 1:
                return future
            late: Future[Any] = Future()
            threading.Timer(0.05, late.set_result, [future.result()]).start()
            return late

    endpoint = Endpoint(tokenizer, lambda prompt: next(texts), script=Late)
    choices = endpoint.post(CHAT, body(n=2)).json()["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(0, "a"), (1, "b")]
    assert [call.answer["content"] for call in endpoint.record.recorded] == ["a", "b"]


def test_seeds(tokenizer: TextCodec) -> None:
    """A client's seed gives the same draws again; without one every call has another, equal in an equal session."""
    seeds = []
    for _ in range(2):
        endpoint = Endpoint(tokenizer, lambda prompt: "x")
        for fields in ({}, {}, {"seed": 5}, {"seed": 5}, {"seed": 6}):
            endpoint.post(CHAT, body(**fields))
        seeds.append([request.seed for request, _ in endpoint.script.requests])
    assert seeds[0] == seeds[1]
    assert seeds[0][2] == seeds[0][3]
    assert len(set(seeds[0])) == 4


def test_calls_of_tools(tokenizer: TextCodec) -> None:
    """A call is a tool call; its message, its result and a following question go on."""
    for stream in (False, True):
        endpoint = Endpoint(tokenizer, lambda prompt: CALL if "42<|im_end|>" not in prompt else "It is 42.")
        reply = endpoint.post(CHAT, body(tools=[TOOL], stream=stream))
        if stream:
            choice = chunks(reply)[-1]["choices"][0]
            (call,) = choice["delta"]["tool_calls"]
            assert call.pop("index") == 0
            message = {"role": "assistant", "content": choice["delta"]["content"], "tool_calls": [call]}
        else:
            choice = reply.json()["choices"][0]
            message = {name: value for name, value in choice["message"].items() if value is not None}
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "I ask."
        assert message["tool_calls"][0]["function"] == {"name": "multiply", "arguments": '{"a": 6}'}
        assert len(message["tool_calls"][0]["id"]) == 9  # Mistral's templates refuse others
        assert endpoint.record.recorded[-1].answer == message
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
        reply = endpoint.post(CHAT, body(QUESTION, message, result, tools=[TOOL])).json()
        assert reply["choices"][0]["message"]["content"] == "It is 42."
        # The drawn tokens, whose call has other spaces than the template's, stay as they are.
        first, second = endpoint.record.recorded[-2:]
        assert second.tokens[: len(first.tokens + first.part.tokens)] == first.tokens + first.part.tokens
        assert tokenizer.decode(second.tokens).endswith("\ntool\n42\nassistant\n")
        assert [len(sample.parts) for sample in endpoint.record.samples] == [2]


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", "no call"])
def test_text_that_is_no_call_stays_text(tokenizer: TextCodec, text: str) -> None:
    endpoint = Endpoint(tokenizer, lambda prompt: text)
    choice = endpoint.post(CHAT, body(tools=[TOOL])).json()["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": text, "refusal": None},
        "stop",
    )


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_streams(tokenizer: TextCodec, path: str) -> None:
    """The parts of a stream are those of the whole answer: text, log-probs, ids, and usage at the end."""
    text = "a long answer with an é, " * 5
    endpoint = Endpoint(tokenizer, lambda prompt: text)
    fields = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "return_token_ids": True}
    if path == CHAT:
        values = body(**fields, logprobs=True)
    else:
        prompt = "<|im_start|>assistant\n"
        values = {"model": "policy", "prompt": prompt, "max_tokens": 150, "logprobs": 0, **fields}
    parts = chunks(endpoint.post(path, values))
    ids = [*tokenizer.encode(text), tokenizer.vocabulary["<|im_end|>"]]
    assert parts[-1]["usage"]["completion_tokens"] == 2 * len(ids)
    for index in range(2):
        entries = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == index]
        assert len(entries) > 2
        texts = [entry["delta"].get("content", "") if path == CHAT else entry["text"] for entry in entries]
        assert "".join(texts) == text
        assert [token for entry in entries for token in entry["token_ids"]] == ids
        names = (lambda p: [t["logprob"] for t in p["content"]]) if path == CHAT else lambda p: p["token_logprobs"]
        assert [value for entry in entries for value in names(entry["logprobs"])] == [-n / 8 for n in range(len(ids))]
        assert [entry["finish_reason"] for entry in entries] == [None] * (len(entries) - 1) + ["stop"]
    assert [call.part.tokens for call in endpoint.record.recorded] == [ids, ids]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts(tokenizer: TextCodec, stream: bool) -> None:
    """The text ends before a stop text, the tokens with the token that completes it; no part of it is streamed."""
    # The first part of a stream, 32 tokens, ends within the stop text.
    text = "Obs " + "0123456789" * 2 + "012345" + "Observation: 5, and more text than a part has"
    endpoint = Endpoint(tokenizer, lambda prompt: text)
    reply = endpoint.post(CHAT, body(stop=["Observation:", "never"], stream=stream))
    before = text[: text.index("Observation:")]
    if stream:
        parts = chunks(reply)
        answer = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        answer, finish = (reply.json()["choices"][0][name] for name in ("message", "finish_reason"))
        assert (answer["content"], finish) == (before, "stop")
        answer = answer["content"]
    assert answer == before
    assert endpoint.record.recorded[0].part.tokens == tokenizer.encode(before + "Observation:")
    assert len(endpoint.record.recorded[0].part.fields["log_probs"]) == len(before + "Observation:")


def test_lengths(tokenizer: TextCodec) -> None:
    """A response ends at the client's limit, at the run's, and where the context ends."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x" * 999)
    prompt = len(tokenizer.chat([QUESTION], None))
    long = {"role": "user", "content": "y" * 300}
    room = CONTEXT - prompt - 296
    for fields, length in (({"max_tokens": 5}, 5), ({"max_completion_tokens": 7}, 7), ({}, 200)):
        choice = endpoint.post(CHAT, body(**fields)).json()["choices"][0]
        assert (len(choice["message"]["content"]), choice["finish_reason"]) == (length, "length")
    assert len(endpoint.post(CHAT, body(long)).json()["choices"][0]["message"]["content"]) == room
    assert all(call.truncated for call in endpoint.record.recorded)


def test_ids_in_and_out(tokenizer: TextCodec) -> None:
    """vLLM's dialect of ids, with the key in the header of verifiers' TrainClient; masks where the run keeps them."""
    endpoint = Endpoint(tokenizer, lambda prompt: "abc")
    prompt = tokenizer.chat([QUESTION], None)
    values = {"token_ids": prompt, "sampling_params": {"max_tokens": 8, "logprobs": 1, "temperature": 0.5}}
    reply = endpoint.post(IDS, values)
    ids = [*tokenizer.encode("abc"), tokenizer.vocabulary["<|im_end|>"]]
    (choice,) = reply.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
    assert "x-overridden" not in reply.headers
    assert [(call.tokens, call.part.tokens) for call in endpoint.record.recorded] == [(prompt, ids)]
    assert "sampling_mask" not in choice
    endpoint.session.sampling = replace(endpoint.session.sampling, top_k=2, keep_sampling_mask=True)
    values["sampling_params"]["routed_experts_prompt_start"] = 3
    reply = endpoint.request(
        "POST", IDS, key="EMPTY", content=json.dumps(values), headers={"x-session-id": endpoint.session.key}
    )
    assert reply.json()["choices"][0]["sampling_mask"] == [[token, 0] for token in ids]
    (card,) = endpoint.request("GET", "/v1/models").json()["data"]
    assert (card["root"], card["max_model_len"]) == (str(tokenizer.file.parent), CONTEXT)


def test_sampling_options_are_the_runs(tokenizer: TextCodec) -> None:
    """The run's options draw; the answer and the session say which of the client's differ."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    reply = endpoint.post(CHAT, body(temperature=1, top_p=1.0, top_k=-1, min_p=0.1, frequency_penalty=0))
    assert reply.headers["x-overridden"] == "temperature,min_p"
    assert endpoint.session.overridden == {"temperature": 1, "min_p": 1}
    ((_, sampling),) = endpoint.script.requests
    assert (sampling.temperature, sampling.min_p) == (0.5, 0.0)
    reply = endpoint.post(CHAT, body(tools=[TOOL], tool_choice="required"))
    assert (reply.status_code, reply.headers["x-overridden"]) == (200, "tool_choice")


IMAGE = {"url": "file:///etc/passwd"}
REFUSED = {
    "messages": (body(model="policy") | {"messages": []}, 400, "messages"),
    "a bad role": (body({"role": "robot", "content": "x"}), 400, "messages"),
    "no content": (body({"role": "user"}), 400, "messages"),
    "an image": (body({"role": "user", "content": [{"type": "image_url", "image_url": IMAGE}]}), 400, "messages"),
    "a result without an id": (body(QUESTION, {"role": "tool", "content": "x"}), 400, "messages"),
    "arguments": (
        body(QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
        400,
        "messages",
    ),
    "an answer at the end": (body(QUESTION, {"role": "assistant", "content": "x"}), 400, "messages"),
    "a long prompt": (body({"role": "user", "content": "x" * CONTEXT}), 400, "messages"),
    "another model": (body() | {"model": "gpt-5"}, 404, "model"),
    "no model": ({"messages": [QUESTION]}, 400, "model"),
    "temperature NaN": (body(temperature=float("nan")), 400, "temperature"),
    "temperature below 0": (body(temperature=-1), 400, "temperature"),
    "temperature as text": (body(temperature="1"), 400, "temperature"),
    "n": (body(n=0), 400, "n"),
    "too large n": (body(n=10**9), 400, "n"),
    "max_tokens": (body(max_tokens=0), 400, "max_tokens"),
    "an empty stop": (body(stop=[""]), 400, "stop"),
    "a penalty": (body(frequency_penalty=0.5), 400, "frequency_penalty"),
    "a schema": (body(response_format={"type": "json_object"}), 400, "response_format"),
    "likely tokens": (body(logprobs=True, top_logprobs=5), 400, "top_logprobs"),
    "a forced tool": (body(tools=[TOOL], tool_choice={"type": "function"}), 400, "tool_choice"),
    "an unknown field": (body(wings=2), 400, "wings"),
    "other ends": (body(stop_token_ids=[5]), 400, "stop_token_ids"),
    "no end": (body(ignore_eos=True), 400, "stop_token_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_errors_in_openais_form(tokenizer: TextCodec, name: str) -> None:
    values, status, param = REFUSED[name]
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    reply = endpoint.post(CHAT, values)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert error["message"]
    assert error["type"]
    assert not endpoint.record.recorded
    assert endpoint.session.calls == 0


TOOL_RESULT = {"role": "user", "content": [{"type": "tool_result", "content": "x"}]}
ANSWER = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (CHAT, {"messages": [QUESTION]}, "model is missing"),
        (
            CHAT,
            body(tools=[{"type": "custom", "custom": {"name": "f"}}]),
            "'custom': {'name': 'f'}} is no function with",
        ),
        (CHAT, body(tools=[{"type": "function", "function": {"parameters": {}}}]), "is no function with a name; only"),
        (CHAT, body(tools=[{"function": "f"}]), "the tool {'function': 'f'} is no function with a name"),
        (CHAT, body(QUESTION, ANSWER), "the policy draws whole answers: remove it"),
        (CHAT, body(stop=5), "stop=5: Input should be a valid string; or Input should be a valid list"),
        (TEXT, {"model": "policy", "prompt": ["a", "b"]}, "prompt=['a', 'b']: Input should be a valid string; or"),
        (IDS, {"token_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n=0: Input should be greater"),
        ("/v1/messages", body(), "max_tokens is missing"),
        ("/v1/messages", body(TOOL_RESULT, system="s", max_tokens=5), "messages[0]: a result of a tool needs the id"),
        ("/v1/messages", body(thread={"type": "create"}, max_tokens=5), "is not offered here; give False, or leave"),
        ("/v1/messages", body(system=[{"type": "image"}], max_tokens=5), "system: a content of the type 'image'"),
        (
            "/v1/responses",
            {
                "model": "policy",
                "instructions": "s",
                "input": [QUESTION, {"type": "function_call_output", "output": "1"}],
            },
            "input[1]: a result of a tool needs the id of its call",
        ),
    ],
)
def test_errors_name_the_place_in_the_request(
    tokenizer: TextCodec, path: str, values: dict[str, Any], message: str
) -> None:
    reply = Endpoint(tokenizer, lambda prompt: "x").post(path, values)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_fields_without_a_value(tokenizer: TextCodec) -> None:
    """Clients may send null for what they leave out, also for fields that the endpoint does not know."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    assert endpoint.post(CHAT, body(temperature=None, verbosity=None, ignore_eos=None, tools=None)).status_code == 200
    values = {"model": "policy", "input": "x", "reasoning": {"effort": None, "summary": None}}
    assert endpoint.post("/v1/responses", values).status_code == 200


def test_other_mistakes(tokenizer: TextCodec) -> None:
    endpoint = Endpoint(tokenizer, lambda prompt: "x", most_bytes=1000)
    vocabulary = len(tokenizer.vocabulary)
    for reply, status, code in (
        (endpoint.post(CHAT, b"{"), 400, "invalid_json"),
        (endpoint.post(CHAT, b"[]"), 400, None),
        (endpoint.post(CHAT, b"[" * 900), 400, "invalid_json"),
        (endpoint.post(CHAT, body({"role": "user", "content": "x" * 2000})), 413, "request_too_large"),
        (endpoint.post(CHAT, body(), key="sk-wrong"), 401, "invalid_api_key"),
        (endpoint.post(CHAT, body(), key=""), 401, "invalid_api_key"),
        (endpoint.post("/sessions/other" + CHAT, body()), 401, "invalid_api_key"),
        (endpoint.request("GET", "/v1/models", key="x"), 401, "invalid_api_key"),
        (endpoint.request("GET", CHAT), 405, None),
        (endpoint.post("/v1/embeddings", body()), 404, None),
        (endpoint.post(IDS, {"token_ids": [vocabulary], "sampling_params": {}}), 400, None),
        (endpoint.post(IDS, {"token_ids": [-1], "sampling_params": {}}), 400, "invalid_value"),
        (endpoint.post(IDS, {"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}), 400, "unsupported_value"),
        (endpoint.post(TEXT, {"model": "policy", "prompt": "x", "logprobs": 3}), 400, "invalid_value"),
        (endpoint.post(TEXT, {"model": "policy", "prompt": "x", "echo": True}), 400, "unsupported_value"),
        (endpoint.post("/v1/reward", {"reward": "high"}), 400, "invalid_value"),
        (endpoint.post("/v1/reward", {"reward": 4e38}), 400, "invalid_value"),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    assert not endpoint.script.requests


FUNCTION = TOOL["function"]
ONE_CALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    CHAT: (body(tools=[TOOL]), {"parallel_tool_calls": False}),
    "/v1/responses": (
        {"model": "policy", "input": [QUESTION], "tools": [{"type": "function", **FUNCTION}]},
        {"parallel_tool_calls": False},
    ),
    "/v1/messages": (
        body(max_tokens=200, tools=[{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]),
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
}


@pytest.mark.parametrize("path", ONE_CALL)
def test_a_client_that_takes_one_call_of_a_tool_gets_the_first(tokenizer: TextCodec, path: str) -> None:
    """The sample has all tokens as they were drawn, and the next request goes on with it."""
    endpoint = Endpoint(tokenizer, lambda prompt: CALL + CALL.replace("6", "7"))
    values, one_call = ONE_CALL[path]
    several, one = (endpoint.post(path, values | further).text for further in ({}, one_call))
    assert ["7}" in reply.replace("\\", "") for reply in (several, one)] == [True, False]
    assert ("parallel_tool_calls" in one) == (path == "/v1/responses") == ('"parallel_tool_calls":false' in one)
    all_shown, first_shown = endpoint.record.recorded
    assert len(all_shown.answer["tool_calls"]) == 2
    assert first_shown.part.tokens == all_shown.part.tokens
    (call,) = first_shown.answer["tool_calls"]
    assert call["function"]["arguments"] == '{"a": 6}'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    assert endpoint.record.chat([QUESTION, first_shown.answer, result], [TOOL]).parent is endpoint.record.calls[1]


def test_options_of_thoughts_are_refused_with_the_fix(tokenizer: TextCodec) -> None:
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    message = endpoint.post(CHAT, body(reasoning_effort="low")).json()["error"]["message"]
    assert message.startswith("reasoning_effort='low' is not offered here; leave it out: the chat template decides")


def test_tools_that_the_template_drops_are_refused(tmp_path: Path) -> None:
    from ..data.chat_families import NO_TOOLS, save_tokenizer

    save_tokenizer(tmp_path, NO_TOOLS)
    endpoint = Endpoint(TextCodec(tmp_path), lambda prompt: "x")
    reply = endpoint.post(CHAT, body(tools=[TOOL]))
    assert reply.status_code == 400
    assert "leaves out the name of the tool multiply" in reply.json()["error"]["message"]
    assert endpoint.post(CHAT, body(tools=[TOOL], tool_choice="none")).status_code == 200


def test_models_and_keys(tokenizer: TextCodec) -> None:
    """The key stands in the header or in the path, and reaches its session alone."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    assert [entry["id"] for entry in endpoint.request("GET", "/v1/models").json()["data"]] == ["policy"]
    path = f"/sessions/{endpoint.session.key}"
    assert endpoint.request("GET", path + "/v1/models/policy", key="").json()["max_model_len"] == CONTEXT
    assert endpoint.request("GET", "/v1/models/other").status_code == 404
    assert endpoint.post(path + CHAT, body(), key="").status_code == 200
    assert endpoint.post("/v1/reward", {"reward": 0.5}).json() == {"reward": 0.5}
    assert endpoint.session.reward == 0.5
    endpoint.gateway.end(endpoint.session)
    assert endpoint.post(CHAT, body()).status_code == 403


def test_an_ended_session_is_named(tokenizer: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its key is read, in the form of the dialect; the keys of the newest sessions are known."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    keys = [
        endpoint.session.key,
        *(endpoint.gateway.add(replace(endpoint.session, key=key)).key for key in ("second-key", "third-key")),
    ]
    monkeypatch.setattr(server, "_MOST_ENDED", 2)
    messages = body(max_tokens=5)
    bodies = {
        CHAT: body(),
        TEXT: {"model": "policy", "prompt": "x"},
        IDS: {"token_ids": [1], "sampling_params": {}},
        "/v1/responses": {"model": "policy", "input": "x"},
        "/v1/messages": messages,
        "/v1/messages/count_tokens": messages,
        "/v1/reward": {"reward": 1.0},
    }
    for session in list(endpoint.gateway._sessions.values()):
        endpoint.gateway.end(session)
    for key, status, text in ((keys[1], 403, "the episode has ended"), (keys[0], 401, "of no open session")):
        for path, values in bodies.items():
            for reply in (endpoint.post(path, values, key), endpoint.post(f"/sessions/{key}{path}", values, "")):
                assert (reply.status_code, text in reply.text) == (status, True), reply.text
                assert ("type" in reply.json()) == path.startswith("/v1/messages")
        reply = endpoint.request("GET", "/v1/models", key)
        assert (reply.status_code, text in reply.text) == (status, True)
    assert len(endpoint.gateway._ended) == 2
    assert not [key for key in keys if key in str(vars(endpoint.gateway))]
    assert endpoint.session.reward is None


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens", "/v1/reward"])
def test_a_session_that_ends_while_a_request_arrives(
    tokenizer: TextCodec, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    read = endpoint.gateway._body

    async def ends(request: Any) -> Any:
        endpoint.gateway.end(endpoint.session)
        return await read(request)

    monkeypatch.setattr(endpoint.gateway, "_body", ends)
    reply = endpoint.post(path, {"reward": 1.0} if path == "/v1/reward" else body(max_tokens=5, temperature=0.25))
    assert reply.status_code == 403
    assert (endpoint.session.reward, endpoint.session.overridden, endpoint.script.requests) == (None, {}, [])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_after_the_end_is_not_recorded(
    tokenizer: TextCodec, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It counts as a call that the end has ended: the client gets the error, and its tokens are not counted."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    end = Sampler._end

    def ends(*arguments: Any) -> None:
        end(*arguments)
        endpoint.gateway.end(endpoint.session)

    monkeypatch.setattr(Sampler, "_end", ends)
    reply = endpoint.post(CHAT, body(stream=stream))
    assert "the episode has ended" in reply.text
    assert reply.status_code == (200 if stream else 403)
    assert (endpoint.record.recorded, endpoint.session.tokens, endpoint.session.calls) == ([], 0, 1)


def test_the_end_of_a_session_waits_for_a_record(tokenizer: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread changes a session that `end` has returned."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    thread, record = threading.Thread(target=endpoint.gateway.end, args=[endpoint.session]), endpoint.record.record

    def ends_meanwhile(*arguments: Any, **options: Any) -> Any:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        return record(*arguments, **options)

    monkeypatch.setattr(endpoint.record, "record", ends_meanwhile)
    assert endpoint.post(CHAT, body()).status_code == 200
    thread.join(10)
    assert endpoint.session.ended
    assert len(endpoint.record.recorded) == 1


@pytest.mark.parametrize("log_prob", [math.nan, -math.inf])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_log_probs_that_are_not_finite(tokenizer: TextCodec, path: str, log_prob: float) -> None:
    """Nothing can be learned from them: the client gets an error, and the episode has failed."""

    class Broken(Script):
        def submit(self, request: Any, sampling: Any) -> Any:
            future = super().submit(request, sampling)
            future.result().log_probs[1] = log_prob
            return future

    for stream in (False, True):
        endpoint = Endpoint(tokenizer, lambda prompt: "x", script=Broken)
        reply = endpoint.post(path, body(stream=stream, max_tokens=5))
        assert f"with the log-prob {log_prob}, from which nothing can be learned" in reply.text
        assert stream or reply.status_code == 500
        assert f"with the log-prob {log_prob}," in endpoint.session.failed
        assert (endpoint.record.recorded, endpoint.session.tokens) == ([], 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_is_a_line_of_the_log(
    tokenizer: TextCodec, capsys: pytest.CaptureFixture[str], path: str, stream: bool
) -> None:
    """The client gets it, and the server has none to print; an error of the endpoint's own is not logged."""

    class Broken(Script):
        def submit(self, request: Any, sampling: Any) -> Any:
            raise RuntimeError("the engine\nis gone")

    endpoint = Endpoint(tokenizer, lambda prompt: "x", script=Broken)
    reply = endpoint.post(path, body(stream=stream, max_tokens=5))
    assert reply.status_code == (200 if stream else 500)
    assert r"RuntimeError: the engine\nis gone" in reply.text
    (line,) = capsys.readouterr().err.splitlines()
    kind = "chatcmpl" if path == CHAT else "msg"
    assert re.fullmatch(rf"the call {kind}\S+ failed by RuntimeError: the engine is gone", line)
    assert endpoint.post(path, body(max_tokens=0)).status_code == 400
    assert capsys.readouterr().err == ""


def test_answers_are_json_that_any_client_reads(tokenizer: TextCodec) -> None:
    """Also where the policy or the client writes NaN, which Python reads as JSON."""
    call = '<tool_call>{"name": "multiply", "arguments": {"a": NaN}}</tool_call>'
    endpoint = Endpoint(tokenizer, lambda prompt: call)
    fields = {"max_tokens": 200, "tools": [{"name": "multiply", "input_schema": {}}]}
    assert endpoint.post("/v1/messages", body(**fields)).json()["content"] == [{"type": "text", "text": call}]
    tool = {"type": "function", "name": "multiply", "parameters": {"maximum": math.nan}}
    reply = endpoint.post("/v1/responses", {"model": "policy", "input": "x", "tools": [tool]})
    values = json.loads(reply.text, parse_constant=pytest.fail)
    assert values["tools"][0]["parameters"] == {"maximum": None}
    endpoint.script.say = lambda prompt: call.replace("NaN", r'"\ud800"')
    function = endpoint.post(CHAT, body(tools=[TOOL])).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"a": "\ud800"}


def test_a_path_that_is_not_served(tokenizer: TextCodec) -> None:
    """The error names the paths that are, and not the key."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x")
    for reply, status, named in (
        (endpoint.post(f"/sessions/{endpoint.session.key}/v1/embeddings", body()), 404, "POST '/v1/embeddings'"),
        (endpoint.request("GET", CHAT), 405, "GET '/v1/chat/completions'"),
        (endpoint.request("GET", "/v1/messages/batches"), 404, "GET '/v1/messages/batches'"),
    ):
        assert ("type" in reply.json()) == ("batches" in named)
        message = reply.json()["error"]["message"]
        assert (reply.status_code, message.startswith(f"{named} is not served; give one of POST {CHAT}")) == (
            status,
            True,
        )
        assert "GET /v1/models" in message
        assert endpoint.session.key not in message


def test_limits_of_an_episode(tokenizer: TextCodec) -> None:
    """The last response has the tokens that are left; then calls are refused, and clients do not repeat them."""
    endpoint = Endpoint(tokenizer, lambda prompt: "x" * 50, Limits(calls=3, tokens=70))
    replies = [endpoint.post(CHAT, body()) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 400]
    assert [len(call.part.tokens) for call in endpoint.record.recorded] == [51, 19]
    assert replies[2].json()["error"]["code"] == "episode_tokens"
    assert (endpoint.session.tokens, endpoint.session.limited) == (70, "tokens")
    endpoint = Endpoint(tokenizer, lambda prompt: "x", Limits(calls=1))
    replies = [endpoint.post(CHAT, body()) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 400]
    assert replies[1].json()["error"]["code"] == "episode_calls"
    endpoint = Endpoint(tokenizer, lambda prompt: "x", Limits(tokens=7))
    assert endpoint.post(CHAT, body(n=8, stream=True)).json()["error"]["code"] == "episode_tokens"
