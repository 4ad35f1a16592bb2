"""The dialects of the endpoint: how a request becomes a `Drawing`, and how choices become an answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar
from uuid import uuid4

from parallel_layers.module import hashed_seed
from rl_train.data.codec import TextCodec
from rl_train.gateway.bodies import (
    Answered,
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParameters,
    Sampled,
    StreamOptions,
    read,
)
from rl_train.gateway.drawing import Choice, Drawing
from rl_train.gateway.errors import ApiError, unsupported
from rl_train.gateway.messages import checked_messages
from rl_train.gateway.sessions import Session
from rl_train.gateway.tool_calls import answer, format_of
from rl_train.trajectories.recorder import Call

# The number of tokens before an answer in which a tag may begin a thought.
_TAIL = 16
_THOUGHTS = ("<think>", "[THINK]")


class Dialect(ABC):
    """A request in one dialect.

    Args:
        values: The JSON values of the body.
        codec: The tokenizer.
        session: The episode.

    Attributes:
        model: The model that the client names; None: it names none.
        sampled: How the client asks for tokens to be drawn.
        limit: The largest number of tokens that the client asks for; None: it names none.
        recorded: The call in the episode's recorder, with the tokens of the prompt.
        field: The field of the body that has the prompt.
        stream: Whether the client waits for parts; `stream_options` say of what.
        text: Whether the client gets a text.

    Raises:
        ApiError: The request is wrong, or asks for what the endpoint does not offer.
    """

    kind: ClassVar[str]
    model: str | None
    sampled: Sampled
    limit: int | None
    recorded: Call
    field: ClassVar[str] = "prompt"
    stream = False
    text: ClassVar[bool] = True
    stream_options = StreamOptions()

    def __init__(self, values: Any, codec: TextCodec, session: Session) -> None:
        self.codec, self.session = codec, session
        self.id, self.created = f"{self.kind}-{uuid4().hex}", int(time.time())
        self.read(values)

    @abstractmethod
    def read(self, values: Any) -> None:
        """Read the body."""

    @abstractmethod
    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return the entry of a complete choice."""

    def part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """Return the entry of a stream for a part of a choice: its text, and the number of its first token."""
        raise NotImplementedError

    def message(self, choice: Choice) -> dict[str, Any] | None:
        """Return the message that a client gets; None in dialects without messages."""
        return None

    def reply(self, drawing: Drawing, choices: Sequence[Choice], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer with the entries of all choices, or a chunk of a stream without `choices`."""
        values = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return {**values, "choices": list(entries), **({"usage": usage(drawing, choices)} if choices else {})}

    @property
    def object(self) -> str:
        """Return the name of the answer's kind."""
        raise NotImplementedError

    def log_probs(self, choice: Choice, begin: int = 0) -> dict[str, Any]:
        """Return the log-probs of the tokens of a choice from a token on, in the form of chat completions."""
        texts, by_id = self.texts(choice.response.tokens[begin:]), self.names_ids
        entries = [
            {"token": text, "logprob": value, "bytes": None if by_id else list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, choice.response.log_probs[begin:], strict=True)
        ]
        return {"content": entries, "refusal": None}

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the name of each token in log-probs."""
        return [f"token_id:{token}" if self.names_ids else self.codec.decode([token], special=True) for token in tokens]

    @property
    def names_ids(self) -> bool:
        """Say whether the names of tokens are their ids."""
        return isinstance(self.sampled, Answered) and bool(self.sampled.return_tokens_as_token_ids)

    def ids(self, choice: Choice, begin: int = 0) -> dict[str, Any]:
        """Return the token ids of a choice where the client asks for them."""
        body = self.sampled
        wanted = isinstance(body, Answered) and body.return_token_ids
        return {"token_ids": choice.response.tokens[begin:]} if wanted else {}

    def take(self, body: Answered) -> None:
        """Take the fields that dialects of OpenAI share."""
        self.model, self.sampled, self.limit = body.model, body, body.max_tokens
        self.stream = bool(body.stream)
        self.stream_options = body.stream_options or StreamOptions()


class Chat(Dialect):
    """`/v1/chat/completions`."""

    kind = "chatcmpl"
    field = "messages"

    def read(self, values: Any) -> None:
        """See `Dialect`; tools that the chat template drops are refused."""
        body = read(ChatBody, values)
        self.take(body)
        self.limit = body.max_completion_tokens or body.max_tokens
        self.wants_log_probs = bool(body.logprobs)
        if body.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", f"tool_choice={body.tool_choice!r:.100}: only auto and none are offered")
        self.tools = None if body.tool_choice == "none" else body.tools or None
        messages = checked_messages(body.messages)
        try:
            self.recorded = self.session.recorder.chat(messages, self.tools)
        except ValueError as error:
            raise ApiError(400, str(error), "messages", "invalid_value") from error

    @property
    def object(self) -> str:
        """See `Dialect`."""
        return "chat.completion.chunk" if self.stream else "chat.completion"

    def message(self, choice: Choice) -> dict[str, Any]:
        """See `Dialect`."""
        if self.tools is None:
            return {"role": "assistant", "content": choice.text}
        raw = self.codec.decode(choice.response.tokens, special=True)
        begin = self.codec.decode(self.recorded.tokens[-_TAIL:], special=True)
        number = f"{hashed_seed(self.id, choice.index, size=3):06x}"
        return answer(choice.text, raw, self._format, number, thinking=begin.rstrip().endswith(_THOUGHTS))

    @cached_property
    def _format(self) -> str:
        return format_of(self.codec.template)

    def whole(self, choice: Choice) -> dict[str, Any]:
        """See `Dialect`."""
        message = self.message(choice)
        return {
            "index": choice.index,
            "message": {**message, "refusal": None},
            "logprobs": self.log_probs(choice) if self.wants_log_probs else None,
            "finish_reason": "tool_calls" if "tool_calls" in message else choice.finish,
            **self.ids(choice),
        }

    def part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """See `Dialect`. With tools a choice is one part: only its end shows which calls it has."""
        delta: dict[str, Any] = {"content": text} if text else {}
        finish = choice.finish
        if self.tools is not None:
            delta = {}
            if finish is not None:
                message = self.message(choice)
                calls = message.get("tool_calls") or ()
                delta = {"content": message["content"]} if message["content"] else {}
                delta |= {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]} if calls else {}
                finish = "tool_calls" if calls else finish
        if begin == 0:
            delta = {"role": "assistant", "content": "", **delta}
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self.log_probs(choice, begin) if self.wants_log_probs else None,
            "finish_reason": finish,
            **self.ids(choice, begin),
        }


class Completion(Dialect):
    """`/v1/completions`."""

    kind = "cmpl"

    def read(self, values: Any) -> None:
        """See `Dialect`."""
        body = read(CompletionBody, values)
        self.take(body)
        self.limit = body.max_tokens or 16
        self.wants_log_probs = body.logprobs is not None
        try:
            tokens = self.codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        except ValueError as error:
            raise ApiError(400, str(error), "prompt", "invalid_value") from error
        self.recorded = self.session.recorder.ids(tokens)

    @property
    def object(self) -> str:
        """See `Dialect`."""
        return "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        """See `Dialect`."""
        return self.part(choice, choice.text, 0)

    def part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """See `Dialect`."""
        log_probs = None
        if self.wants_log_probs:
            tokens = self.texts(choice.response.tokens[begin:])
            values = choice.response.log_probs[begin:]
            log_probs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
        entry = {"index": choice.index, "text": text, "logprobs": log_probs, "finish_reason": choice.finish}
        prompt = {"prompt_token_ids": self.recorded.tokens} if (ids := self.ids(choice, begin)) else {}
        return entry | ids | prompt


class Generate(Dialect):
    """vLLM's `/inference/v1/generate`: token ids in, token ids and log-probs out."""

    kind = "gen"
    text = False
    field = "token_ids"

    def read(self, values: Any) -> None:
        """See `Dialect`."""
        body = read(GenerateBody, values)
        self.sampled = parameters = read(GenerateParameters, body.sampling_params, "sampling_params.")
        self.model, self.limit = body.model, parameters.max_tokens or 16
        self.recorded = self.session.recorder.ids(body.token_ids)
        self.wants_log_probs = parameters.logprobs is not None

    @property
    def names_ids(self) -> bool:
        """See `Dialect`."""
        return True

    def whole(self, choice: Choice) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            "index": choice.index,
            "logprobs": self.log_probs(choice) if self.wants_log_probs else None,
            "finish_reason": choice.finish,
            "token_ids": choice.response.tokens,
            **({} if choice.response.kept is None else {"sampling_mask": choice.response.kept}),
        }

    def reply(self, drawing: Drawing, choices: Sequence[Choice], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """See `Dialect`."""
        return {"request_id": self.id, "choices": list(entries), "prompt_logprobs": None}


def usage(drawing: Drawing, choices: Sequence[Choice]) -> dict[str, int]:
    """Return the numbers of tokens of a call."""
    drawn = sum(len(choice.response.tokens) for choice in choices)
    prompt = len(drawing.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
