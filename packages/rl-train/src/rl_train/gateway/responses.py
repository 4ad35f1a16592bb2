"""OpenAI's `/v1/responses`: items in place of messages, and events with the items of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rl_train.gateway.bodies import ResponsesBody, read
from rl_train.gateway.chat import ItemDialect
from rl_train.gateway.drawing import Choice
from rl_train.gateway.errors import ApiError, unsupported
from rl_train.gateway.messages import PlacedMessage

# The events of an item's text, by the type of the item.
_KINDS = {"message": "output_text", "function_call": "function_call_arguments"}
# The part of an item with a text, and the fields of a response, at the beginning.
_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_FIXED: dict[str, Any] = {"object": "response", "error": None, "incomplete_details": None}
_FIXED |= {"text": {"format": {"type": "text"}}, "truncation": "disabled", "metadata": {}, "usage": None}
_DETAILS = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
_DETAILS |= {"output_tokens_details": {"reasoning_tokens": 0}}


class Responses(ItemDialect):
    """`/v1/responses`; a session keeps its responses for `previous_response_id`."""

    kind = "resp"
    field = "input"

    def _read(self, values: Any) -> None:
        self._body = body = read(ResponsesBody, values)
        self._take(body)
        self.limit, self._numbers = body.max_output_tokens or body.max_tokens, itertools.count()
        self.wants_log_probs = "message.output_text.logprobs" in (body.include or ())
        previous = body.previous_response_id
        if previous is not None and previous not in self.session.conversations:
            raise ApiError(
                400,
                f"previous_response_id={previous!r:.100} is no response of this session; give the id of one, or all "
                "items in input",
                "previous_response_id",
                "previous_response_not_found",
            )
        system = {"role": "system", "content": body.instructions}
        instructions = [] if body.instructions is None else [("instructions", system)]
        items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        earlier = [("previous_response_id", message) for message in self.session.conversations.get(previous, ())]
        history = [*earlier, *_messages(items)]
        tools = [_tool(tool) for tool in body.tools or ()]
        self._take_chat([*instructions, *history], tools, body.tool_choice, body.parallel_tool_calls)
        self._history = self.messages[len(instructions) :]

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        (choice,) = choices
        self.session.conversations[self.id] = [*self._history, self.message(choice)]
        usage = self._usage(choices)
        values = {
            "output": list(self.items(choice)),
            "usage": usage | {"total_tokens": sum(usage.values()), **_DETAILS},
        }
        if choice.finish == "length":
            return self._response("incomplete") | values | {"incomplete_details": {"reason": "max_output_tokens"}}
        return self._response("completed") | values

    def begin(self) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return [self._event(kind, response=self._response("in_progress")) for kind in ("created", "in_progress")]

    def end(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """See `Dialect`."""
        response = self.reply(choices)
        return [self._event(response["status"], response=response)]

    def late_error(self, error: ApiError) -> dict[str, Any]:
        """See `Dialect`."""
        return self._event("error", code=error.code, message=str(error), param=error.param) | {"type": "error"}

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self._body, self.session.sampling
        fields = {"model", "instructions", "max_output_tokens", "previous_response_id", "parallel_tool_calls"}
        values = body.model_dump(include=fields)
        values |= {"id": self.id, "created_at": self.created, "status": status, "output": []}
        tools = {"tool_choice": body.tool_choice or "auto", "tools": body.tools or []}
        return _FIXED | values | tools | {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def _text_item(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        log_probs = self._token_entries(choice, begin) if self.wants_log_probs else []
        part = _TEXT | {"text": text, "logprobs": log_probs}
        item = {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "status": "completed"}
        return item | {"content": [part]}

    def _call_item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        return item | call["function"]

    def _opened(self, number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        events = [self._event("output_item.added", output_index=number, item=item | empty | {"status": "in_progress"})]
        if item["type"] == "message":
            events.append(self._event("content_part.added", **_place(number, item), part=_TEXT))
        return events

    def _filled(self, number: int, item: dict[str, Any]) -> dict[str, Any]:
        name = _KINDS[item["type"]]
        contents = _contents(item)
        text = contents.pop(name.rpartition("_")[2])
        return self._event(f"{name}.delta", **_place(number, item), delta=text, **contents)

    def _closed(self, number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        place = _place(number, item)
        events = [self._event(f"{_KINDS[item['type']]}.done", **place, **_contents(item))]
        if item["type"] == "message":
            events.append(self._event("content_part.done", **place, part=item["content"][0]))
        return [*events, self._event("output_item.done", output_index=number, item=item)]

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **values}


def _place(number: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the place of an item's text among all items."""
    part = {"content_index": 0} if item["type"] == "message" else {}
    return {"item_id": item["id"], "output_index": number, **part}


def _contents(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of an item, and its log-probs."""
    if item["type"] == "function_call":
        return {"arguments": item["arguments"]}
    (part,) = item["content"]
    return {"text": part["text"], "logprobs": part["logprobs"]}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[PlacedMessage]:
    """Return items as messages of chat completions; calls become those of the answer before them."""
    messages = list[tuple[str, dict[str, Any]]]()
    for number, item in enumerate(items):
        place = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                messages.append((place, {"role": item.get("role"), "content": item.get("content")}))
            case "function_call":
                if not messages or messages[-1][1]["role"] != "assistant":
                    messages.append((place, {"role": "assistant", "content": None}))
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1][1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
                messages.append((place, {"role": "tool", **result}))
            case kind:
                raise unsupported(
                    "input",
                    f"{place}: an item of the type {kind!r:.50} is not offered; give messages, function_call and "
                    "function_call_output",
                )
    return [*messages]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the form of chat completions."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise unsupported("tools", f"the tool {tool!r:.100} is no function with a name; only functions are offered")
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}
