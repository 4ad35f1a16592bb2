"""Rows of prompts from JSON lines, Parquet, CSV and saved `datasets`.

A source that cannot be read, or needs a library that is not installed, raises a ValueError with the source and the fix.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from ckpt.files import Store, mirrored
from rl_train.options.fields import as_path

# The number of a row in its source, from 1, and the row by column.
Row = tuple[int, Any]


def place(path: Path, number: int) -> str:
    """Return the text that names a source and the number of a row in errors."""
    # A pattern, or a name on a hub or of an environment.
    several = _PATTERN.search(str(path)) or (":" in str(path) and Store.of(path) is None)
    counts_rows = path.suffix == ".parquet" or is_folder(path) or (several and not path.exists())
    return f"{path}, {'row' if counts_rows else 'line'} {number}"


def python_rows(rows: Any) -> Iterator[Row]:
    """Yield rows from Python with their numbers; arrays, tensors and tuples become lists."""
    # Iterating over a table of pandas or Arrow yields its columns.
    if isinstance(rows, str | bytes | Mapping) or hasattr(rows, "columns") or not isinstance(rows, Iterable):
        raise ValueError(
            f"rows must be an iterable of mappings, such as a list of dicts, got {type(rows).__name__}; give a table "
            "as frame.to_dict('records') of pandas or table.to_pylist() of Arrow"
        )
    return enumerate((_plain(row) if isinstance(row, Mapping) else row for row in rows), 1)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if not hasattr(value, "tolist"):
        return value
    numbers = value.tolist()
    return _plain(numbers) if isinstance(numbers, list) else numbers


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file, or an object of a store by its URL, to read bytes; an error of the store is a ValueError."""
    if (store := Store.of(path)) is None:
        with open(path, "rb") as file:
            yield file
        return
    try:
        with store.files.open(store.path, "rb") as file:
            yield file
    except ValueError:  # of the content
        raise
    except Exception:
        with store.errors():
            raise


def exists(path: Path) -> bool:
    """Say whether a path or a URL names a file or a folder."""
    if (store := Store.of(path)) is None:
        return path.exists()
    with store.errors():
        return bool(store.files.exists(store.path))


def json_lines(path: Path) -> Iterator[Row]:
    """Yield the non-blank lines with their numbers."""
    try:
        # Only "\n" ends a line of bytes: JSON allows the other line separators of Unicode inside a string.
        with opened(path) as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def read_json(file: Path) -> Any:
    """Return the value of a JSON file; the error of `parse_json` names the file."""
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is {error}") from None


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text; the ValueError of another text begins with "not valid JSON"."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: byte {error.start} is not UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not valid JSON: lists and objects are nested too deeply; flatten them") from None


def parquet_rows(path: Path, start: int = 0) -> Iterator[Row]:
    """Yield the rows of a Parquet file after the first `start` ones, some thousands in memory at a time.

    Groups of rows that lie before `start` are not read.
    """
    try:
        from pyarrow import ArrowException, parquet  # of the extra `datasets`
    except ImportError:
        raise ValueError(f"{path} needs pyarrow; {_INSTALL}") from None
    try:
        with opened(path) as binary, parquet.ParquetFile(binary) as file:
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            ends = list(itertools.accumulate(sizes))
            first = bisect.bisect_right(ends, start)
            batches = file.iter_batches(4096, row_groups=range(first, len(ends)))
            rows = (row for record_batch in batches for row in record_batch.to_pylist())
            number = ends[first - 1] if first else 0
            yield from itertools.islice(enumerate(rows, number + 1), start - number, None)
    except (ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path} as Parquet: {error}") from None


def csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file as mappings from the names in its first line to texts."""
    try:
        with opened(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    count = len(reader.fieldnames or ())
                    raise ValueError(f"{place(path, reader.line_num)}: expected {count} values, as in the first line")
                yield reader.line_num, row
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as CSV: {error}") from None


def is_folder(path: Path) -> bool:
    """Say whether a path or a URL is a folder."""
    if (store := Store.of(path)) is None:
        return path.is_dir()
    with store.errors():
        return bool(store.files.isdir(store.path))


def dataset_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a folder that `save_to_disk` of the library `datasets` has written; a URL's is copied first."""
    with mirrored(path, lambda name: True) as folder:
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
            raise ValueError(f"{path} has the splits {', '.join(splits)}; give the folder of one of them, {path}/SPLIT")
        if not (folder / "dataset_info.json").is_file():
            raise ValueError(
                f"{path} is no folder that save_to_disk of `datasets` has written; give such a folder, a file, or a "
                f"pattern of files, such as '{path}/*.parquet'"
            )
        try:
            import datasets  # an extra
        except ImportError:
            raise ValueError(f"{path} needs the library datasets; {_INSTALL}") from None
        yield from enumerate(datasets.load_from_disk(str(folder)), 1)


def files_of(source: str) -> list[Path] | None:
    """Return the files of a source of several files, in the order of their paths; None for other sources.

    The source is a pattern, such as `rows/*.parquet` or `s3://bucket/rows/*.jsonl`, or a data set on a hub,
    `organisation/name[@revision]:FILES`. FILES is the beginning of the files' paths, such as `train` or
    `main/train-`. A file or folder of that name comes first.

    Raises:
        ValueError: No file matches, or the store or the hub cannot be read.
    """
    is_pattern = _PATTERN.search(source)
    if os.path.lexists(source) or (is_pattern and Store.of(source) and exists(Path(source))):
        return None
    if is_pattern:
        return _matching(source)
    name, colon, beginning = source.partition(":")
    if not colon or not beginning or not _HUB.fullmatch(name):
        return None
    from parallel_models.engine import download

    folder = Path(download(name, [f"{beginning}*{suffix}" for suffix in _SUFFIXES], kind="dataset"))
    files = sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES)
    return [file for file in files if file.relative_to(folder).as_posix().startswith(beginning)]


def _matching(pattern: str) -> list[Path]:
    if (store := Store.of(pattern)) is None:
        files = sorted(glob(pattern, recursive=True))
    else:
        with store.errors():
            store.files.invalidate_cache()
            files = [store.files.unstrip_protocol(name) for name in store.files.glob(store.path)]
    if not files:
        raise ValueError(f"no file matches {pattern}; give the pattern of existing files")
    return [*map(as_path, files)]


_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_PATTERN = re.compile(r"[*?[]")
_HUB = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_INSTALL = "pip install 'datasets>=4'"


def parse_columns(text: str) -> dict[str, str]:
    """Parse `--data.columns`: the fields of a row, each with the column, or `column.entry`, that fills it."""
    columns: dict[str, str] = {}
    for assignment in filter(None, text.split(",")):
        field, _, column = (name.strip() for name in assignment.partition("="))
        if not field or not column or field in columns:
            raise ValueError(f"columns={text!r} must be field=column, such as text=question,answer=solution, each once")
        columns[field] = column
    return columns


def renamed(row: Mapping[str, Any], columns: Mapping[str, str], prompts: Iterable[str]) -> dict[str, Any]:
    """Return a row with further fields from its columns.

    Args:
        row: The row.
        columns: The column of each field; see `parse_columns`.
        prompts: The fields that hold a prompt; a field of `columns` among these replaces the others.
    """
    kinds = set(prompts) if columns.keys() & set(prompts) else set()
    row_without_prompts = {name: value for name, value in row.items() if name not in kinds}
    return row_without_prompts | {field: _column(row, column) for field, column in columns.items()}


def _column(row: Mapping[str, Any], column: str) -> Any:
    """Return a column, or an entry inside a column of mappings, such as `reward_model.ground_truth`."""
    if column in row:
        return row[column]
    value: Any = row
    for step in column.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise ValueError(f"there is no column {column!r}; the columns are {', '.join(map(repr, row))}")
        value = value[step]
    return value
