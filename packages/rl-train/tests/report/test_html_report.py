"""`report.html`: what stands on it, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.report.html_report import MOST_STEPS, write_content, write_page
from rl_train.report.page_samples import MOST_EXTREME, MOST_SAMPLED

from .browser import ReportBrowser

# A response that is no HTML and no script, whatever it holds.
HOSTILE = "</script><script>document.title = 'taken over'</script><b>5</b> & <!--\x1b[2J\u202e\nline\tword"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of four steps."""
    out = tmp_path / "run"
    out.mkdir()
    options = {"algorithm": "grpo", "model": "smollm2", "reward": "number-match", "steps": 5, "dims": ""}
    metrics = [{"step": 0, "eval/reward": 0.25, "seconds_evaluating": 1.0}]
    for step in range(1, 5):
        of_step = {"reward": step / 8, "entropy": float("nan"), "clip_fraction": 0.0, "own/number": 7.0}
        metrics.append({"step": step, **of_step, "seconds": 2.0, "seconds_learning": 1.5})
    metrics[-1]["eval/reward"] = 0.75
    sample = {"step": 4, "line": 3, "prompt": "2 + 3 =", "reward": 1.0, "response_length": 4, "truncated": False}
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    policy = {"role": "policy", "log_probs": [-0.5, -6.0, None], "advantages": -0.5, "versions": [2, 3, 3]}
    turns = [policy | {"texts": ["2 ", "+ 3", " = "], "calls": [call]}, {"role": "environment", "text": "5<|im_end|>"}]
    samples = [sample | {"response": HOSTILE}, sample | {"response": "2 + 3 = 6", "reward": 0.0, "truncated": True}]
    samples[1]["turns"] = turns
    samples = [sample | {"step": 2, "line": 1, "prompt": "first", "reward": 0.5, "response": "Straße"}, *samples]
    (out / "options.json").write_text(json.dumps(options))
    (out / "versions.json").write_text(json.dumps({"torch": "2.13.0"}))
    for name, lines in (("metrics", metrics), ("samples", samples)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def content(page: Path) -> dict:
    """The run as the page holds it."""
    (found,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found)


def test_metrics_of_older_runs_are_read_by_their_old_names(run: Path) -> None:
    lines = [{"step": 1, "seconds_handing_over": 1.0}, {"step": 2, "seconds_syncing_weights": 2.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held = content(write_page(run))
    assert [record["seconds_syncing_weights"] for record in held["runs"][0]["metrics"]] == [1.0, 2.0]
    assert [chart["names"] for chart in held["charts"]] == [["seconds_syncing_weights"]]


def test_the_page_has_the_warnings_of_the_run(run: Path) -> None:
    assert content(write_page(run))["runs"][0]["warnings"] == []
    lines = [{"step": step, "grad_norm": 1.0 if step < 20 else 50.0} for step in range(1, 25)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (warning,) = content(write_page(run))["runs"][0]["warnings"]
    assert warning["step"] == 21
    assert "grad_norm has risen to 50 (usually 1)" in warning["text"]


def test_the_page_holds_the_run_and_asks_no_network(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.stdout.strip() == str(run / "report.html")
    curves = {file.name: file.read_bytes()[:4] for file in (run / "curves").iterdir()}
    assert curves == dict.fromkeys(
        ("reward.png", "entropy-nats.png", "clip-fraction.png", "seconds-by-phase.png"), b"\x89PNG"
    )
    text = (run / "report.html").read_text()
    assert set(re.findall(r"https?://\S+?(?=[\"'])", text)) == {"http://www.w3.org/2000/svg"}  # the name of SVG
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2, "the page's own"
    held = content(run / "report.html")
    readable = HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    assert held["samples"][1]["turns"][0]["text"] == readable, "a mark of direction turns no order, lines stay"
    assert held["views"] == {"best": [1, 0, 2], "worst": [2, 0, 1]}
    assert held["runs"][0]["metrics"][1]["entropy"] is None
    assert {"title": "Reward", "names": ["reward", "eval/reward"], "stacked": False} in held["charts"]
    assert [chart["title"] for chart in held["others"]] == ["own/number", "seconds"]
    assert held["runs"][0]["tiles"]["Held-out reward, first → last"] == "0.250 → 0.750"


def test_without_matplotlib_the_page_alone_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["report", str(run)])
    assert (result.exit_code, result.stdout.strip()) == (0, str(run / "report.html"))
    assert result.stderr == "curves are drawn as PNGs where matplotlib is installed: pip install 'matplotlib>=3.9'\n"
    assert not (run / "curves").exists()


def test_a_run_at_a_url_has_the_same_page_there(run: Path, upload: Callable[[Path, str], None]) -> None:
    files = fsspec.filesystem("memory")
    upload(run, "memory://bucket/run")
    files.pipe_file("/bucket/run/training/actor/step-00000001/rank-0.safetensors", b"not read")
    result = CliRunner().invoke(app, ["report", "memory://bucket/run"])
    assert (result.exit_code, result.stdout) == (0, "memory://bucket/run/report.html\n"), result.output
    assert files.cat_file("/bucket/run/report.html") == write_page(run).read_bytes()
    for url, error in (
        ("memory://none", "cannot be read: FileNotFoundError"),
        ("memory://bucket", "none of its 6 files"),
    ):
        assert error in CliRunner().invoke(app, ["report", url]).output
    page = run.parent / "page.html"
    result = CliRunner().invoke(app, ["compare", "memory://bucket/run", str(run), "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert [one["name"] for one in content(page)["runs"]] == ["memory://bucket/run", str(run)]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("options.json", "[]", "options.json does not come from rl-train; give the --out of a run"),
        ("options.json", '{"model": "m"}', "options.json does not come from rl-train; give the --out of a run"),
        ("options.json", "{", "options.json is not valid JSON: .*; give the --out of a run"),
        ("metrics.jsonl", '{"step": 1, "reward": "high"}\n', "metrics.jsonl, line 1: not a line of a step"),
        ("metrics.jsonl", '{"step": 1, "seconds": null}\n', "metrics.jsonl, line 1: not a line of a step"),
        ("samples.jsonl", '{"step": 1, "prompt": "p"}\n', "samples.jsonl, line 1: not a line of a step"),
        ("samples.jsonl", '{"step": 1, "reward": 1}\n', "samples.jsonl, line 1: not a line of a step"),
        ("report.html/x", "mine", "report.html is a folder, and the page is to be written there; move it elsewhere"),
    ],
)
def test_files_that_no_run_has_written_are_named(run: Path, file: str, text: str, said: str) -> None:
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=said):
        write_page(run)


def test_a_long_run_is_thinned_evenly(run: Path) -> None:
    numbers = range(1, 5001)
    lines = [{"step": step, "reward": 0.5} | ({"eval/reward": 1.0} if step == 77 else {}) for step in numbers]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"prompt": "p", "response": "r", "response_length": 1, "truncated": False}
    samples = [sample | {"step": step, "line": line, "reward": step % 7} for step in numbers for line in (1, 1, 2)]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    held = content(write_page(run))
    steps = [row["step"] for row in held["runs"][0]["metrics"]]
    assert (len(steps), steps[0], steps[-1]) == (MOST_STEPS + 1, 1, 5000)
    assert 77 in steps, "an evaluation stays"
    assert 3 * MOST_SAMPLED <= len(held["samples"]) <= 3 * MOST_SAMPLED + 2 * MOST_EXTREME
    assert [held["samples"][index]["reward"] for index in held["views"]["best"]] == [6] * MOST_EXTREME
    assert [held["samples"][index]["step"] for index in held["views"]["worst"]][:4] == [4998, 4998, 4998, 4991]


@pytest.mark.parametrize(("begun", "said"), [(False, "holds no run: it has no options.json"), (True, None)])
def test_a_run_before_its_first_step(run: Path, begun: bool, said: str | None) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "versions.json", *["options.json"] * (not begun)):
        (run / name).unlink()
    if said is None:
        assert content(write_page(run))["runs"][0]["tiles"] == {"Steps": "0 of 5"}
    else:
        with pytest.raises(ValueError, match=said):
            write_page(run)


def test_a_browser_draws_the_page(run: Path, browser: ReportBrowser) -> None:
    browser.open(write_page(run))
    browser.check_layout()
    assert browser.value("document.title") == "run: rl-train"
    body = browser.value("document.body.innerHTML")
    charts = dict(re.findall(r"<h3>(.*?)</h3>.*?<svg(.*?)</svg>", body))
    assert charts.keys() >= {"Reward", "Clip fraction", "Seconds by phase", "own/number"}
    assert charts["Reward"].count("<circle") == 6, "the reward of four steps, the held-out reward of two"
    assert 'points="' in charts["Seconds by phase"]
    assert not re.search(r"NaN|Infinity|undefined", "".join(charts.values()))
    assert any("<b>5</b> & <!--" in text for text in browser.texts(".sample pre")), "a response is shown as text"
    assert "worst: reward 0, 4 tokens, cut off" in browser.texts(".sample .soft")
    assert browser.texts(".turn") == ["1. policycalls add(a=2, b=3)", "2. environment"]
    assert browser.texts(".mark") == ["<|im_end|>"]
    assert "2.13.0" in browser.texts("dd")


def test_samples_are_chosen_searched_and_coloured(run: Path, browser: ReportBrowser) -> None:
    browser.open(write_page(run))
    heads = ".sample > .soft"
    assert browser.texts(heads) == ["Step 4, prompt on line 3"]
    browser.set("select", "worst of the run")
    assert browser.texts(".pair .soft") == [
        "worst: reward 0, 4 tokens, cut off", "worst: reward 0.5, 4 tokens", "worst: reward 1, 4 tokens"
    ]  # fmt: skip
    browser.set("select", "one step")
    browser.set("input[type=range]", "0")
    assert browser.texts(heads) == ["Step 2, prompt on line 1"]
    browser.set("input[type=search]", "+ 3 =")  # over the ends of two tokens, in another step
    assert browser.texts(heads) == ["Step 4, prompt on line 3"]
    assert browser.value("[...CSS.highlights.get('match')].map(String)") == ["+ 3 ="] * 2
    browser.set("input[type=search]", "straße")
    assert browser.texts(heads) == ["Step 2, prompt on line 1"]
    browser.set("input[type=search]", "in no sample")
    assert (browser.texts(heads), browser.texts("[role=status]")) == ([], ["0 of the page's prompts match."])
    browser.set("input[type=search]", "")
    browser.set("input[type=range]", "1")
    shades = {}
    for colour in ("log-prob", "advantage", "version"):
        browser.set("label:nth-child(2) select", colour)
        tokens = "[...document.querySelectorAll('pre.policy span')].map(node => [node.textContent, node.title, {}])"
        shown = browser.value(tokens.format("node.style.background"))
        assert [text for text, *_ in shown] == ["2 ", "+ 3", " = "]
        assert [title for _, title, _ in shown] == [
            "log-prob -0.5, advantage -0.5, version 2", "log-prob -6, advantage -0.5, version 3",
            "advantage -0.5, version 3",
        ]  # fmt: skip
        shades[colour] = [shade for *_, shade in shown]
    likely, unlikely, unknown = shades["log-prob"]
    assert ("7%" in likely, "70%" in unlikely, unknown) == (True, True, "")
    assert len({*shades["advantage"]}) == 1
    assert [shades["version"].count(shade) for shade in shades["version"]] == [1, 2, 2]
    browser.set("label:nth-child(2) select", "nothing")
    assert browser.texts("pre.policy span") == []
    assert browser.problems == []


def test_the_page_has_all_responses_that_a_run_has_saved(run: Path, browser: ReportBrowser) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    (run / "rollouts").mkdir()
    of_all = {"source": "p", "truncated": False, "tokens": [1, 2, 3], "mask": [False, True, True]}
    of_all |= dict.fromkeys(("log_probs", "versions", "advantages"))
    for step in (1, 2, 4):
        rows = [
            {"step": step, "line": line, "response": number, "sample": sample, "reward": number / 2, **of_all}
            | {"prompt_text": f"prompt {line}", "response_text": f"of {line}{number}{sample}<|end|>"}
            for line in (1, 2)
            for number in range(3)
            for sample in range(1 + (line == 2 and number == 1))
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), run / "rollouts" / f"step-{step:08d}.parquet")
    browser.open(write_page(run))
    browser.check_layout()
    note, heads = "[role=status]", ".sample > .soft"
    assert browser.texts(note) == ["The page has 18 of 18 responses."]
    assert browser.texts(heads) == ["Step 4, prompt on line 1", "Step 4, prompt on line 2"]
    lengths = [2, 2, 2, 2, 4, 2]
    kinds = ["worst: reward 0", "response: reward 0.5", "best: reward 1"] * 2
    shown = [f"{kind}, {length} tokens" for kind, length in zip(kinds, lengths, strict=True)]
    assert browser.texts(".pair .soft") == shown
    assert browser.texts(".pair pre.policy")[3:6] == ["of 200<|end|>", "of 210<|end|>", "of 211<|end|>"]
    browser.set("select", "worst of the run")
    assert browser.texts(".pair .soft")[:7] == ["worst: reward 0, 2 tokens"] * 6 + ["worst: reward 0.5, 2 tokens"]
    assert browser.texts(heads)[:3] == [
        f"Step {step}, prompt on line {line}" for step, line in ((4, 1), (4, 2), (2, 1))
    ]
    browser.set("select", "one step")
    browser.set("input[type=search]", "of 211")
    assert browser.texts(note) == ["The page has 18 of 18 responses. 3 of the page's prompts match."]
    (run / "rollouts" / "step-00000002.parquet").unlink()  # then the samples of the run tell more
    assert content(write_page(run))["total"] == 0
    (run / "rollouts" / "step-00000002.parquet").write_text("damaged")
    with pytest.raises(ValueError, match="rollouts cannot be read as Parquet"):
        write_page(run)


# Enough of a browser's document for the page's script; prints [anchor, x, text] of each number of the charts.
DOCUMENT = """
class Element {
  constructor(name) { this.name = name; this.children = []; this.attributes = {}; this.style = {}; }
  appendChild(child) { this.children.push(child); return child; }
  append(text) { this.textContent = text; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  replaceChildren() { this.children = []; }
}
globalThis.CSS = {};
const data = { textContent: require("fs").readFileSync(0, "utf8") };
globalThis.document = { body: new Element("body"), createElement: name => new Element(name),
  createElementNS: (space, name) => new Element(name), getElementById: () => data };
require("vm").runInThisContext(require("fs").readFileSync(process.argv[1], "utf8"));
const every = element => [element, ...element.children.flatMap(every)];
const numbers = every(document.body).filter(element => element.name === "text");
console.log(JSON.stringify(numbers.map(({ attributes, textContent }) =>
  [attributes["text-anchor"], attributes.x, String(textContent)])));
"""


def numbers_of(page: Path, folder: Path) -> list[tuple[str, float, str]]:
    """Return the anchor, the place and the text of each number of a page's charts."""
    data, script = re.findall(r"<script[^>]*>\n?(.*?)</script>", page.read_text(), re.S)
    (folder / "page.js").write_text(script)
    command = ["node", "-e", DOCUMENT, str(folder / "page.js")]
    done = subprocess.run(command, input=data, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    numbers: list[tuple[str, float, str]] = json.loads(done.stdout)
    return numbers


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_chart_takes_more_values_than_a_call_of_javascript_takes_arguments(tmp_path: Path) -> None:
    record = {f"source_reward/{number}": number for number in range(400)}
    of_run = {"name": "run", "subtitle": "", "tiles": {}, "warnings": [], "options": {}, "versions": {}}
    of_run |= {"metrics": [{"step": step} | record for step in range(500)]}
    charts = [{"title": "Rewards", "names": [*record], "stacked": False}]
    write_content(page := tmp_path / "page.html", {"runs": [of_run], "charts": charts, "others": [], "samples": []})
    assert {"0", "400"} <= {text for _, _, text in numbers_of(page, tmp_path)}


KL = {"kl": (5.2e-4, 1e-4, 2.5e-4), "approx_kl": (-4.4e-4, 1e-4, -1e-4), "rollout_kl": (2e-4, -2e-4, 0.0)}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        (KL, ["-2.5e-4", "0", "2.5e-4", "5.0e-4", "7.5e-4"]),
        (
            {"approx_kl": (-1.234e-5, -1.230e-5, -1.232e-5)},
            ["-1.234e-5", "-1.233e-5", "-1.232e-5", "-1.231e-5", "-1.230e-5"],
        ),
        ({"entropy": (2.0001, 2.001, 2.0004)}, ["2.00025", "2.00050", "2.00075", "2.00100"]),
        ({"grad_norm": (1.5e6, 2e4, 3e5)}, ["0", "5e5", "1.0e6", "1.5e6"]),
        ({"tokens_per_second": (1.0, 118000.0, 0.0)}, ["0", "50000", "100000"]),
        ({"reward": (0.0, 0.0, 0.0)}, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
    ],
)
def test_the_numbers_of_a_chart_differ_and_none_is_cut(
    run: Path, tmp_path: Path, values: dict[str, tuple[float, ...]], numbers: list[str]
) -> None:
    steps = (1, 5000, 10000)
    rows = [{"step": step} | {name: row[place] for name, row in values.items()} for place, step in enumerate(steps)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "samples.jsonl").write_text("")
    texts = numbers_of(write_page(run), tmp_path)
    assert [text for anchor, _, text in texts if anchor == "end"] == numbers
    # A letter of 11 pixels is at most 7 wide; the chart is 440 wide.
    assert all(x >= 7 * len(text) for anchor, x, text in texts if anchor == "end")
    below = [(x, text) for anchor, x, text in texts if anchor == "middle"]
    assert below[-1][1] == "10000"
    assert all(x + 3.5 * len(text) <= 440 for x, text in below)
