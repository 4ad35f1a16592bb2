"""The programs of docs/guides run as printed, and its tables agree with the code."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import parallel_layers
from ckpt.cli import app as ckpt_app
from parallel_models import EngineOptions
from rl_models import Actor, OptimizerOptions, losses
from rl_train.cli import app
from rl_train.options import TrainOptions
from rl_train.quickstart import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "docs" / "guides"
EXTEND = ROOT / "examples" / "extend"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's model; the working directory is that of the programs."""
    monkeypatch.chdir(EXTEND)
    monkeypatch.syspath_prepend(str(EXTEND))
    make_checkpoint(tmp_path / "model", seed=0)
    return tmp_path / "model"


def test_a_run_of_ones_own_parts(model: Path, tmp_path: Path) -> None:
    """Loss, advantages, three rewards, engine and backend: all of them in one run."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcdef"))
    own = re.findall(r"--[\w.]+ \w+:\w+", (GUIDES / "extend.md").read_text().split("```")[1])
    assert len(own) == 5
    own = [*" ".join(own).split(), "--reward=rewards:judged@0.1", "--reward=rewards:novel@0"]
    small = ["--steps=2", "--prompts-per-step=3", "--samples=4", "--max-new-tokens=6", "--learning-rate=0.01"]
    given = ["train", f"--model={model}", f"--prompts={prompts}", f"--out={tmp_path / 'run'}", "--device=cpu"]
    result = CliRunner().invoke(app, [*given, *own, *small])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in found] == [1, 2]
    for line in found:
        assert line["rollout_difference"] < 1e-5, "each version of the weights has arrived"
        assert line["reward"] == pytest.approx(line["reward/alphabet"] + 0.1 * line["reward/judged"], abs=1e-6)
        assert {"reward/novel", "clip_fraction"} <= line.keys()
        assert "approx_kl" not in line, "a metric of the ready losses"
        assert {re.sub(r"(?<=^reward/).*", "*", name) for name in line} - {"step"} <= metrics_of_the_page()
    Actor.from_pretrained(tmp_path / "run" / "actor", device="cpu")


def test_the_backend_has_the_numbers_of_the_native_one(model: Path) -> None:
    def learned(backend: str) -> tuple[torch.Tensor, dict[str, float], dict[str, torch.Tensor]]:
        actor = Actor.from_pretrained(model, backend=backend, device="cpu", optimizer=OptimizerOptions(1e-3))
        batch = Actor.from_pretrained(model, device="cpu").generate([[1, 5], [1]], max_new_tokens=5, n=2)
        scores = actor.log_probs(batch)
        metrics = actor.update(batch, lambda inputs: losses.LossTerms(-inputs.log_probs * inputs.entropy))
        return torch.stack(scores), metrics, {name: each.clone() for name, each in actor.stream_weights()}

    (scores, metrics, weights), (own, own_metrics, own_weights) = map(learned, ("parallel", "backend:ONE_BY_ONE"))
    torch.testing.assert_close(own, scores, atol=1e-5, rtol=1e-5)
    assert own_metrics == pytest.approx(metrics, rel=1e-4)
    assert own_weights.keys() == weights.keys()
    for name, each in weights.items():
        torch.testing.assert_close(own_weights[name], each, atol=1e-4, rtol=1e-3)


def test_a_backend_that_does_not_generate_says_what_does(model: Path) -> None:
    actor = Actor.from_pretrained(model, backend="backend:ONE_BY_ONE", device="cpu")
    with pytest.raises(ValueError, match="take another engine by --rollouts"):
        actor.generate([[1]], max_new_tokens=2)


@pytest.mark.slow
def test_the_environment_of_the_guide_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXTEND)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "calculator"))
    from train import make_model  # its tokenizer has a chat template and the digits

    make_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"messages": "5", "number": 5}\n')
    given = ["train", f"--model={tmp_path / 'model'}", f"--prompts={tmp_path / 'rows.jsonl'}", "--device=cpu"]
    given += [
        "--environment=environment:Guess",
        "--steps=1",
        "--prompts-per-step=1",
        "--samples=8",
        "--data.max-turns=3",
    ]
    result = CliRunner().invoke(app, [*given, "--max-new-tokens=16", f"--out={tmp_path / 'run'}"])
    assert result.exit_code == 0, result.output
    (line,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open())
    assert line["turns"] >= 1
    assert line["reward_min"] >= -1


def test_the_environment_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXTEND))
    from environment import Guess

    game: Any = Guess()
    game.reset({"number": 4})
    assert (game.step("7").messages, game.step("2").messages) == ("lower", "higher")
    assert game.step("4").reward == pytest.approx(1 / 3)


# The functions that return the metrics of a run, by file; the string keys of their dicts are the names.
METRICS = {
    "rl-train/src/rl_train/data/mixture.py": ("by_source",),
    "rl-train/src/rl_train/loop/loop.py": ("_step", "_warn"),
    "rl-train/src/rl_train/loop/reinforcement.py": ("collect", "_collect", "_describe", "_staleness", "_estimate"),
    "rl-train/src/rl_train/loop/file_recipe.py": ("collect", "evaluate"),
    "rl-train/src/rl_train/loop/scoring.py": ("describe",),
    "rl-train/src/rl_train/loop/throughput.py": ("describe",),
    "rl-models/src/rl_models/losses/preference.py": ("_preferred", "kto"),
    "rl-train/src/rl_train/trajectories/episodes.py": ("describe",),
    "rl-train/src/rl_train/loop/evaluation.py": ("evaluate",),
    "rl-train/src/rl_train/rewards/judge.py": ("costs",),
    "rl-models/src/rl_models/losses/policy.py": ("_clipped_surrogate", "entropy_bonus", "sapo"),
    "rl-models/src/rl_models/losses/terms.py": ("weighted",),
    "rl-models/src/rl_models/losses/importance.py": ("importance_weights", "rollout_mismatch"),
    "rl-models/src/rl_models/losses/value.py": ("value_clip",),
    "rl-models/src/rl_models/calls/passes.py": ("_mtp_terms", "_reported"),
    "rl-models/src/rl_models/api/worker.py": ("_step",),
}


def metrics_of_the_code() -> set[str]:
    """The names of all metrics; "*" stands for a part that a run decides."""
    found = set()
    for file, functions in METRICS.items():
        tree = ast.parse((ROOT / "packages" / file).read_text())
        bodies = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name in functions]
        assert {body.name for body in bodies} == set(functions), file
        nodes = [node for body in bodies for node in ast.walk(body)]
        keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
        keys += [node.key for node in nodes if isinstance(node, ast.DictComp)]
        keys += [
            target.slice
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Subscript)
        ]
        keys = [key for key in keys if isinstance(key, ast.Constant | ast.JoinedStr)]
        names = {re.sub(r"\{.*?\}", "*", str(ast.literal_eval(re.sub("^f", "", ast.unparse(key))))) for key in keys}
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".phase")
        ]
        of_phases = {f"seconds_{ast.literal_eval(call.args[0])}" for call in calls}
        prefix = {"value.py": "critic_", "evaluation.py": "eval/"}.get(Path(file).name, "")
        found |= {name if name.startswith(prefix) else prefix + name for name in names | of_phases}
    return found - {"eval/*", "message", "phase"}


def metrics_of_the_page() -> set[str]:
    page = (GUIDES / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {re.sub(r"NAME|(?<=@)[KN]", "*", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_of_metrics_has_every_metric() -> None:
    page, code = metrics_of_the_page(), metrics_of_the_code()
    assert sorted(page - code) == [], "the code has no such metric"
    assert sorted(code - page) == [], "docs/guides/metrics.md lacks these"


def commands(page: str) -> list[list[str]]:
    """The commands `rl-train` and `ckpt` of a guide."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (GUIDES / page).read_text(), re.M | re.S)
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line[0] in ("rl-train", "ckpt")]


def call(command: list[str], *more: str) -> str:
    name, *arguments = command
    result = CliRunner().invoke({"rl-train": app, "ckpt": ckpt_app}[name], [*arguments, *more])
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the guides name."""
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcd"))
    (tmp_path / "rewards.py").write_text("def exact(prompt, response, row):\n    return len(set(response))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    for module in ("rewards", "losses", "advantages", "engine", "backend"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_commands_that_convert_and_verify() -> None:
    outputs = [call(command) for command in commands("checkpoints.md")]
    assert len(outputs) == 9
    assert outputs[6].startswith("the same: 21 tensors")


@pytest.mark.slow
def test_the_plans_are_those_that_are_printed(folder: Path) -> None:
    page = (GUIDES / "grid.md").read_text()
    (folder / "llama-8b").mkdir()
    (config,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    (folder / "llama-8b" / "config.json").write_text(config)
    printed = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    for command, output in zip(commands("grid.md"), printed, strict=True):
        assert call(command).split() == output.split()


@pytest.mark.slow
def test_a_run_is_resumed_on_another_grid(folder: Path) -> None:
    first, moved = commands("resume.md")
    call(first, "--device=cpu")
    shutil.rmtree("run/actor")
    call(first, "--device=cpu")  # nothing is left to learn
    assert (folder / "run" / "actor" / "model.safetensors").is_file()
    assert "going on after step 2" in call(moved, "--device=cpu")
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").open()]
    assert steps == [1, 2, 3]


def test_the_options_that_may_change_are_those_of_the_page() -> None:
    options = {flag.removeprefix("--"): option for option in TrainOptions.leaves() for flag in option.flags}
    may, may_not = zip(
        *re.findall(r"^\| ([^|]*) \| ([^|]*) \|$", (GUIDES / "resume.md").read_text(), re.M), strict=True
    )
    for cells, expected in ((may, True), (may_not, False)):
        for name in re.findall(r"`--([\w.-]+)`", " ".join(cells)):
            assert options[name].may_change == expected, name


def test_the_options_in_the_guides_exist() -> None:
    groups: list[Any] = [typer.main.get_command(each) for each in (app, ckpt_app)]
    commands = [command for group in groups for command in group.commands.values()]
    known = {option for command in commands for each in command.params for option in each.opts}
    for page in sorted([*GUIDES.glob("*.md"), ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "come-from.md"]):
        named = set(re.findall(r"(?<![\w-])--[a-z](?:[a-z0-9.-]*[a-z0-9])?", page.read_text()))
        assert sorted(named - known) == [], page.name


# Where the names of docs/come-from.md are looked up, in this order.
PLACES = (
    *("rl_models", "rl_models.losses", "rl_models.api.worker:Worker", "rl_train", "rl_train.engines"),
    *("parallel_layers", "parallel_layers.distributed", "parallel_layers.attention", "parallel_layers.head"),
    *("parallel_layers.data", "parallel_layers.memory", "hf_patches", "megatron_utils", "ckpt", "parallel_models"),
)
# What is no name of Python: fields of a batch, values, and shapes.
FIELDS = {"routing", "log_probs[t]", "[T]", "[T, H]", "ValueError", "pack", "unpack", "ckpt merge"}

GRPO = TrainOptions(model=Path(), prompts=Path(), reward="r:f", algorithm="grpo")
DEFAULTS = {str(value) for value in (GRPO.objective.aggregation, GRPO.sampling.max_new_tokens, GRPO.samples)}


def resolves(name: str) -> bool:
    """Whether a dotted name, with or without arguments, is that of an object of ours; its keywords are parameters."""
    called = re.fullmatch(r"([\w.]+)(?:\((.*?)\))?(?:\.(\w+)\(.*\))?", name)
    if called is None:
        return False
    path, _, method = called.groups()
    for place in (*PLACES, ""):
        module, _, inner = place.partition(":")
        with contextlib.suppress(AttributeError, ImportError, ValueError):
            found: Any = importlib.import_module(module) if module else pkgutil.resolve_name(path)
            for part in [*filter(None, inner.split(".")), *(path.split(".") if module else ())]:
                found = getattr(found, part)
            return method is None or hasattr(found, method)
    return False


def keyword_exists(text: str) -> bool:
    """Whether `name=value` or `name` is a parameter of actors, of their updates, or of the functions of a layer."""
    name = text.partition("=")[0]
    functions = [Actor.from_pretrained, Actor.update, Actor.predict, EngineOptions, parallel_layers.Placement]
    return any(name in inspect.signature(each).parameters for each in functions)


def test_every_name_of_ours_is_there_for_those_who_come_from_elsewhere() -> None:
    page = (ROOT / "docs" / "come-from.md").read_text()
    checked = 0
    for section in page.split("\n## ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        ours = {"What": 2, "Defaults": 4}.get(section.split()[0], 1)
        for row in rows[1:]:
            if ours < len(row):
                for name in re.findall(r"`([^`]+)`", row[ours]):
                    option = re.match(r"--[a-z.-]+", name)
                    known = name.strip('"') in FIELDS | DEFAULTS or option or resolves(name) or keyword_exists(name)
                    assert known, f"{section.splitlines()[0]}: {name}"
                    checked += 1
    assert checked > 70


def test_the_names_of_megatron_are_there() -> None:
    page = (ROOT / "docs" / "come-from.md").read_text()
    section = page.split("## Megatron-Core's")[1].split("\n## ")[0]
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    core = importlib.import_module("megatron.core")
    pipeline = importlib.import_module("megatron.core.pipeline_parallel")
    for row in [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]:
        for name in re.findall(r"`([a-zA-Z_.]+)", row[0]):
            places = (tensor_parallel, core, pipeline)
            wanted = name.partition(".")[0] if "_to_" not in name and "_from_" not in name else name.rstrip("_")
            assert any(any(each.startswith(wanted) for each in dir(place)) for place in places), name


def test_the_lines_of_the_guide_to_families_are_those_of_the_tables() -> None:
    page = (ROOT / "docs" / "adding-a-family.md").read_text()
    tables = [
        *(ROOT / "packages").glob("*/src/*/model/families/*.py"),
        *(ROOT / "packages").glob("ckpt/src/**/entries.py"),
    ]
    source = "".join(table.read_text() for table in tables)
    printed = [
        line.strip() for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()
    ]
    assert len(printed) > 8
    assert [line for line in printed if line not in source] == []
    for folder, name in re.findall(r"`(?:(packages/[\w/-]+)/)?(tests/[\w/]+\.py)`", page):
        assert (ROOT / folder / name).is_file() or list(ROOT.glob(f"packages/*/{name}")), name
