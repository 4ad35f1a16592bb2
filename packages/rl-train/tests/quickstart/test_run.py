"""The quickstart: its task, its files, and in the slow run that the reward rises, for three seeds."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rl_models import ModelConfig
from rl_train.cli.commands import app
from rl_train.options.options import TrainOptions
from rl_train.quickstart import run
from rl_train.quickstart.task import VOCABULARY, make_checkpoint, reward
from rl_train.report.terminal import Display


def ids(text: str) -> torch.Tensor:
    return torch.tensor([VOCABULARY.index(letter) for letter in text])


def test_the_task_rewards_the_next_letter() -> None:
    assert [reward("a", text, {}) for text in ("bcdefghi", "bcdzabcd", "", "cccccccc")] == [1, 0.875, 0, 0]
    assert reward("y", "zabcdefg", {}) == 1


def test_the_checkpoint_and_its_tokenizer_are_as_transformers_saves_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, seed=3)
    state = torch.get_rng_state()
    make_checkpoint(tmp_path / "again", seed=3)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are left alone"
    first, again = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path, tmp_path / "again"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert ModelConfig.from_hf(tmp_path).family == "llama"
    expected = [VOCABULARY.index("<s>"), *ids("hello").tolist()]
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("hello").ids == expected
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("hello").input_ids == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == "hello"


# That PPO learns, the quick run shows by `train` (`loop/test_train.py`); its quickstart has an eighth of the prompts
# and passes over them once.
@pytest.mark.parametrize(
    ("steps", "seed"), [(10, 0), *(pytest.param(26, seed, marks=pytest.mark.slow) for seed in (0, 1, 2))]
)
def test_the_files_agree_with_transformers_and_the_reward_rises(
    tmp_path: Path, steps: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps == 10:
        fewer = {"prompts_per_step": 8, "mini_batch": 8, "epochs": 1}
        monkeypatch.setattr(run, "TrainOptions", lambda **given: TrainOptions(**{**given, **fewer}))
    text = io.StringIO()
    with Display(steps, Console(file=text)) as display:
        result = run.quickstart(tmp_path / "out", steps, seed, "cpu", display)
    if steps > 10:
        assert result["reward_last"] >= 3 * result["reward_first"]
        assert result["reward_last"] > 0.15
    assert result["parity_max_abs"] <= 1e-5
    assert result["reload_max_abs"] <= 1e-5
    assert Path(result["curve"]).read_bytes().startswith(b"\x89PNG")
    assert AutoTokenizer.from_pretrained(result["checkpoint"])("ab").input_ids == [1, 4, 5]
    critic = json.loads((Path(result["critic"]) / "config.json").read_text())
    assert critic["architectures"] == ["LlamaForTokenClassification"]
    # Not a terminal: lines, no bar.
    lines = text.getvalue().splitlines()
    assert sum(line.startswith("step ") for line in lines) >= 10
    assert "\x1b" not in text.getvalue()


def test_without_matplotlib_the_page_has_the_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(*_: Any, on_event: Callable[[dict[str, Any]], None], **__: Any) -> dict[str, float]:
        lines = [{"step": step, "reward": step / 10, "tokens": 8, "seconds": 1.0} for step in range(1, 11)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        on_event({"sample": {"prompt": "a", "response": "bc"}})
        return {}

    prepared = list[str]()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "prepare", lambda *modules: prepared.extend(modules))
    monkeypatch.setattr("rl_train.loop.recipe_run.run_on_ranks", ranks)
    monkeypatch.setattr(run, "_max_difference", lambda *_: 0.0)
    events: list[Mapping[str, Any]] = []
    page = tmp_path / "report.html"
    assert run.quickstart(tmp_path, 10, 0, "cpu", events.append)["curve"] == str(page)
    assert '"reward":0.5' in page.read_text().replace(" ", "")
    assert not (tmp_path / "reward.png").exists()
    assert prepared == ["rl_train.loop.score", "rl_train.loop.run"], "else each of six ranks imports them"
    assert [event["message"] for event in events if "pip install" in event.get("message", "")] == [
        f"the rewards are in {page}; curves are drawn as PNGs where matplotlib is installed: "
        "pip install 'matplotlib>=3.9'"
    ]


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    runner = CliRunner()
    result = runner.invoke(app, ["quickstart", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "exists and is no folder" in result.stderr
    assert "Traceback" not in result.stderr
    assert runner.invoke(app, ["quickstart", "--steps", "3"]).exit_code == 2
    result = runner.invoke(app, ["quickstart", "--device", "tpu", "--out", str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "must be cpu or cuda" in result.stderr
