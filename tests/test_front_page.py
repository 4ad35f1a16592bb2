"""The figures of the README, of the gallery and of their pictures are those of benchmarks/RESULTS.md."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.parity_record import recorded

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
IMAGES = ROOT / "docs" / "images"
# A number with at least two digits: 13.1, 709 632, 3011. Names of models and of versions hold others.
NUMBER = re.compile(r"(?<![\w.])\d+(?: \d{3})*(?:\.\d+)?(?![\w.]*\d)(?!\w)")


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "figures.py"))


def anchor(heading: str) -> str:
    """Return the anchor of a heading on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


SECTIONS = {anchor(text.splitlines()[0]): text for text in RESULTS.split("\n## ")[1:]}


def missing(text: str, section: str) -> set[str]:
    """Return the numbers of a text that a section of RESULTS.md does not have."""
    return {number for number in NUMBER.findall(text) if not re.search(rf"(?<![\d.]){number}(?!\.?\d)", section)}


def rows() -> list[tuple[str, str]]:
    """Return the rows of the README's table of figures: the anchor of each, and its text without links and code."""
    found = re.findall(r"^\| \[[^\]]+\]\(benchmarks/RESULTS\.md#([\w-]+)\)(.*)$", README, re.MULTILINE)
    assert len(found) >= 7
    return found


@pytest.mark.parametrize(("name", "row"), rows())
def test_each_figure_of_a_row_stands_in_its_section(name: str, row: str) -> None:
    program = re.findall(r"`([\w/.]+\.py)`", row)
    assert program
    assert f"(`{program[0]}`)" in SECTIONS[name].splitlines()[0]
    cells = re.sub(r"`[^`]*`|\bof an? 8B|\((.*?B.*?)\)", "", row)
    assert NUMBER.findall(cells)
    assert missing(cells, SECTIONS[name]) == set()


def test_the_figures_of_the_real_model_stand_in_its_section() -> None:
    text = README.split("## A real model")[1].split("\n## ")[0]
    section = SECTIONS["a-real-model-on-one-h200-benchmarksgrpopy"]
    claims = text[text.index("SmolLM2-135M") :].split("More runs")[0]
    shares = set(re.findall(r"(\d+)(?= (?:to \d+ )?%)", claims))
    assert shares == {"7", "80", "87"}
    measured = {f"{100 * float(share):.0f}" for share in re.findall(r"\b0\.\d{3}\b", section)}
    assert shares <= measured
    seconds = re.search(r"takes (\d+) to (\d+) seconds", claims)
    assert seconds is not None
    assert missing(", ".join(seconds.groups()), section) == set()
    times = [
        int(row.strip("| ").split(" | ")[-1])
        for row in section.splitlines()
        if re.match(r"\| (seed|full)", row) and row.count("|") == 10
    ]
    assert int(seconds[1]) == min(times)
    assert all(int(seconds[1]) <= time <= int(seconds[2]) for time in times)


def test_the_count_of_parity_cases_is_that_of_the_record() -> None:
    section = SECTIONS["parity-cases-testsparity_recordpy"]
    counted: dict[str, list[tuple[str, str, str]]] = {}
    for case in recorded():
        counted.setdefault(case[0].split()[0], []).append(case)
    counted["all"] = [case for cases in list(counted.values()) for case in cases]
    for backend, cases in counted.items():
        name = {"megatron": "`megatron`, four versions", "all": "all"}.get(backend, f"`{backend}`")
        assert f"| {name} | {len({model for _, model, _ in cases})} | {len(cases)} |" in section


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_pictures_are_drawn_from_the_tables(figures: dict[str, Any]) -> None:
    """After a change of RESULTS.md: `python docs/figures.py`."""
    drawn = {f"{name}.svg": figure() for name, figure in figures["FIGURES"].items()}
    assert {file.name: file.read_text() for file in IMAGES.glob("*.svg") if file.name != "mark.svg"} == drawn


def luminance(colour: str) -> float:
    """Return WCAG's relative luminance of a colour `#rrggbb`."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [((one + 0.055) / 1.055) ** 2.4 if one > 0.04 else one / 12.92 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("page", "dark"), [("#ffffff", False), ("#0d1117", True), ("#1e2129", True)])
def test_letters_and_lines_of_the_pictures_stand_out(figures: dict[str, Any], page: str, dark: bool) -> None:
    """From white, and from the dark pages of GitHub and of the site: 4.5 for letters, 3 for lines and our bars."""
    rules = figures["STYLE"].split("@media")[dark]
    colours = dict(re.findall(r"([\w.,]+)\{(?:[^}]*;)?(?:fill|stroke):(#\w{6})", rules))
    assert {"text", ".note,.tick", ".ours", ".line0", ".name0"} <= colours.keys()
    for name, colour in colours.items():
        low, high = sorted(0.05 + luminance(one) for one in (colour, page))
        least = {"text": 4.5, ".note,.tick": 4.5, ".grid": 1.2, ".peer": 2}.get(
            name, 4.5 if name.startswith(".name") else 3
        )
        assert high / low >= least, (name, colour)
