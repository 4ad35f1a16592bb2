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
from rl_train.gateway.bodies import Answered, CompletionBody, GenerateBody, GenerateParameters, Named, Sampled, read
from rl_train.gateway.drawing import Choice
from rl_train.gateway.errors import ApiError, invalid
from rl_train.gateway.sessions import Session
from rl_train.trajectories.recorder import Call


class Dialect(ABC):
    """A request in one dialect.

    Args:
        values: The JSON values of the body.
        codec: The tokenizer.
        session: The episode.

    Attributes:
        kind: The beginning of the ids of answers.
        field: The field of the body that has the prompt.
        text: Whether the client gets a text.
        draws: Whether the answer has responses; otherwise it describes the prompt.
        last_event: The end of a stream.
        model: The model that the client names; None: it names none.
        sampled: How the client asks for tokens to be drawn.
        limit: The largest number of tokens that the client asks for; None: it names none.
        recorded: The call in the episode's recorder, with the tokens of the prompt.
        stream: Whether the client waits for parts.
        wants_log_probs: Whether the client gets log-probs.
        names_ids: Whether the names of tokens in log-probs are their ids.
        overridden: The client's options that the run overrides, beside those of `sampled`.

    Raises:
        ApiError: The request is wrong, or asks for what the endpoint does not offer.
    """

    kind: ClassVar[str]
    field: ClassVar[str] = "prompt"
    text: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    last_event: ClassVar[bytes] = b""
    model: str | None
    sampled: Sampled
    limit: int | None
    recorded: Call
    stream = wants_log_probs = names_ids = False

    def __init__(self, values: Any, codec: TextCodec, session: Session) -> None:
        self.codec, self.session, self.overridden = codec, session, list[str]()
        self.id, self.created = f"{self.kind}-{uuid4().hex}", int(time.time())
        self._read(values)

    @abstractmethod
    def _read(self, values: Any) -> None:
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

    def finish(self, choice: Choice) -> str | None:
        """Return the end of a choice; None before."""
        return choice.finish

    def _take(self, body: Named) -> None:
        """Take the fields that dialects share."""
        self.model, self.sampled, self.limit, self.stream = body.model, body, body.max_tokens, bool(body.stream)

    def _names(self, tokens: Sequence[int]) -> list[str]:
        """Return the name of each token in log-probs."""
        if self.names_ids:
            return [f"token_id:{token}" for token in tokens]
        return [self.codec.decode([token], special=True) for token in tokens]

    def _token_entries(self, choice: Choice, begin: int) -> list[dict[str, Any]]:
        """Return the log-probs of the tokens of a choice from a token on, in the form of chat completions."""
        names = self._names(choice.response.tokens[begin:])
        return [
            {"token": name, "logprob": value, "bytes": None if self.names_ids else [*name.encode()], "top_logprobs": []}
            for name, value in zip(names, choice.response.log_probs[begin:], strict=True)
        ]

    def _log_probs(self, choice: Choice, begin: int) -> dict[str, Any]:
        """Return the log-probs of an entry."""
        return {"content": self._token_entries(choice, begin), "refusal": None}

    def _entry(self, choice: Choice, begin: int) -> dict[str, Any]:
        """Return the fields of a choice from a token on, without what was drawn."""
        log_probs = self._log_probs(choice, begin) if self.wants_log_probs else None
        return {"index": choice.index, "logprobs": log_probs, "finish_reason": self.finish(choice)}

    def _usage(self, choices: Sequence[Choice], prompt: str = "input", drawn: str = "output") -> dict[str, int]:
        """Return the numbers of tokens of the prompt and of the choices, each under a name of the dialect."""
        counts = len(self.recorded.tokens), sum(len(choice.response.tokens) for choice in choices)
        return {f"{prompt}_tokens": counts[0], f"{drawn}_tokens": counts[1]}


class Completions(Dialect):
    """The form of chat completions and completions: an entry for each choice."""

    object: str
    sampled: Answered
    last_event = b"data: [DONE]\n\n"

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        return self._with([self._whole(choice) for choice in choices], choices)

    def grow(self, choice: Choice, text: str, begin: int) -> list[dict[str, Any]]:
        """See `Dialect`."""
        return [self._with([self._part(choice, text, begin)])]

    def end(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """See `Dialect`."""
        options = self.sampled.stream_options
        return [self._with([], choices)] if options is not None and options.include_usage else []

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Return the entry of a complete choice."""

    @abstractmethod
    def _part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        """Return the entry of a part of a choice; see `grow`."""

    def _with(self, entries: list[dict[str, Any]], choices: Sequence[Choice] | None = None) -> dict[str, Any]:
        """Return an answer with these entries; with the usage of choices where they are given."""
        values = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        if choices is None:
            return {**values, "choices": entries}
        usage = self._usage(choices, "prompt", "completion")
        return {**values, "choices": entries, "usage": usage | {"total_tokens": sum(usage.values())}}

    def _take(self, body: Named) -> None:
        super()._take(body)
        self.names_ids = bool(self.sampled.return_tokens_as_token_ids)

    def _entry(self, choice: Choice, begin: int) -> dict[str, Any]:
        ids = {"token_ids": choice.response.tokens[begin:]} if self.sampled.return_token_ids else {}
        return super()._entry(choice, begin) | ids


class Completion(Completions):
    """`/v1/completions`."""

    kind = "cmpl"
    object = "text_completion"

    def _read(self, values: Any) -> None:
        body = read(CompletionBody, values)
        self._take(body)
        self.limit, self.wants_log_probs = body.max_tokens or 16, body.logprobs is not None
        try:
            tokens = self.codec.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        except ValueError as error:
            raise invalid("prompt", str(error)) from error
        self.recorded = self.session.recorder.ids(tokens)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return self._part(choice, choice.text, 0)

    def _part(self, choice: Choice, text: str, begin: int) -> dict[str, Any]:
        prompt = {"prompt_token_ids": self.recorded.tokens} if self.sampled.return_token_ids else {}
        return self._entry(choice, begin) | {"text": text} | prompt

    def _log_probs(self, choice: Choice, begin: int) -> dict[str, Any]:
        names, values = self._names(choice.response.tokens[begin:]), choice.response.log_probs[begin:]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": []}


class Generate(Dialect):
    """vLLM's `/inference/v1/generate`: token ids in, token ids and log-probs out."""

    kind = "gen"
    field = "token_ids"
    text = False
    names_ids = True

    def _read(self, values: Any) -> None:
        body = read(GenerateBody, values)
        self.sampled = parameters = read(GenerateParameters, body.sampling_params, "sampling_params.")
        self.model, self.limit = body.model, parameters.max_tokens or 16
        self.wants_log_probs = parameters.logprobs is not None
        self.recorded = self.session.recorder.ids(body.token_ids)

    def reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See `Dialect`."""
        return {"request_id": self.id, "choices": [self._whole(choice) for choice in choices], "prompt_logprobs": None}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        kept = {} if choice.response.kept is None else {"sampling_mask": choice.response.kept}
        return self._entry(choice, 0) | {"token_ids": choice.response.tokens} | kept
