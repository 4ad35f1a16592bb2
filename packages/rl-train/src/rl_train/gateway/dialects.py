"""The dialects of the endpoint: how a request becomes a `Drawing`, and how choices become an answer.

This file has what dialects share, and the dialects without messages.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar
from uuid import uuid4

from rl_train.data.codec import TextCodec
from rl_train.gateway.bodies import (
    CompletionBody,
    GenerateBody,
    GenerateParameters,
    Named,
    Sampled,
    StreamOptions,
    read,
)
from rl_train.gateway.drawing import Choice
from rl_train.gateway.errors import ApiError
from rl_train.gateway.sessions import Session
from rl_train.trajectories.recorder import Call


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
        names_ids: Whether the names of tokens in log-probs are their ids.
        draws: Whether the answer has responses; otherwise it describes the prompt.
        last_event: The text at the end of a stream.
        overridden: The client's options that the run overrides, beside those of `sampled`.

    Raises:
        ApiError: The request is wrong, or asks for what the endpoint does not offer.
    """

    kind: ClassVar[str]
    model: str | None
    sampled: Sampled
    limit: int | None
    recorded: Call
    field: ClassVar[str] = "prompt"
    stream = names_ids = False
    text: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    last_event: ClassVar[bytes] = b""
    stream_options = StreamOptions()

    def __init__(self, values: Any, codec: TextCodec, session: Session) -> None:
        self.codec, self.session, self.overridden = codec, session, list[str]()
        self.id, self.created = f"{self.kind}-{uuid4().hex}", int(time.time())
        self.read(values)

    @abstractmethod
    def read(self, values: Any) -> None:
        """Read the body."""

    @abstractmethod
    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer with all choices."""

    def begin(self) -> list[dict[str, Any]]:
        """Return the events that begin a stream."""
        return []

    def grow(self, choice: Choice, text: str, begin: int) -> list[dict[str, Any]]:
        """Return the events of a part of a choice: its text, and the number of its first token."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return the events that end a stream."""
        return []

    @classmethod
    def error(cls, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""
        return error.to_json()

    def late_error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error in a stream."""
        return self.error(error)

    def message(self, choice: Choice) -> dict[str, Any] | None:
        """Return the message that a client gets, in the form of chat completions; None in dialects without messages."""
        return None

    def log_probs(self, choice: Choice, begin: int = 0) -> list[dict[str, Any]]:
        """Return the log-probs of the tokens of a choice from a token on, in the form of chat completions."""
        names = self.names(choice.response.tokens[begin:])
        return [
            {"token": name, "logprob": value, "bytes": None if self.names_ids else [*name.encode()], "top_logprobs": []}
            for name, value in zip(names, choice.response.log_probs[begin:], strict=True)
        ]

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Return the name of each token in log-probs."""
        if self.names_ids:
            return [f"token_id:{token}" for token in tokens]
        return [self.codec.decode([token], special=True) for token in tokens]

    def counts(self, choices: Sequence[Choice]) -> tuple[int, int]:
        """Return the number of tokens of the prompt, and of the choices together."""
        return len(self.recorded.tokens), sum(len(choice.response.tokens) for choice in choices)

    def take(self, body: Named) -> None:
        """Take the fields that dialects share."""
        self.model, self.sampled, self.limit = body.model, body, body.max_tokens
        self.stream, self.names_ids = bool(body.stream), bool(getattr(body, "return_tokens_as_token_ids", False))
        self.stream_options = body.stream_options or StreamOptions()


class Completions(Dialect):
    """The form of chat completions and completions: an entry for each choice."""

    last_event = b"data: [DONE]\n\n"

    object = "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return the entry of a complete choice."""
        return self.part(choice, choice.text, 0)

    @abstractmethod
    def part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """Return the entry of a part of a choice; see `grow`."""

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        return self._with([self.whole(choice) for choice in choices]) | {"usage": self._usage(choices)}

    def grow(self, choice: Choice, text: str, begin: int) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return [self._with([self.part(choice, text, begin)])]

    def end(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return [self._with([]) | {"usage": self._usage(choices)}] if self.stream_options.include_usage else []

    def ids(self, choice: Choice, begin: int = 0) -> dict[str, Any]:
        """Return the token ids of a choice where the client asks for them."""
        wanted = getattr(self.sampled, "return_token_ids", False)
        return {"token_ids": choice.response.tokens[begin:]} if wanted else {}

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        prompt, drawn = self.counts(choices)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def _with(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        values = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return {**values, "choices": entries}


class Completion(Completions):
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

    def part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """See `Completions`."""
        log_probs = None
        if self.wants_log_probs:
            tokens = self.names(choice.response.tokens[begin:])
            values = choice.response.log_probs[begin:]
            log_probs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
        entry = {"index": choice.index, "text": text, "logprobs": log_probs, "finish_reason": choice.finish}
        prompt = {"prompt_token_ids": self.recorded.tokens} if (ids := self.ids(choice, begin)) else {}
        return entry | ids | prompt


class Generate(Dialect):
    """vLLM's `/inference/v1/generate`: token ids in, token ids and log-probs out."""

    kind = "gen"
    text = False
    names_ids = True
    field = "token_ids"

    def read(self, values: Any) -> None:
        """See `Dialect`."""
        body = read(GenerateBody, values)
        self.sampled = parameters = read(GenerateParameters, body.sampling_params, "sampling_params.")
        self.model, self.limit = body.model, parameters.max_tokens or 16
        self.recorded = self.session.recorder.ids(body.token_ids)
        self.wants_log_probs = parameters.logprobs is not None

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        return {"request_id": self.id, "choices": [self._whole(choice) for choice in choices], "prompt_logprobs": None}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        log_probs = {"content": self.log_probs(choice), "refusal": None} if self.wants_log_probs else None
        kept = {} if choice.response.kept is None else {"sampling_mask": choice.response.kept}
        entry = {"index": choice.index, "logprobs": log_probs, "finish_reason": choice.finish}
        return entry | {"token_ids": choice.response.tokens} | kept
