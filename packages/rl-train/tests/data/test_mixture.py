"""Rows of several sources: shares, orders, windows in memory, places, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from parallel_layers.module import python_random
from rl_train.data.mixture import Mixture, by_source, check_mixture, mixture_of, read_sources, split_sources
from rl_train.data.prompts import PromptReader
from rl_train.data.sources import parquet_rows
from rl_train.options.groups import MixtureOptions


@dataclass(frozen=True)
class Entry:
    source: Path
    number: int


@dataclass
class Numbers:
    """Reads sources such as `7`, of seven rows, without those whose number `drops`; counts the rows it yields."""

    drops: int = 0
    yielded: list[tuple[Path, int]] = field(default_factory=list)

    def rows(self, source: Path, rows: Any = None, start: int = 0) -> Iterator[tuple[int, Any]]:
        for number in range(start, int(str(source))):
            self.yielded.append((source, number))
            yield number, number

    def read(self, source: Path, number: int, row: Any) -> Entry | None:
        return None if self.drops and number % self.drops == 1 else Entry(source, number)


sizes = st.lists(st.integers(2, 9), min_size=1, max_size=4, unique=True)


@given(sizes, st.data(), st.integers(0, 4), st.integers(0, 5), st.integers(0, 60), st.integers(0, 3))
def test_rows_in_proportion_and_once_a_pass_also_after_a_resume(
    counts: list[int], data: st.DataObject, window: int, seed: int, killed: int, drops: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(counts), max_size=len(counts)))
    paths = Path(",".join(map(str, counts)))
    options = MixtureOptions(weights=",".join(map(str, weights)), shuffle_buffer=window)
    drops = 0 if drops < 2 else drops  # of row 1, so that each source keeps a row
    rows, dropped = read_sources(Numbers(drops), split_sources(paths))
    assert dropped == sum(len(range(1, count, drops)) for count in counts if drops)

    def made() -> Mixture[Any]:
        return mixture_of(paths, options, seed, rows, Numbers(drops))

    mixture = made()
    taken = mixture.take(80)
    for total in range(1, 81):
        for number, weight in enumerate(weights):
            count = sum(key[0] == number for key, _ in taken[:total])
            surplus = count - total * weight / sum(weights)
            assert -max(1, len(weights) - 1) < surplus < 1
    for number, count in enumerate(counts):
        of_source = [row.number for key, row in taken if key[0] == number]
        every = sorted(row.number for row in rows if row.source == Path(str(count)))
        for start in range(0, len(of_source) - len(every) + 1, len(every)):
            assert sorted(of_source[start : start + len(every)]) == every, "each row once a pass"
    half, again = made(), made()
    half.take(killed)
    again.resume(json.loads(json.dumps(half.state)), 0)
    assert again.take(80 - killed) == taken[killed:]
    assert all(again.get(key) == row for key, row in taken)


def test_orders_differ_between_passes_sources_windows_and_seeds() -> None:
    def order(path: str, seed: int, window: int = 0, begin: int = 0) -> list[int]:
        reader = Numbers()
        options = MixtureOptions(shuffle_buffer=window, weights="1,1" if "," in path else "")
        rows, _ = read_sources(reader, split_sources(Path(path)))
        taken = mixture_of(Path(path), options, seed, rows, reader).take(begin + 40)[begin:]
        return [row.number for _, row in taken]

    whole = order("40", 1)
    assert sorted(whole) == list(range(40))
    assert whole not in (order("40", 2), order("40", 1, begin=40), list(range(40)))
    windows = order("40", 1, window=10)
    assert [sorted(windows[start : start + 10]) for start in range(0, 40, 10)] == [
        list(range(start, start + 10)) for start in range(0, 40, 10)
    ]
    assert [number - 10 for number in windows[10:20]] != windows[:10]
    first, second = order("20,19", 1)[::2], order("20,19", 1)[1::2]
    assert [number for number in first if number < 19] != second


def test_a_window_at_a_time_is_read_and_a_resumed_run_reads_none_before_it() -> None:
    reader, options = Numbers(), MixtureOptions(shuffle_buffer=10)
    mixture = mixture_of(Path("1000"), options, 3, [], reader)
    mixture.take(25)
    assert len(reader.yielded) == 30
    again, fresh = Numbers(), mixture_of(Path("1000"), options, 3, [], Numbers())
    fresh = mixture_of(Path("1000"), options, 3, [], again)
    fresh.resume(mixture.state, 0)
    assert fresh.take(5) == mixture.take(5)
    assert [number for _, number in again.yielded] == list(range(20, 30))


def test_rows_of_files_a_window_at_a_time_are_those_that_are_read_whole(model: Path, tmp_path: Path) -> None:
    letters = tmp_path / "letters.jsonl"
    letters.write_text("".join(json.dumps({"text": letter}) + "\n\n" for letter in "abcdefgh"))
    reader = PromptReader(model)
    whole, _ = read_sources(reader, [letters])
    taken = mixture_of(letters, MixtureOptions(shuffle_buffer=3), 0, [], reader).take(8)
    assert sorted((prompt.line, prompt.row["text"]) for _, prompt in taken) == [
        (prompt.line, prompt.row["text"]) for prompt in whole
    ]
    letters.write_text("")
    with pytest.raises(ValueError, match="a source has lost its rows since the run began; put them back"):
        mixture_of(letters, MixtureOptions(shuffle_buffer=3), 0, [], reader).take(1)


def test_parquet_skips_groups_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, rows = tmp_path / "rows.parquet", [{"text": str(number)} for number in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
    read, batches = list[Any](), parquet.ParquetFile.iter_batches

    def iter_batches(*arguments: Any, row_groups: Any) -> Any:
        read.append([*row_groups])
        return batches(*arguments, row_groups=row_groups)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    for start in range(12):
        assert list(parquet_rows(path, start)) == list(enumerate(rows, 1))[start:]
    assert read == [[0, 1, 2]] * 4 + [[1, 2]] * 4 + [[2]] * 2 + [[]] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("a.jsonl, b/c.csv", ["a.jsonl", "b/c.csv"]),
        ("reasoning_gym:sum,size=3,max=4,b.jsonl", ["reasoning_gym:sum,size=3,max=4", "b.jsonl"]),
        ("verifiers:x,select.limit=9,org/name@v1:train", ["verifiers:x,select.limit=9", "org/name@v1:train"]),
    ],
)
def test_sources_are_split_at_commas(text: str, expected: list[str]) -> None:
    assert [str(path) for path in split_sources(Path(text))] == expected


def test_a_file_with_a_comma_in_its_name_is_one_source(tmp_path: Path) -> None:
    (tmp_path / "a,b.jsonl").touch()
    assert split_sources(tmp_path / "a,b.jsonl") == [tmp_path / "a,b.jsonl"]


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ("a,a", {}, "a,a must be different sources with commas, each once"),
        ("a,b", {"weights": "1,2,3"}, "data.weights=1,2,3 has 3 weights for 2 sources: a,b"),
        ("a,b", {"shuffle_buffer": 9}, "shuffle_buffer=9 reads sources without counting .*; give data.weights"),
    ],
)
def test_wrong_mixtures_are_refused(sources: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_mixture(Path(sources), MixtureOptions(**options), None)


def test_weights_are_above_zero_and_rows_of_python_have_no_buffer() -> None:
    with pytest.raises(ValueError, match="must be numbers above 0 with commas, such as 3,1"):
        MixtureOptions(weights="1,0")
    with pytest.raises(ValueError, match=r"data.shuffle_buffer is for files, and rows of Python are in memory"):
        check_mixture(Path("dataset"), MixtureOptions(shuffle_buffer=2), [])


def test_metrics_of_sources_have_short_names() -> None:
    torch = pytest.importorskip("torch")
    rows = [Entry(Path(name), 0) for name in ("x/math.jsonl", "y/math.jsonl", "code.csv", "code.csv")]
    sources = Path("x/math.jsonl,y/math.jsonl,code.csv")
    assert by_source(sources, rows, torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])) == {
        "source_share/x/math.jsonl": 0.25, "source_reward/x/math.jsonl": 0.5, "source_share/y/math.jsonl": 0.25,
        "source_reward/y/math.jsonl": 1.0, "source_share/code": 0.5, "source_reward/code": 0.25,
    }  # fmt: skip
    assert by_source(Path("code.csv"), rows) == {}
    assert list(itertools.islice(by_source(sources, rows[:1]), 1)) == ["source_share/x/math.jsonl"]


def test_a_run_from_before_there_were_several_sources_goes_on_with_its_rows() -> None:
    rows = [Entry(Path("rows"), number) for number in range(5)]
    before, after = (Mixture.of_rows(rows, 3) for _ in range(2))
    before.take(7)
    after.resume({}, 7)
    assert after.state == before.state
    # The order that these runs had: a sample of all rows in each pass.
    order = [row for number in range(2) for row in python_random(3, number).sample(range(5), 5)]
    assert [row.number for _, row in Mixture.of_rows(rows, 3).take(10)] == order
