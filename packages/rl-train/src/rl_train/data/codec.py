"""`TextCodec`: the tokenizer of a checkpoint folder, for texts and chats."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_train.data.chat import ChatTemplate, Message
from rl_train.data.images import ImageChat
from rl_train.data.sources import read_json

# A chat template's mark of what a model learns.
_MARKS = re.compile(r"\{%-?\s*generation\b")

# The number of tokens at the end of a prompt in which a tag may begin a thought.
_TAIL = 16


class TextCodec:
    """The tokenizer of a checkpoint folder (`tokenizer.json`), loaded at its first use.

    Args:
        folder: The checkpoint folder.
        system_prompt: The first message of chats that have no message of the role "system".
        tools: The JSON schemas of the functions that a chat offers to the model, if its row has none.
    """

    def __init__(self, folder: Path, system_prompt: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.file, self.system_prompt, self.tools = folder / "tokenizer.json", system_prompt, list(tools)

    @property
    def available(self) -> bool:
        """Say whether the folder has a tokenizer."""
        return self.file.is_file()

    @property
    def chats(self) -> bool:
        """Say whether the folder has a chat template."""
        return "chat_template" in self._settings("tokenizer_config.json") or (
            self.file.with_name("chat_template.jinja").is_file()
        )

    @property
    def template(self) -> str:
        """Return the text of the chat template; ValueError without a chat template."""
        self._template  # noqa: B018  # for its error
        return str(self._chat.chat_template)

    @property
    def end(self) -> int | None:
        """Return the id of the token that ends a text; None if the tokenizer's settings name none."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._settings(name).get("eos_token") if self.available else None
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                id: int | None = self._tokenizer.token_to_id(token)
                return id
        return None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token."""
        ids: Mapping[str, int] = self._tokenizer.get_vocab()
        return ids

    def _settings(self, name: str) -> dict[str, Any]:
        file = self.file.with_name(name)
        values = read_json(file) if file.is_file() else {}
        return values if isinstance(values, dict) else {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids; the tokenizer's special tokens surround the text, unless it already has them.

        A rendered chat template, for example, already begins with the beginning-of-text token. Without `special` none
        are added.
        """
        encoding = self._tokenizer.encode(whole(text), add_special_tokens=special)
        text_ids = [token for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if not added]
        leading = list(itertools.takewhile(bool, encoding.special_tokens_mask))
        before, after = encoding.ids[: len(leading)], encoding.ids[len(leading) + len(text_ids) :]
        if text_ids[: len(before)] == before:
            before = []
        if text_ids[len(text_ids) - len(after) :] == after:
            after = []
        return before + text_ids + after

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return the token ids of a chat and of the beginning of the answer, by the tokenizer's own template.

        Args:
            messages: The messages, each with "role" and "content".
            tools: The JSON schemas of the functions that the template offers to the model.
        """
        return self._ids(self._template.prompt(self._begun(messages), tools or self.tools or None))

    def answered(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> list[int]:
        """Return the token ids of a chat that ends with an answer; see `ChatTemplate.answered`."""
        return self._ids(self._template.answered(self._begun(messages), tools or self.tools or None))

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, since: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a whole chat, and for each whether a model learns it.

        A template with `{% generation %}` marks what is learned. Of other templates these are the answers, see
        `ChatTemplate.answers`: what the model draws, without the beginning that its prompt has already.

        Args:
            messages, tools: The chat; its messages of the role "assistant" are the answers.
            since: The number of leading messages whose answers are not learned.

        Raises:
            ValueError: The template refuses the chat, or shows no answer of it.
        """
        begun, tools = list(self._begun(messages)), tools or self.tools or None
        since += len(begun) - len(messages)
        text, spans = self._template.answers(begun, tools, since)
        encoding = self._chat(whole(text), add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoding["input_ids"]
        if _MARKS.search(self.template):
            options = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True}
            marks = self._chat.apply_chat_template(begun, **options)["assistant_masks"]
            first = spans[0][0] if since and spans else 0
            return ids, [
                bool(mark) and end > first for mark, (_, end) in zip(marks, encoding["offset_mapping"], strict=True)
            ]
        return ids, [
            any(begin < stop and end > start for start, stop in spans) for begin, end in encoding["offset_mapping"]
        ]

    def image_chat(self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], base: Path) -> ImageChat:
        """Return a chat with images of a row, whose relative paths begin at the folder `base`; see `ImageChat.of`."""
        chat = ImageChat.of(self.file.parent, self._begun(messages), row, base, row.get("tools") or self.tools)
        chat.check()
        return chat

    def _begun(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if self.system_prompt is None or any(message.get("role") == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def continuation(self, messages: Sequence[Message], last: int, tools: Sequence[Message] | None = None) -> list[int]:
        """Return the tokens between an answer of the model and its next answer, by the template.

        They follow the tokens that the model drew, which stay unchanged. The beginning that the answer already has is
        cut: the template's text through the last token that the model drew. If the model ended with another special
        token (gpt-oss draws `<|return|>`, and the template writes `<|end|>`), the template's end of an answer is cut.
        An answer that ended with an ordinary token (`--stop-ids`) is followed by the template's end.

        Args:
            messages: The messages after the answer.
            last: The last token of the answer.
            tools: The JSON schemas of the functions that the template offers to the model (default: the codec's).
        """
        following = self._template.following(messages, tools or self.tools or None)
        ids, head, end = map(self._ids, following[:3])
        cut = 0
        if last not in self.special and not following.calls:
            cut = int(ids[:1] == [last])
        elif last in head:
            cut = head.index(last) + 1
        else:
            cut = max((place for place, token in enumerate(end, start=1) if token in self.special), default=0)
        if following.calls and not cut:
            raise ValueError("the chat template shows no end of an answer that calls tools")
        return ids[cut:]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, on request with special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not special)
        return text

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Say whether the answer to a prompt begins within the model's thoughts, as some templates have it."""
        return self.decode(prompt[-_TAIL:], special=True).rstrip().endswith(("<think>", "[THINK]"))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, with special tokens; without a tokenizer the ids.

        A character of several tokens belongs to its last one.
        """
        if not self.available:
            return [f"{token} " for token in tokens]
        from tokenizers.decoders import DecodeStream  # imported here: only text needs it

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in tokens]

    def _ids(self, text: str) -> list[int]:
        """Return the token ids of a rendered chat."""
        ids: list[int] = self._chat(whole(text), add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def _template(self) -> ChatTemplate:
        if not self._chat.chat_template:
            raise ValueError(
                f'"messages" need a chat template, which the tokenizer of {self.file.parent} has not; write one into '
                "its file chat_template.jinja, or give texts"
            )
        return ChatTemplate(self._chat)

    @cached_property
    def special(self) -> set[int]:
        """Return the ids of the special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {id for id, token in added.items() if token.special or id == self.end}

    @cached_property
    def _chat(self) -> Any:
        self._require('"messages"')
        from transformers import AutoTokenizer  # takes seconds, and only chats need it

        return AutoTokenizer.from_pretrained(self.file.parent, trust_remote_code=False)

    @cached_property
    def _tokenizer(self) -> Any:
        self._require('"text"')
        from tokenizers import Tokenizer  # imported here: only text needs it

        try:
            return Tokenizer.from_file(str(self.file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{self.file} cannot be read as a tokenizer: {error}") from None

    def _require(self, what: str) -> None:
        if not self.available:
            raise ValueError(f'{what} needs {self.file}, which does not exist; give "tokens" instead')


def whole(text: str) -> str:
    """Return a text that can be encoded; ValueError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of the text, {text[error.start]!r}, is half of a surrogate pair; remove it, "
            "or write both halves"
        ) from None
    return text


def end_of_text(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text by the tokenizer, and by the model's generation config or else its config."""
    end = TextCodec(folder).end
    ends = set() if end is None else {end}
    for file in (folder / name for name in ("generation_config.json", "config.json")):
        values = read_json(file) if file.is_file() else {}
        if not isinstance(values, dict):
            raise ValueError(
                f"{file} must hold an object, got {type(values).__name__}; correct the file, or give stop_ids"
            )
        ids = values.get("eos_token_id")
        if ids is None and isinstance(text := values.get("text_config"), dict):  # in a vision-language model
            ids = text.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(id) is int for id in ids):
                raise ValueError(
                    f"{file}: eos_token_id must be ids of tokens, got {ids}; correct the file, or give stop_ids"
                )
            ends |= set(ids)
            break
    return tuple(id for id in sorted(ends) if 0 <= id < vocab_size)
