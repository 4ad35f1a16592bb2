"""Read prompts: rows with `"tokens": [ids]`, `"text": "..."` or a chat's `"messages": [...]`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_train.data.images import ImageChat, is_seen
from rl_train.data.sources import (
    Row,
    csv_rows,
    dataset_rows,
    hub_files,
    numbered,
    parquet_rows,
    parse_columns,
    place,
    renamed,
)
from rl_train.environments import reasoning_gym

# The fields of which a row has one: its prompt.
_KINDS = {"tokens", "text", "messages"}
# Stands for an answer of the model where a template is asked what follows answers.
_ANSWER = "THE-ANSWER-OF-THE-MODEL"


@dataclass(frozen=True)
class Prompt:
    """One row of a file: at least one token id, the whole row, and the number of the line or row, from 1.

    `chat` is a chat with images, which `load_images` loads; None without images.
    """

    tokens: list[int]
    row: Mapping[str, Any]
    line: int
    chat: ImageChat | None = None


class TextCodec:
    """The tokenizer of a checkpoint folder (`tokenizer.json`), loaded at its first use.

    Args:
        folder: The checkpoint folder.
        system_prompt: The first message of chats that have no message of the role "system".
        tools: The JSON schemas of the functions that a chat offers to the model, if its row has none.
    """

    def __init__(self, folder: Path, system_prompt: str | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.file, self.system_prompt, self.tools = folder / "tokenizer.json", system_prompt, list(tools)
        self._tokenizer: Any = None
        self._chat: Any = None

    @property
    def available(self) -> bool:
        """Say whether the folder has a tokenizer."""
        return self.file.is_file()

    @property
    def chats(self) -> bool:
        """Say whether the folder has a chat template."""
        config = self.file.with_name("tokenizer_config.json")
        own = config.is_file() and "chat_template" in read_json(config)
        return own or self.file.with_name("chat_template.jinja").is_file()

    @property
    def end(self) -> int | None:
        """Return the id of the token that ends a text by `tokenizer_config.json`; None if that file names none."""
        file = self.file.with_name("tokenizer_config.json")
        values = read_json(file) if self.available and file.is_file() else {}
        token = values.get("eos_token") if isinstance(values, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else self._loaded().token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return token ids, with the tokenizer's special tokens around the text unless the text has them already.

        A rendered chat template, for example, already begins with the beginning-of-text token.
        """
        tokenizer = self._loaded()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text, {text[error.start]!r}, is half of a surrogate pair; remove it, "
                "or write both halves"
            ) from None
        encoding = tokenizer.encode(text)
        own = [token for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if not added]
        begin = list(itertools.takewhile(bool, encoding.special_tokens_mask))
        before, after = encoding.ids[: len(begin)], encoding.ids[len(begin) + len(own) :]
        if own[: len(before)] == before:
            before = []
        if own[len(own) - len(after) :] == after:
            after = []
        return before + own + after

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Return the token ids of a chat and of the beginning of the answer, by the tokenizer's own template.

        Args:
            messages: The messages, each with "role" and "content".
            tools: The JSON schemas of the functions that the template offers to the model.

        Raises:
            ValueError: The folder has no tokenizer or no chat template, or the template refuses the messages.
        """
        ids: list[int] = self._rendered(self._begun(messages), tools, tokenize=True, return_dict=False)
        return ids

    def image_chat(self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], base: Path) -> ImageChat:
        """Return a chat with images of a row, whose relative paths begin at the folder `base`; see `ImageChat.of`."""
        return ImageChat.of(self.file.parent, self._begun(messages), row, base, row.get("tools") or self.tools)

    def _begun(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if self.system_prompt is None or any(message.get("role") == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def continuation(self, messages: Sequence[Mapping[str, Any]], ends: Collection[int]) -> list[int]:
        """Return the tokens between an answer of the model and its next answer, by the template.

        They follow the tokens that the model drew, which stay as they are. The template's own end of an answer is left
        out: the answer has one of `ends` as its last token.

        Args:
            messages: The messages after the answer.
            ends: The tokens that end an answer.

        Raises:
            ValueError: As for `chat`; or the template does not show answers as they are.
        """
        chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}, *messages]
        _, found, after = self._rendered(chat, None, tokenize=False).partition(_ANSWER)
        if not found:
            raise ValueError("the chat template leaves out or changes the answers of the model")
        ids: list[int] = self._chat(after, add_special_tokens=False)["input_ids"]
        return ids[1:] if ids and ids[0] in ends else ids

    def _rendered(self, messages: Sequence[Any], tools: Any, **options: Any) -> Any:
        if self._chat is None:
            self._require('"messages"')
            from transformers import AutoTokenizer  # takes seconds, and only chats need it

            self._chat = AutoTokenizer.from_pretrained(self.file.parent)
        if not self._chat.chat_template:
            raise ValueError(f'"messages" need a chat template, which the tokenizer of {self.file.parent} has not')
        tools = tools or self.tools or None
        try:
            return self._chat.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, **options)
        except Exception as error:  # a template raises what its author chose
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from None

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, on request with special tokens."""
        text: str = self._loaded().decode(list(tokens), skip_special_tokens=not special)
        return text

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            self._require('"text"')
            from tokenizers import Tokenizer  # imported here: only text needs it

            try:
                self._tokenizer = Tokenizer.from_file(str(self.file))
            except Exception as error:  # tokenizers raises plain Exception
                raise ValueError(f"{self.file} cannot be read as a tokenizer: {error}") from None
        return self._tokenizer

    def _require(self, what: str) -> None:
        if not self.available:
            raise ValueError(f'{what} needs {self.file}, which does not exist; give "tokens" instead')


def read_prompts(
    path: Path,
    model: Path,
    max_tokens: int | None,
    *,
    limit: str = "--max-tokens",
    fix: str = "give a larger --max-tokens, or shorten the row",
    system_prompt: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    columns: str = "",
    rows: Iterable[Any] | None = None,
) -> list[Prompt]:
    """Read the rows of a source: `.jsonl`, `.parquet` or `.csv` files, a folder of `datasets`, an environment, a hub.

    Args:
        path: The file or folder, or the name of the environment.
        model: The checkpoint folder, for its vocabulary and tokenizer.
        max_tokens: Maximum number of tokens in a row; None for no maximum.
        limit, fix: The name of that maximum in an error, and the advice there.
        system_prompt, tools: See `TextCodec`.
        columns: See `rl_train.data.sources.parse_columns`.
        rows: Mappings in place of the file; `path` is their name in errors then.

    Raises:
        ValueError: The source cannot be read or has no rows; or a row is wrong, has ids outside the vocabulary, or has
            too many tokens: the error names the row.
    """
    vocab_size = vocabulary_size(model)
    codec, fields = TextCodec(model, system_prompt, tools), parse_columns(columns)
    prompts = []
    for number, row in _rows_of(path, codec) if rows is None else numbered(rows):
        try:
            tokens, row, chat = _parse(row, codec, fields, path if path.is_dir() else path.parent)
            if outside := [token for token in tokens if not 0 <= token < vocab_size]:
                raise ValueError(f"token ids {outside[:3]} are outside the vocabulary of {vocab_size}")
            if max_tokens is not None and len(tokens) > max_tokens:
                raise ValueError(f"{len(tokens)} tokens are more than {limit} {max_tokens}; {fix}")
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: {error}") from None
        prompts.append(Prompt(tokens, row, number, chat))
    if not prompts:
        raise ValueError(f"{path} has no lines; write at least one prompt into it")
    return prompts


def _rows_of(path: Path, codec: TextCodec) -> Iterator[Row]:
    """Yield the rows of an environment, a file or a folder; rows of JSON lines are bytes."""
    if str(path).startswith(reasoning_gym.PREFIX):
        return numbered(reasoning_gym.rows(str(path), "messages" if codec.chats else "text"))
    if path.is_dir():
        return dataset_rows(path)
    if (files := hub_files(str(path))) is not None:
        return numbered(row for file in files for _, row in _rows_of(file, codec))
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; give a .jsonl, .csv or .parquet file, a folder that `datasets` has saved, or data "
            "on a hub as organisation/name:FILES"
        )
    return {".parquet": parquet_rows, ".csv": csv_rows}.get(path.suffix, _json_lines)(path)


def _json_lines(path: Path) -> Iterator[Row]:
    """Yield the lines that are not blank."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    # Only "\n" ends a line: JSON allows the other line separators of Unicode inside a string.
    return ((number, line) for number, line in numbered(data.split(b"\n")) if line.strip())


def read_json(file: Path) -> Any:
    """Return the value of a JSON file; the error of `parse_json` names the file."""
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is {error}") from None


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not UTF-8 or not valid JSON, or its lists and objects are nested too deeply for Python.
    """
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: byte {error.start} is not UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not valid JSON: lists and objects are nested too deeply; flatten them") from None


def vocabulary_size(folder: Path) -> int:
    """Return the vocabulary size of a checkpoint of any family, from its `config.json`."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; pass a checkpoint folder with a config.json")
    values = read_json(file)
    try:
        return int((values.get("text_config") or values)["vocab_size"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} states no vocab_size") from None


def _no_prompt(value: Any) -> str:
    """Return what is wrong with a row that has no prompt, or more than one."""
    wanted = 'expected an object with one of "tokens" (a list of ids), "text" (a string) and "messages"'
    if not isinstance(value, dict):
        return f"{wanted}, got {type(value).__name__}"
    named = ", ".join(f'"{name}"' for name in list(value)[:8])
    other = next((name for name in value if isinstance(value[name], str)), None)
    hint = f"; train takes another field by --columns text={other}" if other and not _KINDS & value.keys() else ""
    return f"{wanted}, got the fields {named or '(none)'}{hint}"


def _parse(
    given: Any, codec: TextCodec, columns: Mapping[str, str], base: Path
) -> tuple[list[int], dict[str, Any], ImageChat | None]:
    value = parse_json(given) if isinstance(given, bytes) else given
    if isinstance(value, Mapping):
        value = renamed(value, columns, _KINDS)
    if not isinstance(value, dict) or len(_KINDS & value.keys()) != 1:
        raise ValueError(_no_prompt(value))
    if "text" in value:
        if not isinstance(value["text"], str):
            raise ValueError(f'"text" must be a string, got {type(value["text"]).__name__}')
        tokens, chat = codec.encode(value["text"]), None
    elif "messages" in value:
        messages = value["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ValueError(
                '"messages" must be a list of objects, such as [{"role": "user", "content": "..."}], or the text of '
                "one message of the user"
            )
        chat = codec.image_chat(messages, value, base) if is_seen(messages) else None
        tokens = codec.chat(messages, value.get("tools")) if chat is None else chat.process()[0]
    else:
        tokens, chat = value["tokens"], None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError('"tokens" must be a list of integers')
    if not tokens:
        raise ValueError("no tokens")
    return tokens, value, chat
