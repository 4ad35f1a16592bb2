"""Draw the figures of the README and of the gallery from the tables of benchmarks/RESULTS.md.

    python docs/figures.py      # writes docs/images/*.svg

Each picture is one SVG for light and dark pages, and as wide as a phone. A test compares the files with the tables.
"""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 368
COLOURS = ("#0f766e", "#b45309", "#6d28d9")
DARK = ("#2dd4bf", "#fbbf24", "#c4b5fd")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.heading{font-weight:600}.note,.tick{fill:#59636e}"
    ".tick{font-size:11px}.grid{stroke:#d1d9e0}.ours{fill:#0f766e}.peer{fill:#a3adb8}polyline{fill:none;stroke-width:2}"
    + "".join(
        f".line{number}{{stroke:{colour}}}.name{number}{{fill:{colour}}}" for number, colour in enumerate(COLOURS)
    )
    + "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note,.tick{fill:#9198a1}.grid{stroke:#3d444d}"
    ".ours{fill:#2dd4bf}.peer{fill:#656c76}"
    + "".join(f".line{number}{{stroke:{colour}}}.name{number}{{fill:{colour}}}" for number, colour in enumerate(DARK))
    + "}"
)


class Bar(NamedTuple):
    """A row of a chart: its label, the cell of the table, and whether it is ours."""

    label: str
    cell: str
    ours: bool = False

    @property
    def value(self) -> float:
        """The first number of the cell; 0 for a cell without one."""
        number = re.search(r"\d[\d ]*(?:\.\d+)?", self.cell)
        return float(number[0].replace(" ", "")) if number else 0.0


class Panel(NamedTuple):
    """Bars under a heading; `log` for values that differ by orders of magnitude."""

    heading: str
    bars: list[Bar]
    log: bool = False


def sections() -> dict[str, list[list[list[str]]]]:
    """Return the tables below each heading of RESULTS.md: rows of cells, the header first."""
    found: dict[str, list[list[list[str]]]] = {}
    for section in (ROOT / "benchmarks" / "RESULTS.md").read_text().split("\n## ")[1:]:
        tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
        rows = [[[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()] for text in tables]
        found[section.splitlines()[0]] = [[row for row in table if set(row[0]) != {"-"}] for table in rows]
    return found


def cell(heading: str, label: str, column: str) -> str:
    """Return a cell of the first table of a section that has the row and the column.

    Args:
        heading: How the section begins.
        label: The row's first cell, without marks of code.
        column: The header of the column.
    """
    (tables,) = (tables for name, tables in sections().items() if name.startswith(heading))
    for header, *rows in tables:
        for row in rows:
            if row[0].replace("`", "") == label and column in header:
                return row[header.index(column)].replace("*", "")
    raise ValueError(f"RESULTS.md has no row {label!r} with a column {column!r} under {heading!r}")


def svg(title: str, height: float, body: Iterable[str]) -> str:
    """Return the text of a picture."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">'
    return "\n".join([opening, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *body, "</svg>", ""])


def bars(title: str, panels: list[Panel], left: int, height: int) -> str:
    """Return a chart of horizontal bars: labels `left` wide, the cell's text behind each bar."""
    body, y = [], 0
    for panel in panels:
        y += 18
        body.append(f'<text class="heading" x="0" y="{y}">{escape(panel.heading)}</text>')
        values = [bar.value for bar in panel.bars if bar.value]
        low, high = min(values), max(values)
        for bar in panel.bars:
            share = math.log(4 * bar.value / low) / math.log(4 * high / low) if panel.log else bar.value / high
            length, y = (WIDTH - left - 68) * share if bar.value else 0, y + 24
            kind = "ours" if bar.ours else "peer"
            body += [
                f'<text x="0" y="{y}">{escape(bar.label)}</text>',
                f'<rect class="{kind}" x="{left}" y="{y - 12}" width="{length:.1f}" height="15" rx="2"/>',
                f'<text class="note" x="{left + length + 6:.1f}" y="{y}">{escape(bar.cell)}</text>',
            ]
        y += 14
    return svg(title, height, body)


def curves(title: str, heading: str, lines: dict[str, dict[int, float]], top: float = 1.0) -> str:
    """Return a chart of lines over steps, each named in its colour."""
    left, right, above, below = 34, WIDTH - 10, 30, 190
    last = max(step for line in lines.values() for step in line)

    def place(step: float, value: float) -> str:
        return f"{left + (right - left) * step / last:.1f},{below - (below - above) * value / top:.1f}"

    body = [f'<text class="heading" x="0" y="15">{escape(heading)}</text>']
    for share in (0, 0.5, 1):
        height = float(place(0, share * top).split(",")[1])
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{height:g}" y2="{height:g}"/>')
        body.append(f'<text class="tick" x="0" y="{height + 4:g}">{share * top:g}</text>')
    body += [f'<text class="tick" x="{left}" y="{below + 16}">step 0</text>']
    body += [f'<text class="tick" x="{right}" y="{below + 16}" text-anchor="end">{last}</text>']
    for number, (name, line) in enumerate(lines.items()):
        points = " ".join(place(step, value) for step, value in line.items())
        body.append(f'<polyline class="line{number}" points="{points}"><title>{escape(name)}</title></polyline>')
    names = " ".join(
        f'<tspan class="name{number}">{escape(name.strip("`"))}</tspan>' for number, name in enumerate(lines)
    )
    body.append(f'<text class="tick" x="{(left + right) / 2:g}" y="{below + 16}" text-anchor="middle">{names}</text>')
    return svg(title, below + 22, body)


def curve(heading: str, label: str) -> dict[int, float]:
    """Return a row of a table whose columns are steps."""
    (tables,) = (tables for name, tables in sections().items() if name.startswith(heading))
    for header, *rows in tables:
        for row in rows:
            if row[0] == label and header[-1].isdigit():
                pairs = ((name.removeprefix("step "), value) for name, value in zip(header, row, strict=True))
                return {int(step): float(value) for step, value in pairs if step.isdigit() and value[:1].isdigit()}
    raise ValueError(f"RESULTS.md has no curve {label!r} under {heading!r}")


def head() -> str:
    """The head beside other implementations."""
    rows = {
        "ours": "linear_log_probs",
        "ours, kept": "linear_log_probs(keep_probabilities=True) (three GEMMs)",
        "Liger": "Liger 0.8.5, scaled cross-entropy",
        "verl": "verl 0.9.1",
        "torch": "torch, materialised",
    }

    def of(column: str) -> list[Bar]:
        return [Bar(label, cell("The head", row, column), "ours" in label) for label, row in rows.items()]

    panels = [
        Panel("Head of an 8B: ms, forward and backward", of("forward and backward ms")),
        Panel("Its memory, GiB", of("extra GiB")),
        Panel("Its largest error of a log-prob (log scale)", of("log-prob error"), log=True),
    ]
    return bars("The log-prob head: time, memory and error beside Liger, verl and torch", panels, left=76, height=504)


def speed() -> str:
    """Rollouts and steps beside vLLM, Megatron-Core and TRL."""

    def rollouts(heading: str, row: str) -> Panel:
        places = (("ours", True), ("vLLM", False))
        return Panel(heading, [Bar(name, cell("Rollouts of larger shapes", row, name), ours) for name, ours in places])

    steps = {"ours": "default", "Megatron-Core": "Megatron-Core + Transformer Engine"}
    runs = {"ours": "rl-train", "TRL with vLLM": "TRL with vLLM", "TRL": "TRL"}
    panels = [
        rollouts("Rollouts, 8B: thousand tokens/s", "8B, one GPU, 1024"),
        rollouts("Rollouts, 16 layers of 30B-A3B", "16 layers of 30B-A3B, one GPU, 1024"),
        rollouts("Rollouts, 8B on two GPUs", "8B, tp 2, 512"),
        *(
            Panel(
                f"Training step, 8 layers of 8B, {column}: ms",
                [
                    Bar(name, cell("A training step", row, column).split(" (")[0], name == "ours")
                    for name, row in steps.items()
                ],
            )
            for column in ("tp 1", "tp 2")
        ),
        Panel(
            "GRPO step, SmolLM2: seconds",
            [Bar(name, cell("A real model on one H200", row, "step, s"), name == "ours") for name, row in runs.items()],
        ),
    ]
    return bars("Rollouts and steps beside vLLM, Megatron-Core and TRL", panels, left=112, height=504)


def memory() -> str:
    """Memory of a packed Hugging Face model with our patches and without."""
    rows = {
        "patched": "patched",
        "patched, torch alone": "patched, kernels=False",
        "Liger": "transformers with Liger 0.8.5, packed",
        "transformers": "transformers, packed",
    }
    cells = {label: cell("Hugging Face models", row, "peak GiB").split(" (")[0] for label, row in rows.items()}
    found = [Bar(label, text, "patched" in label) for label, text in cells.items()]
    panel = Panel("Memory of 39 424 packed tokens: GiB", found)
    return bars("Memory of a packed batch, patched and not", [panel], left=138, height=152)


def longest() -> str:
    """The longest pack that one GPU learns from."""
    rows = {
        "ours, MLPs in tiles": 'recompute="full", tiled_mlp=8',
        "ours, recomputed": 'recompute="full"',
        "ours": "ours",
        "Megatron, recomputed": "Megatron-Core, all layers recomputed",
        "Megatron-Core": "Megatron-Core",
    }
    found = [Bar(label, cell("The longest pack", row, "tokens"), "ours" in label) for label, row in rows.items()]
    return bars(
        "The longest pack on one GPU", [Panel("The longest pack of one H200: tokens", found)], left=156, height=152
    )


def smollm2() -> str:
    """Three seeds of SmolLM2."""
    lines = {f"seed {seed}": curve("A real model on one H200", f"seed {seed}") for seed in range(3)}
    return curves("SmolLM2 by GRPO, three seeds", "Right answers to 256 questions, three seeds", lines)


def smollm2_small() -> str:
    """The small run of SmolLM2 on two cores."""
    lines = {"held out": curve("A real model on a CPU", "held-out reward")}
    return curves("SmolLM2 by GRPO on two cores", "Right answers to 64 held-out questions", lines)


def lora() -> str:
    """Full training of SmolLM2 beside adapters."""
    lines = {name: curve("A real model on one H200", name) for name in ("full training", "`--lora-rank 16`")}
    return curves("SmolLM2 by GRPO, all weights and adapters", "Held-out: all weights, adapters of rank 16", lines)


def small_run(name: str, heading: str) -> str:
    """A row of the small runs."""
    return curves(f"The run {name}", heading, {name: curve("Small runs on two CPU cores", name)})


FIGURES: dict[str, Callable[[], str]] = {
    "head": head,
    "speed": speed,
    "memory": memory,
    "longest": longest,
    "smollm2": smollm2,
    "smollm2-small": smollm2_small,
    "smollm2-lora": lora,
    "quickstart": partial(small_run, "quickstart", "Letters in the order of the alphabet, share"),
    "calculator": partial(small_run, "calculator", "Right products, share"),
    "colours": partial(small_run, "colours", "Right colours, share"),
}


def main() -> None:
    """Write every figure."""
    for name, figure in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(figure())


if __name__ == "__main__":
    main()
