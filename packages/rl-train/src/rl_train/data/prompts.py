"""Read prompts: rows with `"tokens": [ids]`, `"text": "..."` or a chat's `"messages": [...]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from ckpt import Checkpoint
from ckpt.files import Store
from rl_train.data.chat import name_of
from rl_train.data.codec import TextCodec, whole
from rl_train.data.images import ImageChat, is_seen
from rl_train.data.mixture import Key, read_sources
from rl_train.data.sources import (
    Row,
    csv_rows,
    dataset_rows,
    files_of,
    is_folder,
    json_lines,
    parquet_rows,
    parse_columns,
    parse_json,
    place,
    python_rows,
    renamed,
)
from rl_train.environments import reasoning_gym, verifiers

# The fields that hold a prompt; a row has exactly one.
KINDS = {"tokens", "text", "messages"}
# A text in the fields of chats and tools is JSON if it begins as a chat or a schema does.
_JSON_TEXT = re.compile(r"""\s*\[?\s*\{(?=.*["'](role|name)["'])""", re.DOTALL)


@dataclass(frozen=True)
class Prompt:
    """One row of a source: at least one token id, the whole row, and the number of the line or row, from 1.

    `chat` is a chat with images, which `load_images` loads; None without images. `teacher` are the tokens of the
    teacher's prompt, where it has one. `source` is the file, and `key` the place in a `Mixture` that has drawn the row.
    """

    tokens: list[int]
    row: Mapping[str, Any]
    line: int
    chat: ImageChat | None = None
    teacher: list[int] | None = None
    source: Path = Path("rows")
    key: Key = (0, 0, 0)

    @property
    def place(self) -> str:
        """Return the text that names the row in errors."""
        return place(self.source, self.line)


@dataclass(frozen=True)
class RowReader:
    """Reads rows for a model; a subclass has a method `read`, as a `Reader` has.

    Attributes:
        model: The checkpoint folder, for its vocabulary and tokenizer.
        system_prompt, tools: See `TextCodec`.
        columns: See `rl_train.data.sources.parse_columns`.
    """

    # The fields that hold what a model reads.
    kinds: ClassVar[Set[str]] = KINDS

    model: Path
    system_prompt: str | None = None
    columns: str = ""
    tools: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def _codec(self) -> TextCodec:
        return TextCodec(self.model, self.system_prompt, self.tools)

    @cached_property
    def _vocab_size(self) -> int:
        return vocabulary_size(self.model)

    def rows(self, source: Path, rows: Iterable[Any] | None = None, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield the number and the fields of each row; see `read_rows`."""
        _ = self._vocab_size  # a wrong checkpoint is an error before any row
        files = self._files.setdefault(source, {})
        return read_rows(source, self._codec, self.columns, self.kinds, rows, start, files)

    @cached_property
    def _files(self) -> dict[Path, dict[int, Path]]:
        """Return the files of each source that are read so far, by the number of rows before them."""
        return {}


@dataclass(frozen=True)
class PromptReader(RowReader):
    """Reads prompts.

    Attributes:
        teacher: The column with the teacher's prompt, of the same kind as the row's prompt.
    """

    teacher: str | None = None

    def read(self, source: Path, number: int, row: Any) -> Prompt:
        """Return the prompt of a row; ValueError, which names the row, for a wrong one."""
        try:
            tokens, row, chat = _parse(row, self._codec, partial(self._base, source, number))
            of_teacher = (
                None if self.teacher is None else _parse_teacher(row, self.teacher, self._codec, seen=chat is not None)
            )
            require_ids((*tokens, *(of_teacher or ())), self._vocab_size)
        except ValueError as error:
            raise ValueError(f"{place(source, number)}: {error}") from None
        return Prompt(tokens, row, number, chat, of_teacher, source)

    def _base(self, source: Path, number: int) -> Path:
        """Return the folder at which relative paths of a row's images begin; a store is asked once for each file."""
        files = self._files.get(source, {})
        file = files.get(max((before for before in files if before < number), default=-1), source)
        if file not in self._bases:
            self._bases[file] = file if is_folder(file) else file.parent
        return self._bases[file]

    @cached_property
    def _bases(self) -> dict[Path, Path]:
        return {}


def read_prompts(
    path: Path, model: Path, max_tokens: int | None, *, rows: Iterable[Any] | None = None, **options: Any
) -> list[Prompt]:
    """Read the rows of a source: `.jsonl`, `.parquet` or `.csv` files, a folder of `datasets`, an environment, a hub.

    Args:
        path: The file or folder, or the name of the environment.
        model: The checkpoint folder, for its vocabulary and tokenizer.
        max_tokens: Maximum number of tokens in a row; None for no maximum.
        rows: Mappings that replace the file, see `python_rows`; errors name them by `path`.
        **options: Other attributes of `PromptReader`.

    Raises:
        ValueError: The source cannot be read or has no rows; or a row is wrong, has ids outside the vocabulary, or has
            too many tokens: the error names the row.
    """
    prompts, _ = read_sources(PromptReader(model, **options), [path], rows)
    for prompt in prompts:
        if max_tokens is not None and len(prompt.tokens) > max_tokens:
            fix = "give a larger --max-tokens, or shorten the row"
            raise ValueError(
                f"{prompt.place}: {len(prompt.tokens)} tokens are more than --max-tokens {max_tokens}; {fix}"
            )
    return prompts


def read_rows(
    path: Path,
    codec: TextCodec,
    columns: str,
    kinds: Set[str],
    rows: Iterable[Any] | None,
    start: int,
    files: dict[int, Path],
) -> Iterator[tuple[int, Any]]:
    """Yield the number and the fields of each row; see `read_prompts` for the sources.

    Args:
        path, columns, rows: The source.
        codec: The tokenizer.
        kinds: The fields that hold what a model reads; `columns` may give one of them in place of the others.
        start: The number of rows before the first one.
        files: Takes each file of a source of several files, by the number of rows before it, when it is opened.

    Raises:
        ValueError: The source or a row cannot be read; the error names the row.
    """
    fields = parse_columns(columns)
    for number, source_row in _rows_of(path, codec, start, files) if rows is None else python_rows(rows):
        try:
            row = parse_json(source_row) if isinstance(source_row, bytes) else source_row
            if isinstance(row, Mapping):
                row = _recognised(renamed(row, fields, kinds), kinds)
                row = _fields(row, kinds, exact=isinstance(source_row, bytes))
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: {error}") from None
        yield number, row


def _recognised(row: dict[str, Any], kinds: Set[str]) -> dict[str, Any]:
    """Return a row with the fields for columns of TRL (`prompt`) and verl (`reward_model.ground_truth`)."""
    prompt, judge = row.get("prompt"), row.get("reward_model")
    if "prompt" not in kinds and not kinds & row.keys() and isinstance(prompt, str | list) and prompt:
        is_chat = _JSON_TEXT.match(prompt) if isinstance(prompt, str) else isinstance(prompt[0], Mapping)
        row = row | {"messages" if is_chat else "text" if isinstance(prompt, str) else "tokens": prompt}
    if "answer" not in row and isinstance(judge, Mapping) and judge.get("ground_truth") is not None:
        row = row | {"answer": judge["ground_truth"]}
    return row


def require_ids(tokens: Iterable[int], vocab_size: int) -> None:
    """Raise ValueError for token ids outside the vocabulary."""
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"token ids {outside[:3]} are outside the vocabulary of {vocab_size}")


def _rows_of(path: Path, codec: TextCodec, start: int, opened: dict[int, Path]) -> Iterator[Row]:
    """Yield the rows of a source after the first `start` ones; rows of JSON lines are bytes.

    `opened` takes the files of a source of several files, as `files` of `read_rows`.
    """
    for source in (reasoning_gym, verifiers):
        if str(path).startswith(source.PREFIX):
            rows = source.rows(str(path), "messages" if codec.chats else "text")
            return islice(enumerate(rows, 1), start, None)
    if (files := files_of(str(path))) is not None:
        return islice(_rows_of_files(files, codec, opened), start, None)
    if is_folder(path):
        return islice(dataset_rows(path), start, None)
    if Store.of(path) is None and not path.exists():
        raise ValueError(
            f"{path} does not exist; give a .jsonl, .csv or .parquet file, a pattern such as 'rows/*.jsonl', a folder "
            "that `datasets` has saved, data on a hub as organisation/name:FILES, or a URL such as s3://bucket/rows.csv"
        )
    if path.suffix == ".parquet":
        return parquet_rows(path, start)
    return islice((csv_rows if path.suffix == ".csv" else json_lines)(path), start, None)


def _rows_of_files(files: Sequence[Path], codec: TextCodec, opened: dict[int, Path]) -> Iterator[Row]:
    number = 0
    for file in files:
        opened[number] = file
        for _, row in _rows_of(file, codec, 0, {}):
            number += 1
            yield number, row


def vocabulary_size(folder: Path) -> int:
    """Return the vocabulary size of a checkpoint of any family, from its `config.json`."""
    size = Checkpoint(folder).text.get("vocab_size")
    if type(size) is not int:
        raise ValueError(f"{folder / 'config.json'} states no vocab_size, got {size!r}; add the number of tokens")
    return size


def _no_prompt(value: Any) -> str:
    """Return the error for a row that has no prompt, or several."""
    expected = 'expected an object with one of "tokens" (a list of ids), "text" (a string) and "messages"'
    if not isinstance(value, dict):
        return f"{expected}, got {type(value).__name__}"
    field_names = ", ".join(f'"{name}"' for name in list(value)[:8])
    text_field = next((name for name in value if isinstance(value[name], str)), None)
    hint = (
        f"; train takes another field by --data.columns text={text_field}"
        if text_field and not KINDS & value.keys()
        else ""
    )
    return f"{expected}, got the fields {field_names or '(none)'}{hint}"


def _parse(
    value: Any, codec: TextCodec, base: Callable[[], Path]
) -> tuple[list[int], dict[str, Any], ImageChat | None]:
    if not isinstance(value, dict) or len(KINDS & value.keys()) != 1:
        raise ValueError(_no_prompt(value))
    if "text" in value:
        if not isinstance(value["text"], str):
            raise ValueError(f'"text" must be a string, got {type(value["text"]).__name__}')
        tokens, chat = codec.encode(value["text"]), None
    elif "messages" in value:
        messages = value["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise ValueError(
                '"messages" must be a list of objects, such as [{"role": "user", "content": "..."}], or the text of '
                "one message of the user"
            )
        chat = codec.image_chat(messages, value, base()) if is_seen(messages) else None
        tokens = codec.chat(messages, value.get("tools")) if chat is None else chat.process()[0]
    else:
        tokens, chat = value["tokens"], None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError(f'"tokens" must be a list of integers, got {type(tokens).__name__} {tokens!r:.60}')
    if not tokens:
        raise ValueError("no tokens")
    return tokens, value, chat


def _parse_teacher(row: Mapping[str, Any], column: str, codec: TextCodec, *, seen: bool) -> list[int]:
    """Return the tokens of the teacher's prompt, the column of a row whose own prompt may be `seen`, with images."""
    if column not in row:
        raise ValueError(f"there is no column {column!r} with the teacher's prompt; the columns are {', '.join(row)}")
    (kind,) = KINDS & row.keys()
    try:
        fields = _fields({kind: row[column], "tools": row.get("tools")}, KINDS, exact=False)
        tokens, _, chat = _parse(fields, codec, Path)
    except ValueError as error:
        raise ValueError(f"the teacher's prompt, column {column!r}: {error}") from None
    if seen or chat is not None:
        raise ValueError(f"a row with images has no teacher's prompt, column {column!r}; leave the images out")
    return tokens


def _fields(row: dict[str, Any], kinds: Set[str], *, exact: bool) -> dict[str, Any]:
    """Return a row without empty columns of prompts and tools, and with its chat as lists and mappings.

    Args:
        row: The row.
        kinds: The fields that hold what a model reads.
        exact: Whether a null in a chat means null, as in JSON. In Arrow's rows each mapping has the keys of all
            mappings, and null means that the key is absent.
    """
    for name, value in row.items():
        for text in _texts(value):
            try:
                whole(text)
            except ValueError as error:
                raise ValueError(f'"{name}": {error}') from None
    row = {name: value for name, value in row.items() if value is not None or name not in kinds | {"tools"}}
    for name in ((kinds | {"tools"}) - {"text", "tokens"}) & row.keys():
        value = row[name]
        if isinstance(value, str) and (name == "tools" or _JSON_TEXT.match(value)):
            try:
                value = parse_json(value.encode())
            except ValueError as error:
                raise ValueError(f'"{name}" is a text that begins like JSON, but {error}; write it as JSON') from None
        row[name] = value if exact else _without_nulls(value)
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(name_of(tool) for tool in tools)):
        raise ValueError(
            '"tools" must be a list of JSON schemas, such as [{"type": "function", "function": {"name": "add", ...}}], '
            f"or its JSON text; got {tools!r:.200}"
        )
    return row


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for entry in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(entry)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
