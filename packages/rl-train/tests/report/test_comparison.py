"""`rl-train compare`: the table on the terminal, the page, and what a browser makes of it."""

import json
import re
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.report.comparison import Comparison

from .browser import ReportBrowser
from .test_html_report import content


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs whose prompts on the lines 1 and 2 are the same."""
    folders = [tmp_path / name for name in ("small", "large")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        options = {"algorithm": "grpo", "model": "smollm2", "reward": "exact-match", "steps": 4, "out": str(folder)}
        options |= {"optimizer.learning_rate": 1e-5 * (number + 1)} | ({"optimizer.momentum": 0.9} if number else {})
        metrics = [
            {"step": step, "reward": step / 8, "eval/reward": step / 9, "seconds": 2.0, "tokens_per_second": 500.0}
            | {"seconds_learning": 1.5 + number, "seconds_generating": 0.5}
            for step in range(1, 5 - number)
        ]
        metrics.insert(0, {"step": 0, "own": 1.0})  # an evaluation before the first step takes no part in its means
        sample = {"response": f"of {folder.name}", "response_length": 4, "truncated": False}
        prompts = {1: "prompt 1", 2: "prompt 2", 3: f"prompt of {folder.name}"}
        samples = [
            sample | {"step": step, "line": line, "prompt": prompts[line], "reward": reward}
            for step, line in ((1, 1), (2, 2), (3, 1), (3, 3))
            for reward in (1.0, float(number))[: 2 - number]
        ]  # fmt: skip
        (folder / "options.json").write_text(json.dumps(options))
        for name, lines in (("metrics", metrics), ("samples", samples)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folders


def test_the_table_and_the_page_of_two_runs(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for _ in range(2):  # a page of before is replaced
        result = CliRunner().invoke(app, ["compare", *map(str, runs), "--out", str(page)])
        assert result.exit_code == 0, result.output
    lines = [re.split(r"\s*│\s*", line)[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert lines == [
        ["Steps", "4 of 4", "3 of 4"],
        ["Reward, first → last step", "0.125 → 0.500", "0.125 → 0.375"],
        ["Held-out reward, first → last", "0.111 → 0.444", "0.111 → 0.333"],
        ["Seconds per step", "2.00", "2.00"],
        ["Tokens per second", "500", "500"],
        ["Seconds generating", "0.50", "0.50"],
        ["Seconds learning", "1.50", "2.50"],
        ["optimizer.learning_rate", "1e-05", "2e-05"],
        ["optimizer.momentum", "", "0.9"],
    ]
    held = content(page)
    assert [run["name"] for run in held["runs"]] == ["small", "large"]
    assert held["differing"] == ["optimizer.learning_rate", "optimizer.momentum"], "not out"
    assert [(sample["run"], sample["step"], sample["prompt"], sample["reward"]) for sample in held["samples"]] == [
        (0, 3, "prompt 1", 1.0), (0, 3, "prompt 1", 0.0), (1, 3, "prompt 1", 1.0),
        (0, 2, "prompt 2", 1.0), (0, 2, "prompt 2", 0.0), (1, 2, "prompt 2", 1.0),
    ]  # fmt: skip


def test_runs_with_equal_names_have_their_paths(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    runs[1].rename(again := tmp_path / "again" / "small")
    assert Comparison([runs[0], again]).names == [str(runs[0]), str(again)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["small"], "give two or more runs, each once"),
        (["small", "large/../small"], "give two or more runs, each once"),
        (["small", "."], "holds no run: it has no options.json"),
        (["small", "large", "--out=notes.txt"], "notes.txt exists and is no page of rl-train; choose another --out"),
        (["small", "large", "--out=small"], "small exists and is no page of rl-train; choose another --out"),
        (["small", "large", "--out=memory://notes.txt"], "notes.txt exists and is no page of rl-train; choose another"),
    ],
)
def test_mistakes_are_named(
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    upload: object,
    given: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    fsspec.filesystem("memory").pipe_file("/notes.txt", b"mine")
    result = CliRunner().invoke(app, ["compare", *given])
    assert (result.exit_code, said in result.stderr) == (2, True), result.output
    assert Path("notes.txt").read_text() == "mine"
    assert fsspec.filesystem("memory").cat_file("/notes.txt") == b"mine"


@pytest.mark.parametrize("out", ["new/folder/page.html", "memory://pages/page.html"])
def test_a_page_goes_to_a_new_folder_and_to_a_url_again(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upload: object, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = CliRunner().invoke(app, ["compare", *map(str, runs), "--out", out])
        assert result.exit_code == 0, result.output


def test_a_browser_draws_the_comparison(runs: list[Path], tmp_path: Path, browser: ReportBrowser) -> None:
    Comparison(runs).write(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.check_layout()
    assert browser.value("document.title") == "small and large: rl-train"
    headings = browser.texts("h2")
    assert headings[:3] == ["Options that differ", "Seconds by phase, mean of a step", "Curves"]
    curves = browser.value("document.body.innerHTML").split("<h2>Curves</h2>")[1]
    charts = dict(re.findall(r"<h3>(.*?)</h3>.*?<svg(.*?)</svg>", curves))
    assert charts["Reward"].count("<polyline") == 4, "two metrics of two runs"
    assert charts["Reward"].count('stroke-dasharray="none"') == 2
    assert not re.search(r"NaN|Infinity|undefined", "".join(charts.values()))
    assert {"small: 2 s a step", "large: 3 s a step"} <= {*browser.texts("h3")}
    widths = browser.value(
        "[...document.querySelectorAll('.bar')].map(bar => [...bar.children].map(x => x.style.width))"
    )
    assert [[round(float(width[:-1])) for width in bar] for bar in widths] == [[17, 50], [17, 83]]
    answers = browser.texts(".pair .soft")
    assert answers[:3] == [
        "small, step 3, best: reward 1, 4 tokens", "small, step 3, worst: reward 0, 4 tokens",
        "large, step 3, response: reward 1, 4 tokens",
    ]  # fmt: skip
    browser.set("input[type=search]", "PROMPT 2")
    assert browser.texts(".sample > pre") == ["prompt 2"]
    assert browser.value("[...CSS.highlights.get('match')].map(String)") == ["prompt 2"]
    assert browser.problems == []
