from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from torch import Tensor
from typer.main import get_command
from typer.testing import CliRunner

from ckpt import Grid, layout_for, load_hf, reshard, save_hf
from ckpt.cli import app
from ckpt.cli.common import print_table

Checkpoints = Callable[..., Path]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})


def test_shard_reshard_merge_and_verify(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen3-moe")
    result = run("shard", source, tmp_path / "a", "--tp", 2, "--ep", 2, "--target", "megatron", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == 4
    assert run("reshard", tmp_path / "a", tmp_path / "b", "--pp", 3, "--target", "parallel").exit_code == 0
    result = run("merge", tmp_path / "b", tmp_path / "c", "--max-shard-size", "30KB", "--json")
    assert result.exit_code == 0, result.output
    written = list((tmp_path / "c").glob("*.safetensors"))
    assert len(written) > 1
    size = sum(file.stat().st_size for file in written)
    assert json.loads(result.stdout) == {"folder": str(tmp_path / "c"), "files": len(written), "bytes": size}
    result = run("verify", source, tmp_path / "c")
    assert result.exit_code == 0
    assert "the same: " in result.stdout
    assert json.loads(run("verify", source, tmp_path / "c", "--json").stdout)["equal"] is True
    assert run("diff", source, tmp_path / "c").exit_code == 0


def test_differences_are_exit_code_1(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    tensors["model.norm.weight"][0] += 1
    save_hf(tmp_path / "b", tensors, layout)
    result = run("verify", source, tmp_path / "b")
    assert result.exit_code == 1
    assert "worst: model.norm.weight: 1 elements differ, first at [0]" in result.stdout
    result = run("verify", source, tmp_path / "b", "--atol", 2)
    assert result.exit_code == 0
    assert result.stdout.startswith("within --rtol 0 and --atol 2: 21 tensors, ")
    result = run("diff", source, tmp_path / "b")
    assert result.exit_code == 1
    assert "model.norm.weight" in result.stdout
    [difference] = json.loads(run("diff", source, tmp_path / "b", "--json").stdout)["differences"]
    assert difference["kind"] == "values"
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    result = run("verify", source, tmp_path / "b", "--atol", 2)
    assert result.exit_code == 1
    assert result.stdout.startswith("0 of 21 tensors differ\n1 differences\n")
    assert re.search(r"config.json rms_norm_eps .* 1e-06 and 1e-05", result.stdout)


def test_a_tensor_that_differs_in_several_ways_or_is_missing_counts_once(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    whole = len(layout.canonical)
    save_hf(tmp_path / "half", tensors, layout, dtype=torch.bfloat16)
    assert f"\n{whole} of {whole} tensors differ\n" in "\n" + run("verify", source, tmp_path / "half").stdout
    assert f"\n1 of {whole} tensors differ\n" in "\n" + run("verify", source, checkpoint("llama-tied")).stdout


@pytest.mark.parametrize("target", ["parallel", "megatron"])
def test_plan_counts_what_is_loaded(target: Any, checkpoint: Checkpoints) -> None:
    source = checkpoint("deepseek")
    shares = json.loads(run("plan", source, "--tp", 2, "--ep", 2, "--target", target, "--json").stdout)
    places = list(Grid(tp=2, ep=2).places())
    assert len(shares) == len(places)
    for share, place in zip(shares, places, strict=True):
        tensors = load_hf(source, layout_for(source, target), place)
        assert share["bytes"] == sum(held_bytes(tensor) for tensor in tensors.values())
        assert share["bytes"] == sum(share["components"].values())
        assert share["place"] == json.loads(json.dumps(place.to_json()))


def test_a_name_with_brackets_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    title = "/a/path/that/is/longer/than/the/table"
    print_table(title, ("tensor",), [("[/bold]odd[red]",)])
    shown = capsys.readouterr().out
    assert "[/bold]odd[red]" in shown
    assert title in shown


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("command", ["shard", "merge", "verify"])
def test_progress_is_shown_on_a_terminal_only(
    command: str, terminal: bool, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shards = checkpoint("llama", vocab_size=51), tmp_path / "shards"
    reshard(source, shards, Grid(tp=2))
    # What makes rich take any stream for a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    read = source if command == "shard" else shards
    result = run(command, read, source if command == "verify" else tmp_path / "out", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["equal"] if command == "verify" else facts["files"] == 1
    shown = re.sub(r"\x1b\[[^m]*m", "", result.stderr)
    assert ("B/s" in shown) == terminal
    # It ends at the end.
    assert bool(re.search(r" (\d+\.\d)/\1 kB ", shown)) == terminal
    assert terminal or result.stderr == ""


@pytest.mark.parametrize("command", ["inspect", "plan", "shard", "merge", "reshard", "verify", "diff"])
def test_every_command_takes_json_and_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    # Some environments have colour forced on the help text, in the middle of an option's name.
    assert "--json" in re.sub(r"\x1b\[[^m]*m", "", result.stdout)


@pytest.mark.parametrize(
    ("command", "sources"),
    [
        ("shard", "from a Hugging Face checkpoint or another grid's files"),
        ("merge", "A source is a Hugging Face folder, a sharded folder"),
    ],
)
def test_conversions_say_that_either_form_is_a_source(command: str, sources: str) -> None:
    assert sources in " ".join(re.sub(r"\x1b\[[^m]*m", "", run(command, "--help").stdout).split())


def held_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_plan_needs_no_weights_and_shows_a_table(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    result = run("plan", tmp_path, "--tp", 2, "--pp", 2, "--layers", "1,1", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "pp=1/2,tp=1/2" in result.stdout
    full = json.loads(run("plan", tmp_path, "--json").stdout)
    half = json.loads(run("plan", tmp_path, "--json", "--dtype", "bfloat16").stdout)
    assert full[0]["bytes"] == 2 * half[0]["bytes"]


def test_a_dtype_is_cast_on_the_way(checkpoint: Checkpoints, tmp_path: Path) -> None:
    assert run("shard", checkpoint("llama"), tmp_path / "a", "--tp", 2, "--dtype", "bfloat16").exit_code == 0
    assert run("merge", tmp_path / "a", tmp_path / "b").exit_code == 0
    tensors = load_hf(tmp_path / "b", layout_for(tmp_path / "b"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", 3], "num_attention_heads=4 is not divisible by tp=3; use tp in {1, 2, 4}"),
        (["--layers", "many"], "--layers='many' must be"),
        (["--dtype", "float12"], "--dtype='float12'"),
        (["--pp", 2, "--layers", "1,2"], "layers=[1, 2] sums to 3"),
        (["--dtype", "int8"], "--dtype='int8'"),
        (["--ep", 2], "ep=2 would divide experts, and this llama model has none; leave it out"),
        (["--target", "deepspeed"], "target='deepspeed' is unknown"),
        (["--pp", 3], "num_hidden_layers=2 is fewer than the 3 chunks of the pipeline"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    args: list[Any], message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    for command in (["plan", checkpoint("llama")], ["shard", checkpoint("llama"), tmp_path / "out"]):
        result = run(*command, *args)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "plan", "shard", "merge", "reshard", "verify", "diff"])
def test_a_missing_folder_is_one_line_and_exit_code_2(command: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    none, source, out = tmp_path / "none", checkpoint("llama"), tmp_path / "out"
    cases: list[tuple[Path, ...]] = [(none,)]
    if command in ("shard", "merge", "reshard"):
        cases = [(none, out)]
    elif command in ("verify", "diff"):
        # There, 1 says that the checkpoints differ.
        cases = [(none, source), (source, none)]
    for folders in cases:
        result = run(command, *folders)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {none} does not exist")
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_one_file_of_weights_is_a_source(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen2-vl")
    file = tmp_path / "weights.safetensors"
    shutil.copy(source / "model.safetensors", file)
    missing = run("verify", source, file)
    assert missing.exit_code == 2
    assert missing.stderr.startswith(f"error: {tmp_path / 'config.json'} does not exist")
    shutil.copy(source / "config.json", tmp_path)
    assert run("verify", source, file).exit_code == 0
    for command in ("inspect", "plan"):
        shown = [json.loads(run(command, path, "--json").stdout) for path in (source, file)]
        assert shown[0] == shown[1]
    for command in ("shard", "reshard", "merge"):
        result = run(command, file, tmp_path / command)
        assert result.exit_code == 0, result.output
        assert run("verify", source, tmp_path / command).exit_code == 0


def test_the_installed_command_explains_itself_and_returns_the_exit_code() -> None:
    def ckpt(*args: object) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "ckpt"), *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    shown = ckpt("--help")
    assert shown.returncode == 0, shown.stderr
    for command in ("inspect", "plan", "shard", "merge", "reshard", "verify", "diff"):
        assert command in shown.stdout
    assert ckpt("verify", "a", "b", "--atol", "x").returncode == 2


STOPPED = """
import os, signal, sys
import ckpt.transfer.offline
from ckpt.cli import app

number = int(sys.argv.pop())

open_source = ckpt.transfer.offline.open_source

def stop(folder, *arguments, **options):
    if folder.name.startswith("."):  # the last step before the folder takes its place
        assert any(file.stat().st_size > 10_000 for file in folder.iterdir())
        os.kill(os.getpid(), number)
    return open_source(folder, *arguments, **options)

ckpt.transfer.offline.open_source = stop
app()
"""


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(signal.SIGINT, "Ctrl-C", marks=pytest.mark.slow),
        (signal.SIGTERM, "SIGTERM"),
        pytest.param(signal.SIGHUP, "SIGHUP", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_stopped_leaves_nothing_unfinished_and_says_so(
    number: signal.Signals, name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    reshard(source, out, Grid(tp=2))
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    command = [sys.executable, "-c", STOPPED, "shard", source, out, "--pp", 2, int(number)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.startswith(f"stopped by {name}: unfinished output is removed")
    assert len(done.stderr.splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


# A title, a clipboard, a clear screen, a C1 control, a mark of direction, rich's markup, and a byte that is no UTF-8.
HOSTILE = "\x1b]0;title\x07\x1b]52;c;eA==\x07\x1b[2J\x9b2J\u202e[red]" + os.fsdecode(b"\xff")


def test_names_in_files_do_not_rule_the_terminal(checkpoint: Checkpoints, tmp_path: Path) -> None:
    llama, folder, merged, adapter = checkpoint("llama"), tmp_path / HOSTILE, tmp_path / f"m{HOSTILE}", tmp_path / "a"
    shutil.copytree(llama, folder)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": HOSTILE, "target_modules": [HOSTILE]})
    )
    factors = {f"base_model.model.{HOSTILE[:-1]}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    save_file(factors, adapter / "adapter_model.safetensors")
    other = tmp_path / "other"
    layout = layout_for(llama)
    save_hf(other, {**load_hf(llama, layout), "model.norm.weight": torch.zeros(32)}, layout)
    damaged = tmp_path / "damaged"
    shutil.copytree(llama, damaged)
    save_file({HOSTILE[:-1]: torch.ones(2)}, damaged / "model.safetensors")
    shown = {
        name: run(*arguments)
        for name, arguments in {
            "inspect": ("inspect", folder),
            "plan": ("plan", folder, "--tp", 2),
            "merge": ("merge", folder, merged),
            "verify": ("verify", folder, other),
            "an adapter": ("inspect", adapter),
            "an adapter without its model": ("merge", adapter, tmp_path / "out"),
            "a tensor": ("inspect", damaged),
            "nothing": ("inspect", tmp_path / f"no{HOSTILE}"),
        }.items()
    }
    for name, result in shown.items():
        assert result.exception is None or isinstance(result.exception, SystemExit), name
        assert all(letter.isprintable() or letter == "\n" for letter in result.output), name
    for name in ("inspect", "plan", "merge", "an adapter", "a tensor", "nothing"):
        assert r"\x1b]0;title" in shown[name].output, shown[name].output
        assert "[red]" in "".join(shown[name].output.split())


def test_an_unforeseen_error_does_not_rule_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*args: object, **kwargs: object) -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr("ckpt.verify", verify)
    result = run("verify", "a", "b")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("\\u202e[red]\\udcff\n")
    assert all(letter.isprintable() or letter == "\n" for letter in result.output)


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"rl-ckpt {version('rl-ckpt')}\n")


def test_the_examples_of_every_command_are_understood() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for command in commands.values():
        title, *examples = command.epilog.split("\n\n")
        assert title == "Examples:"
        for example in examples:
            program, name, *arguments = shlex.split(example)
            assert (program, commands[name].callback.__name__) == ("ckpt", command.callback.__name__)
            command.make_context(name, arguments)
