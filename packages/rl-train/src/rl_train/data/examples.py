"""Read examples to learn from: rows of chats, completions, pairs of responses, and labelled steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rl_train.data.codec import TextCodec
from rl_train.data.images import is_seen
from rl_train.data.prompts import RowReader, require_ids
from rl_train.data.sources import place

# The fields of a row that hold a text, the messages of a chat, or token ids.
FIELDS = {"messages", "text", "tokens", "prompt", "completion", "chosen", "rejected"}


# The label of a token that the loss does not read.
NONE = -100


class Learned(NamedTuple):
    """The token ids of a sequence, and a label for each: 1 for a token that is learned, or a label of its own."""

    tokens: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Example:
    """One row: its sequences (the preferred one of a pair first), the whole row, its number from 1, and source."""

    sequences: tuple[Learned, ...]
    row: Mapping[str, Any]
    line: int
    source: Path

    @property
    def tokens(self) -> list[Learned]:
        """Return the sequences, for a digest."""
        return list(self.sequences)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.sequences)


# (row, codec) -> the sequences of the row.
Reader = Callable[[Mapping[str, Any], TextCodec], tuple[Learned, ...]]


@dataclass(frozen=True)
class ExampleReader(RowReader):
    """Reads examples.

    Attributes:
        reader: One of `whole`, `pair`, `judged`, `labelled` and `steps`.
    """

    kinds: ClassVar[Set[str]] = FIELDS

    reader: Reader = field(kw_only=True)

    def read(self, source: Path, number: int, row: Any) -> Example:
        """Return the example of a row; ValueError, which names the row, for a wrong one, or one that learns nothing."""
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"expected an object, got {type(row).__name__}")
            sequences = self.reader(row, self._codec)
            for tokens, labels in sequences:
                require_ids(tokens, self._vocab_size)
                if all(label == NONE for label in labels[1:]):
                    raise ValueError("no token of the row is learned; give an answer of the assistant, or a completion")
        except ValueError as error:
            raise ValueError(f"{place(source, number)}: {error}") from None
        return Example(sequences, row, number, source)


def whole(row: Mapping[str, Any], codec: TextCodec) -> tuple[Learned, ...]:
    """Read a chat, of which the answers are learned; a prompt with its completion; a text; or tokens with a mask.

    All tokens of a text are learned, and all tokens without a mask.
    """
    if "completion" in row or "prompt" in row:
        return (_completed(_entry(row, "prompt"), _entry(row, "completion"), row, codec),)
    if "messages" in row:
        return (_chat(row["messages"], row, codec),)
    if "text" in row and isinstance(row["text"], str):
        tokens = _ended(codec.encode(row["text"]), codec)
    elif "tokens" in row:
        tokens = _ids(row["tokens"], "tokens")
        mask = row.get("mask")
        if mask is not None:
            if not isinstance(mask, list) or len(mask) != len(tokens) or not all(entry in (0, 1) for entry in mask):
                raise ValueError(
                    f'"mask" must be a list of true and false for each of the {len(tokens)} tokens, got {mask!r:.60}'
                )
            return (Learned(tokens, [1 if learned else NONE for learned in mask]),)
    else:
        raise ValueError(
            'expected "messages", "prompt" with "completion", "text" or "tokens", got the fields '
            f"{', '.join(map(repr, row))}; --data.columns prompt=question,completion=answer takes other columns"
        )
    return (Learned(tokens, [NONE] + [1] * (len(tokens) - 1)),)


def pair(row: Mapping[str, Any], codec: TextCodec) -> tuple[Learned, ...]:
    """Read a chosen and a rejected response to a prompt; without a prompt both are chats with the same beginning."""
    chosen, rejected = _entry(row, "chosen"), _entry(row, "rejected")
    prompt = row.get("prompt")
    if prompt is None:
        if not isinstance(chosen, list) or not isinstance(rejected, list):
            raise ValueError('"chosen" and "rejected" without a "prompt" must be whole chats; give the prompt')
        pairs = zip(chosen[:-1], rejected[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], pairs))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if chosen == rejected:
        raise ValueError('"chosen" and "rejected" are the same, so nothing is preferred; leave the row out')
    return tuple(_completed(prompt, response, row, codec) for response in (chosen, rejected))


def judged(row: Mapping[str, Any], codec: TextCodec) -> tuple[Learned, ...]:
    """Read a prompt with a completion and its label, true for a desirable one."""
    if not isinstance(_entry(row, "label"), bool | int) or row["label"] not in (0, 1):
        raise ValueError(f'"label" must be true (a desirable completion) or false, got {row["label"]!r:.60}')
    return whole(row, codec)


def labelled(row: Mapping[str, Any], codec: TextCodec) -> tuple[Learned, ...]:
    """Read a chat, a completion, a text or tokens with a label, an integer from 0 on, of the whole sequence."""
    label = _entry(row, "label")
    if not isinstance(label, int) or label < 0:
        raise ValueError(f'"label" must be an integer from 0 on, got {label!r:.60}')
    ((tokens, _),) = whole(row, codec)
    return (Learned(tokens, [NONE] * (len(tokens) - 1) + [int(label)]),)


def steps(row: Mapping[str, Any], codec: TextCodec) -> tuple[Learned, ...]:
    """Read a prompt with the steps of a solution, "completions", and a label for each, which its last token gets."""
    texts, labels = _entry(row, "completions"), _entry(row, "labels")
    if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels) or not texts:
        raise ValueError('"completions" must be a list of steps, and "labels" a list with a label for each of them')
    tokens = codec.encode(_text(_entry(row, "prompt"), "prompt"))
    labels_T = [NONE] * len(tokens)
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(label, int) or label < 0:
            raise ValueError(f'"labels" must be true or false, or integers from 0 on, got {label!r:.60}')
        step = codec.encode(_text(text, "completions") + "\n", special=False)
        tokens, labels_T = tokens + step, labels_T + [NONE] * (len(step) - 1) + [int(label)]
    return (Learned(tokens, labels_T),)


def _completed(prompt: Any, completion: Any, row: Mapping[str, Any], codec: TextCodec) -> Learned:
    """Return a prompt with its completion, of which the completion is learned."""
    if completion == [] or (isinstance(completion, str) and not completion.strip()):
        raise ValueError(f"the answer to {prompt!r:.60} is empty; leave the row out")
    if isinstance(prompt, str) and isinstance(completion, str):
        asked, both = codec.encode(prompt), codec.encode(prompt + completion)
        if both[: len(asked)] != asked:  # a token would cross the end of the prompt, which the model reads whole
            both = asked + codec.encode(completion, special=False)
        both = _ended(both, codec)
    elif _is_ids(prompt) and _is_ids(completion):
        asked, both = prompt, prompt + completion
    elif isinstance(prompt, list):
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        if not isinstance(answer, list):
            raise ValueError(f"a completion must be a text or messages, as its prompt, got {completion!r:.60}")
        return _chat([*prompt, *answer], row, codec, since=len(prompt))
    else:
        raise ValueError(
            f"a prompt and its completion must both be texts, messages or token ids, got {prompt!r:.60} and "
            f"{completion!r:.60}"
        )
    return Learned(both, [NONE] * len(asked) + [1] * (len(both) - len(asked)))


def _chat(messages: Any, row: Mapping[str, Any], codec: TextCodec, since: int = 0) -> Learned:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"messages must be a list of objects with a role and a content, got {messages!r:.100}")
    if is_seen(messages):
        raise ValueError("the messages have images, which are for rl-train train; leave them out")
    for message in messages:
        if "role" not in message:
            entries = ", ".join(map(repr, message))
            raise ValueError(f'a message has {entries} and no "role"; write {{"role": "user", "content": "..."}}')
        if message["role"] == "assistant" and not any(value for name, value in message.items() if name != "role"):
            raise ValueError("an answer of the assistant is empty; leave the message, or the row, out")
    tokens, learned = codec.conversation(messages, row.get("tools"), since)
    return Learned(tokens, [1 if is_learned else NONE for is_learned in learned])


def _ended(tokens: list[int], codec: TextCodec) -> list[int]:
    """Return tokens with the end of a text behind them, where the tokenizer names one."""
    return tokens if codec.end is None or tokens[-1:] == [codec.end] else [*tokens, codec.end]


def _entry(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(
            f'there is no "{name}"; the fields are {", ".join(map(repr, row))}, and --data.columns {name}=COLUMN takes '
            "another column"
        )
    return row[name]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be texts, got {value!r:.60}')
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _ids(value: Any, name: str) -> list[int]:
    if not _is_ids(value) or len(value) < 2:
        raise ValueError(f'"{name}" must be a list of at least two integers, got {value!r:.60}')
    return list(value)
