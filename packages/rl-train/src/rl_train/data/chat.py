"""`ChatTemplate`: render a chat by a model's template, and check that the template leaves nothing out.

Messages that a template refuses or leaves out are a ValueError, also in `TextCodec` and `ImageChat`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

Message = Mapping[str, Any]
# Stands for an answer of the model where a template is asked what follows answers.
_ANSWER = "THE-ANSWER-OF-THE-MODEL"
_QUESTION, _PLAIN = {"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}


class Following(NamedTuple):
    """The text that a template writes after an answer.

    Attributes:
        text: All text from the answer on, to the beginning of the next answer.
        head: The beginning of `text`, before the content of the next message.
        end: The beginning of `text` that ends the answer; empty where the next message begins at once.
        calls: Whether the answer was rendered as the call of a tool, which `text` completes first.
    """

    text: str
    head: str
    end: str
    calls: bool


class ChatTemplate:
    """The chat template of a model.

    Args:
        renderer: A tokenizer or a processor of transformers.
    """

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._complete: set[tuple[Any, ...]] = set()
        self._ends: dict[tuple[str, bool], str] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """Return the text of a chat and of the beginning of the answer."""
        self.check(messages, tools)
        return self._text(messages, tools)

    def answered(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """Return the text of a chat that ends with an answer; ValueError if a text of the answer is not shown."""
        text = self._text(messages, tools, answer=False)
        for name in ("content", "reasoning_content"):
            if str(messages[-1].get(name) or "").strip() not in text:
                raise ValueError(f'the chat template leaves out or changes the "{name}" of the last answer')
        return text

    def answers(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, since: int = 0
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a whole chat, and the begin and the end of each answer in it.

        An answer begins where the model begins to draw, behind the text that asks for it, and has all that the template
        writes for the message, through the end of the turn.

        Args:
            messages, tools: The chat; its messages of the role "assistant" are the answers.
            since: The number of leading messages whose answers are left out.
        """
        text = self._text(messages, tools, answer=False)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            asked, after = self._text(messages[:number], tools), self._text(messages[: number + 1], tools, answer=False)
            before = self._text(messages[:number], tools, answer=False) if number else ""
            begin, end = self._agreeing(asked, text), len(after)
            if begin < self._agreeing(before, asked):  # the template changes earlier messages
                begin = _behind(text, asked[self._agreeing(before, asked) :], spans[-1][1] if spans else 0)
            if not text.startswith(after):  # the last answer differs from answers before it
                content = str(message.get("content") or "").strip()
                content = content if text.find(content, begin) >= 0 and content in after else ""
                place, last = _behind(text, content, begin), after.rfind(content) + len(content)
                closing = after[last:][: self._agreeing(after[last:], text[place:])]
                end = _behind(text, closing or self._end_of(_PLAIN, tools), place)
            if not 0 <= begin < end:
                raise ValueError(f"the chat template does not show where answer {len(spans) + 1} begins and ends")
            spans.append((begin, end))
        return text, spans[sum(message.get("role") == "assistant" for message in messages[:since]) :]

    def _agreeing(self, first: str, second: str) -> int:
        """Return the length of the longest common beginning of two texts that cuts no token of the first."""
        length = len(_common(first, second))
        if length == len(first):
            return length
        offsets = self._renderer(first, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return min((begin for begin, end in offsets if begin < length < end), default=length)

    def check(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> None:
        """Raise ValueError for a chat that ends with an answer, or if the template leaves out a part of the chat.

        Many templates know no tools, or no results of tools, and skip them. So the check replaces the names of tools
        and the texts of messages by marks, and looks for the marks in the rendered text. It checks chats of the same
        roles once. The text of an answer that calls tools may be left out: templates drop the thoughts of answers.
        """
        if messages and messages[-1].get("role") == "assistant":
            raise ValueError(
                'the last message is of the role "assistant", and the model would answer its own answer; remove this '
                'message, or give the beginning of an answer in "text", rendered by the chat template'
            )
        roles_and_kinds = (tuple(map(_form, messages)), tuple("function" in tool for tool in tools or ()))
        if roles_and_kinds in self._complete:
            return
        self._text(messages, tools)  # the template's own error comes first
        marks: dict[str, str] = {}
        marked = [_marked(message, marks) for message in messages]
        marked_tools = [_renamed(tool, _mark(marks, f"the name of the tool {name_of(tool)}")) for tool in tools or ()]
        text = self._text(marked, marked_tools or None)
        if missing_texts := [description for mark, description in marks.items() if mark not in text]:
            raise ValueError(
                f"the chat template leaves out {', '.join(missing_texts[:4])}, so the model would never see it; take a "
                "model whose chat template shows it, write it into a message of the user, or give contents as parts, "
                'such as [{"type": "text", "text": "..."}]'
            )
        self._complete.add(roles_and_kinds)

    def following(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> Following:
        """Return the text that the template writes between an answer and the end of the following `messages`.

        Some templates show results of tools only after an answer with calls. For these the answer becomes a call.
        """
        try:
            return self._following(_PLAIN, messages, tools)
        except ValueError:
            if not any(message.get("role") == "tool" for message in messages):
                raise
            messages = [_with_id(message, number) for number, message in enumerate(messages)]
            calls = [_call(message) for message in messages if message.get("role") == "tool"]
            with suppress(ValueError):
                return self._following({"role": "assistant", "content": "", "tool_calls": calls}, messages, tools)
            raise

    def _following(self, answer: Message, messages: Sequence[Message], tools: Sequence[Message] | None) -> Following:
        chat = [_QUESTION, answer]
        text = self._after([*chat, *messages], tools)
        self.check([*chat, *messages], tools)
        head = ""
        if messages:
            marks: dict[str, str] = {}
            marked = self._after([*chat, _marked(messages[0], marks), *messages[1:]], tools)
            head = _common(text, *(marked.partition(mark)[0] for mark in marks))
        return Following(text, head, _common(text, self._end_of(answer, tools)), "tool_calls" in answer)

    def _end_of(self, answer: Message, tools: Sequence[Message] | None) -> str:
        """Return the text between an answer and the beginning of the next answer; "" where a template refuses this.

        The last answer of a chat may end differently, as for gpt-oss.
        """
        key = repr(answer), bool(tools)
        if key not in self._ends:
            try:
                begin = self._text([_QUESTION], tools).removeprefix(self._text([_QUESTION], tools, answer=False))
                self._ends[key] = self._after([_QUESTION, answer], tools).removesuffix(begin)
            except ValueError:
                self._ends[key] = ""
        return self._ends[key]

    def _after(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        _, answer, text = self._text(messages, tools).rpartition(_ANSWER)
        if not answer:
            raise ValueError("the chat template leaves out or changes the answers of the model")
        return text

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] | None, *, answer: bool = True) -> str:
        try:
            options = {"tools": tools, "add_generation_prompt": answer, "tokenize": False}
            text: str = self._renderer.apply_chat_template(list(messages), **options)
            return text
        except Exception as error:  # a template raises what its author chose
            has_system = any(message.get("role") == "system" for message in messages)
            fix = "; if it knows no system message, leave it and --data.system-prompt out" * has_system
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}{fix}") from None


def plain(message: Message) -> Message:
    """Return a message of OpenAI's chat completions in the form of chat templates.

    A content of None becomes "", and the arguments of calls, which are JSON texts there, become objects.
    """
    calls = [{**call, "function": _with_arguments(call["function"])} for call in message.get("tool_calls") or ()]
    message = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    return {"content": "", **message, **({"tool_calls": calls} if calls else {})}


def _with_arguments(function: Message) -> Message:
    with suppress(ValueError, TypeError):
        return {**function, "arguments": json.loads(function["arguments"])}
    return function


def name_of(tool: Any) -> str | None:
    """Return the name of a tool from its JSON schema; None if the value is no schema."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _renamed(tool: Message, name: str) -> Message:
    """Return the JSON schema of a tool, or its call, with another name."""
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}


def _form(message: Message) -> tuple[Any, ...]:
    """Return the properties of a message, except its texts, on which a template's treatment depends."""
    content = message.get("content")
    kinds = [block.get("type") for block in content if isinstance(block, Mapping)] if isinstance(content, list) else []
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f'"tool_calls" must be a list of objects, got {calls!r:.100}')
    return message.get("role"), bool(content), type(content), *kinds, len(calls)


def _behind(text: str, part: str, begin: int) -> int:
    """Return the place behind the first `part` of a text from `begin` on; -1 if it has none."""
    place = text.find(part, begin)
    return -1 if place < 0 else place + len(part)


def _common(*texts: str) -> str:
    """Return the longest common beginning of texts."""
    return "".join(
        letters[0] for letters in itertools.takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False))
    )


def _mark(marks: dict[str, str], description: str) -> str:
    mark = f"chatmark{len(marks)}mark"
    marks[mark] = description
    return mark


def _marked(message: Message, marks: dict[str, str]) -> Message:
    """Return a message with marks in place of its texts and of the names of called tools."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or ()
    description = f'the text of a message of the role "{role}"'
    replaced: dict[str, Any] = {}
    if isinstance(content, str) and content.strip() and not calls:
        replaced["content"] = _mark(marks, description)
    elif isinstance(content, list) and not calls:
        replaced["content"] = [
            {**block, "text": _mark(marks, description)} if isinstance(block, Mapping) and block.get("text") else block
            for block in content
        ]
    if calls:
        replaced["tool_calls"] = [
            _renamed(call, _mark(marks, f"the call of the tool {name_of(call)}")) for call in calls
        ]
    return {**message, **replaced}


def _with_id(message: Message, number: int) -> Message:
    """Return a result of a tool with the id of its call; Mistral's templates require nine letters and digits."""
    return {"tool_call_id": f"call{number:05d}", **message} if message.get("role") == "tool" else message


def _call(result: Message) -> Message:
    """Return a call that a result of a tool belongs to."""
    function = {"name": result.get("name", "tool"), "arguments": {"answer": _ANSWER}}
    return {"id": result["tool_call_id"], "type": "function", "function": function}
