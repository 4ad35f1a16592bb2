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
from dataclasses import dataclass, replace
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
        length, digest: The number of the template's ids up to the answer, and their hash.
    """

    sample: Sample
    end: int
    messages: int = 0
    length: int = 0
    digest: bytes = b""

    @property
    def tokens(self) -> list[int]:
        """Return the ids of the prompt and of the draw."""
        return self.sample.tokens[: self.end]


class Recorder:
    """The calls of one episode.

    Calls may be in progress at the same time; the methods are called by one thread at a time.

    Args:
        prompt: The row of the episode.
        codec: The tokenizer and the chat template.
        limit: The largest number of tokens of a sample.
        visual: The images of the prompt.

    Attributes:
        calls: The recorded calls, in the order of `record`.
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
        for call in self._beginnings(rendered):
            if (tail := self._tail(call, rendered)) is not None:
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
        """Return a call that a chat may continue, if the template's ids show the chat and the answer.

        Special tokens at the end are left out: the last answer of a chat may end differently.
        """
        messages = [*rendered.messages, answer]
        with suppress(ValueError):
            ids = self._codec.answered(messages, rendered.tools)
            if ids[: len(rendered.ids)] == rendered.ids:
                while ids[-1] in self._codec.special:
                    ids.pop()
                ((_, digest),) = _digests(ids, [len(ids)])
                return replace(call, messages=len(messages), length=len(ids), digest=digest)
        return call

    def _beginnings(self, rendered: Rendered) -> Iterator[RecordedCall]:
        """Yield the calls whose rendered ids begin those of a chat, the longest first."""
        num_messages, num_ids = len(rendered.messages), len(rendered.ids)
        calls = [call for call in self.calls if 0 < call.messages < num_messages and call.length <= num_ids]
        digests = dict(_digests(rendered.ids, sorted({call.length for call in calls})))
        calls = [call for call in calls if digests[call.length] == call.digest]
        yield from sorted(calls, key=lambda call: call.length, reverse=True)

    def _tail(self, call: RecordedCall, rendered: Rendered) -> list[int] | None:
        """Return the ids between the draw of a call and the next answer; None if the chat does not continue it."""
        messages = rendered.messages[call.messages :]
        try:
            tail = self._codec.continuation(messages, call.sample.tokens[call.end - 1], rendered.tools)
        except ValueError:
            return None
        end = len(rendered.ids) - len(tail)
        between = rendered.ids[call.length : end]
        continues = rendered.ids[end:] == tail and all(token in self._codec.special for token in between)
        return tail if continues else None


def _digests(ids: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield each of the rising lengths, and the hash of that number of first ids."""
    hash, begin = hashlib.sha256(), 0
    for length in lengths:
        hash.update(array("q", ids[begin:length]))
        begin = length
        yield length, hash.digest()
