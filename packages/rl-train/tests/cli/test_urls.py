"""Errors name a URL with all its slashes, as it was given."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.loop.resume import check_options
from rl_train.options.fields import as_path
from rl_train.options.file_options import SftOptions


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Objects that are wrong in different ways."""
    store, deep = fsspec.filesystem("memory"), '{"text": "a"}\n{"text": 3}\n'
    texts = {"rows.jsonl": deep, "rows.csv": "text,x\na\n", "rows.parquet": "no parquet", "saved/data.arrow": "x"}
    texts |= {"splits/dataset_dict.json": "{}", "empty.jsonl": "", "broken.jsonl": "{\n", "run/options.json": "[]"}
    texts |= {"page.html": "mine"}
    for name, text in texts.items():
        store.pipe_file(f"/bucket/{name}", text.encode())
    yield
    store.store.clear()


TRAIN = "train --model MODEL --reward rewards:alphabet --device cpu --out OUT --prompts"
SFT = "sft --model MODEL --device cpu --out OUT --dataset"


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *[(f"{TRAIN} {url}", url) for url in ("memory://bucket/rows.jsonl", "memory://bucket/rows.csv")],
        *[(f"{TRAIN} {url}", url) for url in ("memory://bucket/rows.parquet", "memory://bucket/saved")],
        *[(f"{TRAIN} {url}", url) for url in ("memory://bucket/splits", "memory://bucket/empty.jsonl")],
        *[(f"{TRAIN} {url}", url) for url in ("memory://bucket/nothing.jsonl", "memory://bucket/broken.jsonl")],
        *[(f"{TRAIN} {url}", url) for url in ("memory://bucket/*.json", "nostore://bucket/rows.jsonl")],
        (f"{TRAIN} memory://bucket/rows.jsonl,memory://bucket/rows.jsonl", "memory://bucket/rows.jsonl,"),
        (f"{TRAIN} rows.jsonl,memory://bucket/rows.jsonl --data.weights 1,2,3", "rows.jsonl,memory://bucket/rows.jsonl"),
        (f"{TRAIN} one.jsonl --evaluation.prompts memory://bucket/rows.jsonl", "memory://bucket/rows.jsonl"),
        (f"{TRAIN} one.jsonl --model memory://bucket/nowhere", "memory://bucket/nowhere"),
        (f"{TRAIN} one.jsonl --out nostore://bucket/run", "nostore://bucket/run"),
        (f"{SFT} memory://bucket/rows.jsonl", "memory://bucket/rows.jsonl"),
        (f"{SFT} one.jsonl --evaluation.dataset memory://bucket/nowhere", "memory://bucket/nowhere"),
        ("report memory://bucket/run", "memory://bucket/run"),
        ("report memory://bucket/nowhere", "memory://bucket/nowhere"),
        ("compare memory://bucket/run memory://bucket/run", "memory://bucket/run, memory://bucket/run"),
        ("export memory://bucket/run OUT", "memory://bucket/run"),
        ("export memory://bucket/saved OUT", "memory://bucket/saved"),
        ("score --model MODEL --device cpu --data memory://bucket/rows.jsonl", "memory://bucket/rows.jsonl"),
        ("score --model MODEL --device cpu --data one.jsonl --out memory://bucket/scores", "memory://bucket/scores"),
        ("generate MODEL --device cpu --prompts memory://bucket/rows.jsonl", "memory://bucket/rows.jsonl"),
        ("generate MODEL --device cpu --prompts one.jsonl --out memory://bucket/rows", "memory://bucket/rows"),
        ("evaluate MODEL --device cpu --reward rewards:alphabet --prompts memory://bucket/empty.jsonl", "memory://bucket"),
        ("quickstart --out memory://bucket/run", "memory://bucket/run"),
    ],
)  # fmt: skip
def test_errors_name_urls_as_they_were_given(
    command: str, url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    for name in ("one.jsonl", "rows.jsonl"):
        Path(name).write_text('{"text": "a"}\n')
    names = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    result = CliRunner().invoke(app, [names.get(word, word) for word in command.split()])
    text = " ".join(result.output.split())
    assert result.exit_code == 2, text
    assert url in text
    assert not re.search(r"(memory|nostore):/(?!/)|Path\(", text), text
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(":")], "no folder of the scheme's name"


@pytest.mark.parametrize(
    ("text", "parent"),
    [
        ("s3://bucket/rows.jsonl", "s3://bucket"),
        ("file:///data/rows.jsonl", "file:///data"),
        ("rows.jsonl,s3://a/b,gs://c/d", "rows.jsonl,s3://a/b,gs://c"),
        ("rows.jsonl, s3://a/b", "rows.jsonl, s3://a"),
        ("rows/a.jsonl", "rows"),
        ("organisation/name:train", "organisation"),
    ],
)
def test_a_path_has_the_text_of_its_url(text: str, parent: str) -> None:
    path = as_path(Path(text))
    assert [str(path), str(path.parent), str(path.parent / path.name)] == [text, parent, text]
    assert pickle.loads(pickle.dumps(path)) == path == as_path(text)
    assert str(pickle.loads(pickle.dumps(path))) == text


def test_a_run_whose_options_have_a_url_with_one_slash_goes_on() -> None:
    options = SftOptions(model=Path("s3://bucket/model"), dataset=Path("a.jsonl,s3://bucket/rows.jsonl"))
    now = options.to_json() | {"command": "sft"}
    assert (now["model"], now["dataset"]) == ("s3://bucket/model", "a.jsonl,s3://bucket/rows.jsonl")
    earlier = {name: value.replace("://", ":/") if isinstance(value, str) else value for name, value in now.items()}
    check_options(options, earlier)
    with pytest.raises(ValueError, match=r"with model='s3:/bucket/other', this one has 's3://bucket/model'"):
        check_options(options, earlier | {"model": "s3:/bucket/other"})
