"""`Recorder`: the calls of one episode as token ids, and the samples that a policy learns from.

A chat client sends all messages in every call. The recorder renders them by the chat template and looks for the call
whose messages and answer begin them, token by token. The new prompt then has the ids of that call, drawn tokens
included, and the template's ids of the new messages. Drawn tokens are never rendered to text and encoded again.

Where the template writes another beginning (the client has changed, shortened or summarised the history, or the
template drops earlier thoughts), a new sample begins with the template's ids. Calls form a tree: a call that continues
the end of a sample makes the sample longer. A call that continues an earlier call begins a sample with the ids up to
that call, and these ids are outside its mask. So every drawn token is in the mask of exactly one sample.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rl_models import VisualInputs
from rl_train.data.chat import Message, plain
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.trajectories.samples import Part, Sample

Tools = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A chat and its token ids by the template, which may differ from the ids that were drawn."""

    messages: list[Message]
    tools: Tools | None
    ids: list[int]


class Call(NamedTuple):
    """A call of the engine that is not recorded yet.

    Attributes:
        tokens: The token ids of the prompt.
        parent: The recorded call whose ids begin the prompt; None for a prompt that continues no call.
        rendered: The chat of the prompt; None for a prompt of ids.
    """

    tokens: list[int]
    parent: RecordedCall | None = None
    rendered: Rendered | None = None


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call in its sample.

    Attributes:
        sample: The sample that has the drawn tokens.
        end: The number of the sample's tokens up to the last one that the call drew.
        messages: The number of messages up to the answer; 0 where no chat can continue the call.
        beginnings: The hashes, by length, of ids that begin a chat which continues the call.
    """

    sample: Sample
    end: int
    messages: int = 0
    beginnings: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """Return the ids of the prompt and of the draw."""
        return self.sample.tokens[: self.end]


class Recorder:
    """The calls of one episode.

    Calls may be in progress at the same time; the methods are called by one thread at a time.

    `limit` is the largest number of tokens of a sample, and `visual` are the images of the prompt. `calls` are the
    recorded calls, in the order of `record`.
    """

    def __init__(self, prompt: Prompt, codec: TextCodec, limit: int, visual: VisualInputs | None = None) -> None:
        self._codec, self._first = codec, Sample(prompt, visual, limit, prompt.tokens)
        self._samples, self.calls = list[Sample](), list[RecordedCall]()

    @property
    def samples(self) -> list[Sample]:
        """Return the samples of the episode; without a call the prompt alone, with no token in the mask."""
        return self._samples or [self._first]

    def chat(self, messages: Sequence[Message], tools: Tools | None = None) -> Call:
        """Return a call with the messages of a chat, in the form of OpenAI's chat completions.

        Raises:
            ValueError: The template refuses the messages, or leaves out a message or a tool; or the last message is of
                the role "assistant".
        """
        messages = [plain(message) for message in messages]
        rendered = Rendered(messages, tools, self._codec.chat(messages, tools))
        for call, begin in self._continued(rendered):
            if (tail := self._tail(call, begin, rendered)) is not None:
                return Call([*call.tokens, *tail], call, rendered)
        return Call(rendered.ids, None, rendered)

    def ids(self, tokens: Sequence[int]) -> Call:
        """Return a call with the token ids of a prompt; it continues the longest recorded call that begins them."""
        tokens = list(tokens)
        calls = (call for call in self.calls if tokens[: call.end] == call.tokens)
        return Call(tokens, max(calls, key=lambda call: call.end, default=None))

    def reply(self, call: RecordedCall, messages: Sequence[Message]) -> Call:
        """Return a call that continues a recorded call by messages, also where the template drops earlier thoughts.

        Raises:
            ValueError: The template refuses the messages, or leaves out a message.
        """
        return Call([*call.tokens, *self._codec.continuation(messages, call.sample.tokens[call.end - 1])], call)

    def record(self, call: Call, part: Part, answer: Message | None = None, *, truncated: bool = False) -> RecordedCall:
        """Take the tokens that were drawn in a call. Several draws of one call are recorded one by one.

        Args:
            call: A result of `chat`, `ids` or `reply`.
            part: The drawn tokens, at least one.
            answer: The message that the client of a chat gets; its next call may continue this one.
            truncated: Whether a limit of tokens ended the draw.
        """
        parent = call.parent
        if parent is not None and parent.end == len(parent.sample.tokens):
            sample = parent.sample
        else:
            sample = replace(self._first, parts=[], turns=[])
            self._samples.append(sample)
        sample.tokens = call.tokens
        sample.take(part)
        sample.count(turns=1, truncated=truncated)
        recorded = RecordedCall(sample, len(sample.tokens))
        if answer is not None and call.rendered is not None:
            recorded = self._with_answer(recorded, call.rendered, plain(answer))
        self.calls.append(recorded)
        return recorded

    def _with_answer(self, call: RecordedCall, rendered: Rendered, answer: Message) -> RecordedCall:
        """Return a call that a chat may continue.

        The chat begins with the recorded ids, or with the template's ids of the same messages and the answer, if these
        show the chat and the answer. Special tokens at the end do not count: the last answer of a chat may end
        differently.
        """
        messages, beginnings = [*rendered.messages, answer], [call.tokens]
        with suppress(ValueError):
            ids = self._codec.answered(messages, rendered.tools)
            if ids[: len(rendered.ids)] == rendered.ids:
                beginnings.append(ids)
        hashes = dict[int, bytes]()
        for ids in beginnings:
            while ids and ids[-1] in self._codec.special:
                ids.pop()
            hashes |= _hashes(ids, [len(ids)])
        return replace(call, messages=len(messages), beginnings=hashes)

    def _continued(self, rendered: Rendered) -> Iterator[tuple[RecordedCall, int]]:
        """Yield the calls that begin a chat, and the number of the ids that begin it; the longest first."""
        calls = [call for call in self.calls if 0 < call.messages < len(rendered.messages)]
        lengths = {length for call in calls for length in call.beginnings if length <= len(rendered.ids)}
        hashes = _hashes(rendered.ids, sorted(lengths))
        for length in sorted(lengths, reverse=True):
            yield from ((call, length) for call in calls if call.beginnings.get(length) == hashes[length])

    def _tail(self, call: RecordedCall, begin: int, rendered: Rendered) -> list[int] | None:
        """Return the ids between the draw of a call and the next answer; None if the chat does not continue it.

        The chat's ids must be the `begin` ones, special tokens that end the answer, and the tail.
        """
        messages = rendered.messages[call.messages :]
        try:
            tail = self._codec.continuation(messages, call.sample.tokens[call.end - 1], rendered.tools)
        except ValueError:
            return None
        end = len(rendered.ids) - len(tail)
        continues = rendered.ids[end:] == tail and self._codec.special.issuperset(rendered.ids[begin:end])
        return tail if continues else None


def _hashes(ids: Sequence[int], lengths: Sequence[int]) -> dict[int, bytes]:
    """Return the hash of the first ids for each of the rising lengths."""
    hash, begin, hashes = hashlib.sha256(), 0, dict[int, bytes]()
    for length in lengths:
        hash.update(array("q", ids[begin:length]))
        begin, hashes[length] = length, hash.digest()
    return hashes
