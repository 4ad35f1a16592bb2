"""The same rows from JSON lines, CSV, Parquet and a folder of `datasets`; columns of other names; broken sources."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rl_train.data.prompts import read_prompts
from rl_train.data.sources import place

ROWS = [
    {"question": "ab", "answer": "1, or 2"},
    {"question": "c\u2028d", "answer": "3\n4"},
    {"question": "é", "answer": ""},
]


def write(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows of texts in one of the forms, and return the file or folder."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        lines = [rows[0], *(row.values() for row in rows)]
        path.write_text("".join(",".join(f'"{value}"' for value in line) + "\r\n" for line in lines), newline="")
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path, datasets = folder / "saved", pytest.importorskip("datasets")
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        # With a fingerprint of its own: some releases of dill cannot compute the one of a table.
        datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows").save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder"])
def test_every_source_gives_the_same_rows(model: Path, tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path, ROWS)
    found = read_prompts(path, model, 9, columns="text=question,right=answer")
    assert [prompt.row for prompt in found] == [row | {"text": row["question"], "right": row["answer"]} for row in ROWS]
    expected = [2, 4, 5] if kind == "csv" else [1, 2, 3]  # a line for the names, and a value of two lines
    assert [prompt.line for prompt in found] == expected
    unit = "row 2" if kind in ("parquet", "folder") else f"line {expected[1]}"
    with pytest.raises(ValueError, match=f"{path}, {unit}: 4 tokens are more than --max-tokens 3"):
        read_prompts(path, model, 3, columns="text=question")
    with pytest.raises(ValueError, match=r"there is no column 'prompt'; the columns are 'question', 'answer'"):
        read_prompts(path, model, 9, columns="text=prompt")
    said = r'expected an object with one of "tokens" .*"messages", got the fields "question", "answer"; train takes '
    with pytest.raises(ValueError, match=f"{said}another field by --data.columns text=question"):
        read_prompts(path, model, 9)


@pytest.mark.parametrize("at_url", [False, True])
def test_a_file_whose_name_looks_like_a_pattern(
    model: Path, tmp_path: Path, upload: Callable[[Path, str], None], *, at_url: bool
) -> None:
    for name, text in (("a1.jsonl", "a"), ("a[1].jsonl", "b")):
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n")
    upload(tmp_path, "memory://rows")
    base = "memory://rows" if at_url else str(tmp_path)
    for source, texts in (("*.jsonl", ["a", "b"]), ("a[1].jsonl", ["b"]), ("a[12].jsonl", ["a"])):
        assert [prompt.row["text"] for prompt in read_prompts(Path(f"{base}/{source}"), model, 9)] == texts


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder"])
@pytest.mark.parametrize("at_url", [False, True])
def test_patterns_of_files_and_folders_at_urls(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    upload: Callable[[Path, str], None],
    kind: str,
    *,
    at_url: bool,
) -> None:
    for name, row in zip("bca", (ROWS[1], ROWS[2], ROWS[0]), strict=True):
        (tmp_path / name).mkdir()
        file = write(kind, tmp_path / name, [row]).name
    upload(tmp_path, "memory://rows")
    listings, files = list[bool](), type(fsspec.filesystem("memory"))
    monkeypatch.setattr(files, "invalidate_cache", lambda *_: listings.append(True))
    base = "memory://rows" if at_url else tmp_path
    found = read_prompts(path := Path(f"{base}/*/{file}"), model, 9, columns="text=question")
    assert [prompt.row["question"] for prompt in found] == [row["question"] for row in ROWS]
    assert [prompt.line for prompt in found] == [1, 2, 3]
    assert bool(listings) == at_url, "stores keep listings of before"
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, row 2: 4 tokens are more than --max-tokens 3"):
        read_prompts(path, model, 3, columns="text=question")
    with pytest.raises(ValueError, match=r"no file matches .*/d/\*; give the pattern of existing files"):
        read_prompts(Path(f"{base}/d/*"), model, 9)
    whole = read_prompts(path := Path(f"{base}/a/{file}"), model, 9, columns="text=question")
    assert [prompt.row["question"] for prompt in whole] == [row["question"] for row in ROWS[:1]]
    assert place(path, 2).endswith(f"{file}, {'line' if kind in ('jsonl', 'csv') else 'row'} 2")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder"])
def test_a_local_name_with_a_colon_is_not_of_a_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write(kind, tmp_path, ROWS)
    (tmp_path / "data").mkdir()
    named = path.rename(tmp_path / "data" / f"run:{path.name}").relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = read_prompts(named, model, 9, columns="text=question")
    assert [prompt.row["question"] for prompt in found] == [row["question"] for row in ROWS]
    with pytest.raises(ValueError, match=f"{named}, {'line' if kind in ('jsonl', 'csv') else 'row'} "):
        read_prompts(named, model, 3, columns="text=question")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_lists_of_ids_and_the_prompt_among_several_columns(model: Path, tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path, [{"text": "a", "ids": [4, 5]}, {"text": "b", "ids": [6]}])
    assert [prompt.tokens for prompt in read_prompts(path, model, 9, columns="tokens=ids")] == [[4, 5], [6]]


@pytest.mark.parametrize("text", ["text", "=a", "text=", "text=a,text=b"])
def test_columns_that_cannot_be_read_are_named(model: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=f"columns='{text}' must be field=column, such as text=question"):
        read_prompts(write("jsonl", tmp_path, ROWS), model, 9, columns=text)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", b"text,answer\nx\n", "a.csv, line 2: expected 2 values, as in the first line"),
        ("a.csv", b"text\nx,y\n", "a.csv, line 2: expected 1 values"),
        ("a.csv", b'text\n"x\n', "cannot read .*a.csv as CSV: unexpected end of data"),
        ("a.csv", b"text\n\xff\n", "cannot read .*a.csv as CSV: 'utf-8' codec"),
        ("a.csv", b"text\n", "a.csv has no lines"),
        ("no.csv", None, r"no.csv does not exist; give a .jsonl, .csv or .parquet file, a pattern"),
        ("folder/other.txt", b"", "folder is no folder that save_to_disk of `datasets` has written"),
        ("folder/dataset_dict.json", b"{}", "folder has the splits test, train; give the folder of one of them"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(
    model: Path, tmp_path: Path, name: str, content: bytes | None, error: str
) -> None:
    file = tmp_path / name
    for split in ("train", "test"):
        (tmp_path / "folder" / split).mkdir(parents=True)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=error):
        read_prompts(tmp_path / "folder" if name.startswith("folder") else file, model, 9)


def test_a_broken_parquet_file_is_named(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name, error in (
        ("a.parquet", "cannot read .*a.parquet as Parquet"),
        ("no.parquet", "no.parquet does not exist"),
    ):
        with pytest.raises(ValueError, match=error):
            read_prompts(tmp_path / name, model, 9)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
@pytest.mark.parametrize("call", ["isdir", "open", "readinto"])
def test_a_store_that_fails_at_any_time_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, upload: object, name: str, call: str
) -> None:
    """Stores raise errors of their own, which are no OSErrors, also in the middle of an object."""
    if name == "rows.parquet":
        pytest.importorskip("pyarrow")
    files = fsspec.filesystem("memory")

    def gone(*arguments: object, **options: object) -> int:
        raise RuntimeError("the network is gone")

    class Lost(io.RawIOBase):
        readable = seekable = lambda self: True
        readinto = seek = gone

    monkeypatch.setattr(type(files), "open", lambda *_: io.BufferedReader(Lost()))
    monkeypatch.setattr(type(files), call, gone, raising=False)
    with pytest.raises(ValueError, match=rf"memory://bucket/{name} cannot be read: .*the network is gone"):
        read_prompts(Path(f"memory://bucket/{name}"), model, 9)


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "a.parquet"), ("datasets", "saved")])
def test_an_extra_that_is_missed_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").touch()
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=rf"{name} needs .*; pip install 'datasets>=4'"):
        read_prompts(tmp_path / name, model, 9)


def test_files_of_a_data_set_on_a_hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the hub may hold files that an earlier run needed, too."""
    (tmp_path / "main").mkdir()
    for name, letter in (("main/train-1.jsonl", "b"), ("main/train-0.csv", "a"), ("main/test.jsonl", "c")):
        (tmp_path / name).write_text(f"text\n{letter}\n" if name.endswith("csv") else f'{{"text": "{letter}"}}\n')
    asked: list[object] = []
    monkeypatch.setattr(
        "parallel_models.engine.hub.download", lambda name, files, kind: asked.append((name, kind)) or str(tmp_path)
    )
    found = read_prompts(Path("org/letters@v1:main/train-"), model, 99)
    assert [prompt.row["text"] for prompt in found] == ["a", "b"]
    assert asked == [("org/letters@v1", "dataset")]
    with pytest.raises(ValueError, match="org/letters:main/other has no lines"):
        read_prompts(Path("org/letters:main/other"), model, 99)


def test_the_teachers_prompt_is_a_column_of_the_same_kind(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"text": "ab", "hint": "abc"}) + "\n" + json.dumps({"tokens": [4], "hint": [5, 6]}) + "\n"
    )
    one, two = read_prompts(path, model, None, teacher="hint")
    (plain,) = read_prompts(path, model, None, rows=[{"text": "abc"}])
    assert one.teacher == plain.tokens != one.tokens
    assert (two.tokens, two.teacher) == ([4], [5, 6])
    assert read_prompts(path, model, None)[0].teacher is None
    for row, message in {
        '{"text": "ab"}': "line 1: there is no column 'hint' with the teacher's prompt; the columns are text",
        '{"text": "ab", "hint": 3}': "the teacher's prompt, column 'hint': \"text\" must be a string, got int",
        '{"tokens": [4], "hint": [99]}': r"token ids \[99\] are outside the vocabulary of 30",
    }.items():
        path.write_text(row)
        with pytest.raises(ValueError, match=message):
            read_prompts(path, model, None, teacher="hint")
