"""`report.html`: a run on one page that works without a network; and its curves as PNGs."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from ckpt.cli import printable
from ckpt.files import Store, mirrored, replacing, room_for
from rl_train.data.sources import read_json
from rl_train.report.lines import LINES, read_lines, read_options, replace_text
from rl_train.report.page_samples import evenly_spaced, samples_of_lines, samples_of_run
from rl_train.report.signs import warned
from rl_train.trajectories.saved_rollouts import SavedRollouts

PAGE = "report.html"
CURVES = "curves"
VERSIONS = "versions.json"
PROFILE = "profile/profile.md"

PHASES = "Seconds by phase"
# Title of a chart, and the metrics that it shows; a name that ends with / or @ stands for all names with this prefix.
CHARTS: dict[str, Sequence[str]] = {
    "Reward": ("reward", "eval/reward"),
    "Loss": ("loss", "eval/loss"),
    "Pairs in the right order (share)": ("reward_accuracy", "eval/reward_accuracy"),
    "Rewards of pairs": ("chosen_reward", "rejected_reward"),
    "Rewards by name": ("reward/",),
    "Rewards by source": ("source_reward/", "eval/source_reward/"),
    "Rows by source (share)": ("source_share/",),
    "Held-out reward of several samples": ("eval/pass@", "eval/maj@"),
    "KL divergence": ("kl", "approx_kl", "rollout_kl"),
    "Entropy (nats)": ("entropy",),
    "Clip fraction": ("clip_fraction",),
    "Response length (tokens)": ("response_length", "eval/response_length"),
    "Responses that are cut off (share)": ("truncated", "eval/truncated"),
    "Prompts with equal rewards (share)": ("frac_reward_zero_std",),
    "Gradient norm": ("grad_norm", "critic_grad_norm"),
    PHASES: tuple(
        f"seconds_{phase}"
        for phase in ("generating", "scoring", "estimating", "learning", "syncing_weights", "evaluating")
    ),
    "Tokens per second": ("tokens_per_second",),
}
# The page has curves of at most MOST_STEPS steps and MOST_STEPS evaluations.
MOST_STEPS = 1000
PACKAGES = (
    *("rl-train", "rl-models", "parallel-layers", "rl-ckpt", "hf-patches", "megatron-utils"),
    *("torch", "transformers", "tokenizers", "safetensors", "megatron-core", "vllm", "ray", "flash-attn"),
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages of a run that are installed."""
    installed = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


class RunFiles:
    """The content of the files of a run, which may still be running.

    Args:
        folder: The folder of the run, or its URL.

    Attributes:
        folder: The folder of the run.
        options, metrics, samples, versions: What the files of these names hold.
        profile: The table of the traced step; empty without one.
        tiles: The numbers that sum the run up.

    Raises:
        ValueError: The folder holds no run, or one of its files is damaged; the error names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with mirrored(folder, lambda name: name in ("options.json", VERSIONS, PROFILE, *LINES)) as local:
            if not (local / "options.json").is_file():
                raise ValueError(f"{folder} holds no run: it has no options.json; give the --out of rl-train train")
            options = read_options(local, "give the --out of a run")
            self.options = {name: value for name, value in options.items() if name != "inputs"}
            self.metrics, self.samples = (read_lines(local / name) for name in LINES)
            versions_file, profile_file = local / VERSIONS, local / PROFILE
            self.versions: dict[str, str] = read_json(versions_file) if versions_file.is_file() else {}
            self.profile = profile_file.read_text(encoding="utf-8") if profile_file.is_file() else ""
        self.tiles = _tiles(self.options, self.metrics)

    @property
    def content(self) -> dict[str, Any]:
        """Return what the page holds of the run."""
        return {
            "name": self.folder.resolve().name,
            "subtitle": _subtitle(self.options),
            "tiles": self.tiles,
            "warnings": warned(self.metrics),
            "profile": self.profile,
            "metrics": _of_steps(self.metrics, MOST_STEPS),
            "options": self.options,
            "versions": self.versions,
        }


def write_page(folder: Path) -> Path:
    """Write `report.html` from the files of a run, which may still be running, beside them, and return its path.

    Raises:
        ValueError: The folder holds no run, or one of its files is damaged; the error names the file.
    """
    run = RunFiles(folder)
    write_content(folder / PAGE, {"runs": [run.content], **charts_of(run.metrics), **_samples(run)})
    return folder / PAGE


def _samples(run: RunFiles) -> dict[str, Any]:
    """Return the samples of a page: rollouts, where the run has saved those of every step, or else `samples.jsonl`."""
    if find_spec("pyarrow") is None:
        return samples_of_lines(run.samples)
    try:
        rollouts = SavedRollouts(run.folder, run.options["model"])
        if {record["step"] for record in run.samples} <= {step for step, _ in rollouts.rewards}:
            return samples_of_run(rollouts.rewards, rollouts.prompts_of)
    except FileNotFoundError:  # the run saves no rollouts, or removes those of later steps
        pass
    return samples_of_lines(run.samples)


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Write a page with this content to a path or a URL."""
    # Inside a script element, only "<" could end the element or begin a comment.
    text = json.dumps(_readable(content)).replace("<", "\\u003c")
    page = page_template().replace("RUN", text, 1)
    if (store := Store.of(path)) is None:
        if path.is_dir():
            raise ValueError(f"{path} is a folder, and the page is to be written there; move it elsewhere")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, page)
        return
    with store.errors("written"):
        store.make_parent()
        store.files.pipe_file(store.path, page.encode())


def page_template() -> str:
    """Return the page without its content."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _subtitle(options: Mapping[str, Any]) -> str:
    source = f"rewarded by {options['reward']}" if "reward" in options else f"on {options.get('dataset')}"
    return f"{options.get('algorithm') or options.get('command')} of {options['model']}, {source}"


def missing_plots() -> str | None:
    """Return how to get curves as PNGs where matplotlib, of the extra `plots`, is not installed; else None."""
    if find_spec("matplotlib") is None:
        return "curves are drawn as PNGs where matplotlib is installed: pip install 'matplotlib>=3.9'"
    return None


def write_curves(folder: Path) -> Path:
    """Draw each chart of the page of a run as a PNG in its folder `curves`, and return that folder.

    Raises:
        ValueError: As for `write_page`.
    """
    metrics = read_lines(folder / "metrics.jsonl")
    with room_for(None, folder / CURVES):
        (folder / CURVES).mkdir(exist_ok=True)
    for chart in charts_of(metrics)["charts"]:
        name = "-".join(re.findall(r"[a-z]+", chart["title"].lower()))
        draw_curve(folder / CURVES / f"{name}.png", chart, _of_steps(metrics, MOST_STEPS))
    return folder / CURVES


def draw_curve(path: Path, chart: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Draw a chart, of the form of `charts_of`, as a PNG; a single curve with its mean over a tenth of the run."""
    from matplotlib.figure import Figure  # of the extra `plots`

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if chart["stacked"]:
        steps = [record["step"] for record in metrics]
        axes.stackplot(
            steps, *([record.get(name, 0.0) for record in metrics] for name in chart["names"]), labels=chart["names"]
        )
    for name in () if chart["stacked"] else chart["names"]:
        points = [(record["step"], record[name]) for record in metrics if name in record]
        steps, values = [step for step, _ in points], [value for _, value in points]
        alone = len(chart["names"]) == 1
        axes.plot(steps, values, label=name, alpha=0.4 if alone else 1.0, marker="o" if len(points) < 30 else "")
        if alone:
            window = max(1, len(values) // 10)
            means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
            axes.plot(steps, means, color="C0", label=f"mean of {window} steps")
    axes.set(xlabel="step", title=chart["title"])
    axes.grid(alpha=0.3)
    axes.legend()
    with room_for(None, path), replacing(path) as file:
        figure.savefig(file, dpi=120)


def _tiles(options: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the numbers at the top of the page."""

    def change(name: str) -> dict[str, str]:
        values = [record[name] for record in metrics if name in record]
        return {labels[name]: f"{values[0]:.3f} → {values[-1]:.3f}"} if values else {}

    headline = "reward" if "reward" in options else "loss"
    labels = {
        headline: f"{headline.capitalize()}, first → last step",
        f"eval/{headline}": f"Held-out {headline}, first → last",
    }
    seconds = [record["seconds"] for record in metrics if "seconds" in record]
    steps = {"Steps": f"{metrics[-1]['step'] if metrics else 0} of {options['steps']}"}
    mean = {"Seconds per step": f"{sum(seconds) / len(seconds):.2f}"} if seconds else {}
    return steps | change(headline) | change(f"eval/{headline}") | mean


def charts_of(metrics: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of `CHARTS` that have numbers, and a chart of each other metric."""
    names = list(dict.fromkeys(name for record in metrics for name in record if name != "step"))
    charts, charted = [], set()
    for title, patterns in CHARTS.items():
        chart_names = [
            name
            for pattern in patterns
            for name in names
            if name == pattern or (pattern[-1] in "/@" and name.startswith(pattern))
        ]
        if chart_names:
            charts.append({"title": title, "names": chart_names, "stacked": title == PHASES})
            charted.update(chart_names)
    other_charts = [{"title": name, "names": [name], "stacked": False} for name in names if name not in charted]
    return {"charts": charts, "others": other_charts}


def _of_steps(records: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return at most `most` records, evenly spaced, and as many records of evaluations."""
    evaluations = [record for record in records if any(name.startswith("eval/") for name in record)]
    kept = {id(record) for group in (records, evaluations) for record in evenly_spaced(group, most)}
    return [record for record in records if id(record) in kept]


def _readable(value: Any) -> Any:
    """Return a JSON value in a readable form: printable text, numbers of 6 digits, None for NaN."""
    if isinstance(value, dict):
        return {printable(name): _readable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_readable(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return printable(value) if isinstance(value, str) else value
