"""The panel that a run shows on a terminal, and the lines that it prints elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from rl_train.report.terminal import Counts, Display, sparkline, two_columns

STEP = {"reward": 0.25, "kl": 0.0125, "entropy": 0.5, "response_length": 20.0, "truncated": 0.5, "seconds": 2.0}
SAMPLES = [
    {"line": 3, "prompt": "7 + 8 =", "response": "15", "reward": 1.0},
    {"line": 3, "prompt": "7 + 8 =", "response": "[bold]16", "reward": 0.0},
]
SAMPLE = {"prompt": f"{'7 + ' * 20}8 =", "response": "15 " * 20}
# A title, a clipboard, a clear screen, the beginning of the line, a C1 control, a mark of direction, half of a
# surrogate pair, and rich's markup and emoji.
HOSTILE = "\x1b]0;title\x07\x1b]52;c;eA==\x07\x1b[2J\ra\x9b2J\u202e\ud800[red]:x:"
WRITTEN_OUT = r"\x1b]0;title\x07\x1b]52;c;eA==\x07\x1b[2J\ra\x9b2J\u202e\ud800[red]:x:"


def shown(display: Display) -> str:
    with display.console.capture() as captured:
        display.console.print(display._panel())
    return captured.get()


def test_the_panel_has_the_phase_its_counts_and_the_numbers_of_the_last_step() -> None:
    display = Display(20, Console(file=io.StringIO(), force_terminal=True, width=80), title="a run")
    display({"phase": "starting", "accelerator": True})
    assert "starting the ranks" in shown(display)
    display({"phase": "generating"})
    display({"count": "responses", "done": 12, "total": 1024})
    display({"count": "tokens", "done": 4567, "total": 0})
    assert "generating  12 of 1,024 responses  4,567 tokens" in shown(display)
    display({"phase": "learning"})
    assert "first time: compiling kernels" in shown(display), "what takes long once is named"
    display({"count": "updates", "done": 1, "total": 4})
    display({"message": "before step 1: evaluation reward 0.125", "eval/reward": 0.125})
    display({"step": 1, "sample": SAMPLE, "nothing": True, "warnings_shown": ["[b]KL has risen"], **STEP})
    display({"phase": "learning"})
    panel = shown(display)
    for text in (
        "a run",
        "1/20",
        "0.250",
        "0.125",
        "0.0125",
        "50.0%",
        "2.00",
        "(last time ",
        "learned nothing",
        "[b]KL has risen",
    ):
        assert text in panel, text
    assert "tokens/s" in panel
    assert max(map(len, Console(width=80).render_str(panel).plain.splitlines()), default=0) <= 400
    assert "of 4 updates" not in panel, "a phase begins without the counts of the last one"


def test_the_panel_has_the_rates_that_a_run_knows() -> None:
    display = Display(20, Console(file=io.StringIO(), force_terminal=True, width=100))
    display({"step": 1, **STEP})
    assert "MFU" not in shown(display)
    display({"step": 2, **STEP, "tokens_per_second_per_device": 1234.5, "mfu": 0.021, "mfu_learning": 0.3456})
    for text in ("tokens/s/device", "1,234", "MFU", "2.1%", "learning", "34.6%"):
        assert text in shown(display), text


def test_the_bar_of_a_resumed_run_begins_where_the_run_goes_on() -> None:
    display = Display(20, Console(file=io.StringIO(), force_terminal=True, width=80))
    display({"message": "going on after step 12", "resumed": 12})
    assert "12/20" in shown(display)
    display({"message": "a logger is missing"})
    assert "12/20" in shown(display)


def test_without_a_terminal_there_are_lines_and_a_few_samples() -> None:
    file = io.StringIO()
    with Display(20, Console(file=file, width=80)) as display:
        for phase in ("loading", "generating", "loading"):
            display({"phase": phase, "accelerator": phase == "generating"})
        display({"count": "responses", "done": 1, "total": 2})
        for step in (1, 2):
            display({"step": step, "sample": SAMPLE, "samples": SAMPLES if step == 2 else [], **STEP})
        display({"step": 3, "sample": SAMPLE, **STEP, "eval/reward": 0.5})
    lines = file.getvalue().splitlines()
    assert lines[0] == "loading the models"
    assert lines[1] == "generating, for the first time: compiling kernels, capturing CUDA graphs"
    assert lines[2].startswith("step 2/20  reward 0.250  response length 20.0"), "each phase is told once"
    assert lines[2].endswith("  …7 + 7 + 7 + 7 + 7 + 8 = -> 15 15 15 15 15 15 15 15…"), "the end of the prompt"
    assert lines[3:6] == ["prompt 3: 7 + 8 =", "     1.000  15", "     0.000  [bold]16"]
    assert lines[6].startswith("step 3/20  reward 0.250  held-out 0.500  response length 20.0"), (
        "every evaluation is told"
    )


def test_foreign_text_does_not_rule_the_terminal() -> None:
    file = io.StringIO()
    samples = [{"line": 1, "prompt": HOSTILE, "response": f" {HOSTILE}", "reward": 1.0}]
    event = {"step": 2, "sample": {"prompt": HOSTILE, "response": HOSTILE}, "samples": samples, **STEP}
    with Display(2, Console(file=file, width=200), title=HOSTILE) as display:
        display({"message": HOSTILE})
        display(event)
        display.console.print(display._panel())
    display.console.print(two_columns({HOSTILE: HOSTILE}, "a plan"))
    printed = file.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in printed)
    # The message, the title, the name and the value; the samples are cut.
    assert printed.count(WRITTEN_OUT) == 4, printed
    assert printed.count(WRITTEN_OUT[:20]) == 6, "responses are cut at the end"
    assert printed.count(WRITTEN_OUT[-20:]) == 6, "prompts are cut at the beginning"
    file = io.StringIO()
    with Display(2, Console(file=file, width=200, force_terminal=True), title=HOSTILE) as display:
        display({"message": HOSTILE})
        display(event)
    assert not any(part in file.getvalue() for part in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e", "\ud800"))


def test_counts_are_passed_on_a_few_times_a_second_and_at_the_end() -> None:
    events: list = []
    counts = Counts(events.append)
    for done in range(1, 1001):
        counts("tokens", done, 1000)
        counts("responses", done, 1000)
    ends = [event for event in events if event["done"] == 1000]
    assert [event["count"] for event in ends] == ["tokens", "responses"]
    assert len(events) < 100


def test_a_sparkline() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0]) == "▁"
