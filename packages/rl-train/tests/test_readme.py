"""The README and docs/rl-train.md agree with the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.options.derived import check
from rl_train.options.draw_options import EvaluateOptions, GenerateOptions
from rl_train.options.file_options import DistillOptions, DpoOptions, RewardModelOptions, SftOptions
from rl_train.options.memory_plan import PlanOptions
from rl_train.options.nested import Options
from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve
from rl_train.quickstart.task import make_checkpoint

PACKAGE = Path(__file__).resolve().parent.parent
README = (PACKAGE / "README.md").read_text()
ROOT = PACKAGE.parents[1]
SECTION = (ROOT / "docs" / "rl-train.md").read_text().split("\n## Command line\n")[1]
ROLLOUTS = (ROOT / "docs" / "rollouts.md").read_text()
COMMANDS: Any = typer.main.get_command(app)
OPTIONS: dict[str, type[Options]] = {
    "train": TrainOptions,
    "sft": SftOptions,
    "dpo": DpoOptions,
    "reward": RewardModelOptions,
    "distill": DistillOptions,
    "evaluate": EvaluateOptions,
    "generate": GenerateOptions,
    "plan": PlanOptions,
}


def defaults(command: str) -> dict[str, Any]:
    """Return the default of every option by its name on the command line."""
    chosen = COMMANDS.commands[command]
    parameters = [option for each in (chosen, *getattr(chosen, "commands", {}).values()) for option in each.params]
    found = {name: option.default for option in parameters for name in option.opts}
    for option in OPTIONS.get(command, Options).leaves():
        found |= dict.fromkeys(option.flags, None if option.field.is_required() else option.field.default)
    return found


def test_the_commands_have_the_options_and_defaults_that_it_prints() -> None:
    lines = re.findall(r"^    rl-train (\w+(?: \| \w+)*)((?: .*\n)(?:     +.*\n)*)", SECTION, re.M)
    usages = [(command, usage) for commands, usage in lines for command in commands.split(" | ")]
    assert {command for command, _ in usages} == set(COMMANDS.commands)
    compared = 0
    for command, usage in usages:
        known = defaults(command)
        options = re.findall(r"(--[a-z0-9.-]+)(?: ([^\s\]|]+))?", usage)
        assert options or command in ("report", "export")
        for name, value in options:
            assert name in known, f"{command} has no {name}"
            # What has no default of its own is shown with an example.
            if value and known[name] not in (None, ""):
                compared += 1
                assert value == str(known[name]), f"{command} {name}"
    assert compared == 19


def test_the_options_in_its_text_exist() -> None:
    known = {name for command in COMMANDS.commands for name in defaults(command)} | {"--help"}
    named = set(re.findall(r"`(--[a-z0-9.-]*[a-z0-9])", README + SECTION + ROLLOUTS))
    assert len(named) > 10
    assert named <= known


def test_the_options_in_files_of_the_pages_exist(tmp_path: Path) -> None:
    pages = [PACKAGE / "README.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    # The commands of the pages have the files of rows.
    needed = {"model": Path("m"), "prompts": Path("p"), "reward": "r:f", "evaluation.prompts": Path("e")}
    checked = 0
    for page in pages:
        for form, block in re.findall(r"^```(toml|yaml)\n(.*?)^```", page.read_text(), re.M | re.S):
            included = re.fullmatch(r'--8<-- "(.*)"\n', block)
            if included and included[1].endswith("stages.toml"):
                continue  # the options of several commands, see tests/test_examples.py
            (tmp_path / f"run.{form}").write_text((ROOT / included[1]).read_text() if included else block)
            check(resolve(TrainOptions, tmp_path / f"run.{form}", needed))
            checked += 1
    assert checked == 2


def test_its_example_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("checkpoint"), seed=0)
    Path("prompts.jsonl").write_text("\n".join(re.findall(r'^    (\{"text".*)$', README, re.M)))
    Path("rewards.py").write_text(re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)[0])
    # The prompts are longer than the quickstart's model allows.
    config = json.loads(Path("checkpoint/config.json").read_text())
    Path("checkpoint/config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    commands = re.findall(r"^    rl-train (plan|train) ((?:.*\\\n)*.*)$", README, re.M)
    assert [name for name, _ in commands] == ["plan", "train", "train"]
    for name, options in commands[:2]:
        sys.modules.pop("rewards", None)
        given = [name, *options.replace("\\\n", " ").split(), "--json", *["--device=cpu"] * (name == "train")]
        found = CliRunner().invoke(app, given)
        assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["number_of_prompts"] == 2
    assert commands[1][1].removesuffix(" --dry-run") == commands[2][1]


@pytest.mark.slow
def test_the_quickstart_prints_one_object(tmp_path: Path) -> None:
    fields = re.search(r"`quickstart --json` prints one object on standard output \((.*?), and more\)", SECTION, re.S)
    assert fields
    result = subprocess.run(
        [sys.executable, "-m", "rl_train", "quickstart", "--json", "--steps=10", "--device=cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(re.findall(r"`(\w+)`", fields[1])) <= found.keys()
    assert found["checkpoint"] == "quickstart/actor"
    assert "step 10/10" in result.stderr
