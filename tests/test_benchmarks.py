"""Every benchmark that a CPU can run does run, at small sizes; the figures themselves mean nothing there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Name, ranks, arguments beside `--tiny --rounds 1`.
RUNS: list[tuple[str, int, list[str]]] = [
    ("attention", 1, []),
    ("invariant", 2, ["--model", "mixture"]),
    ("products", 1, []),
    ("sampling", 1, []),
    ("sampling", 2, []),
    ("step", 2, []),
    ("fsdp", 2, []),
    ("float8", 1, []),
    ("context_parallel", 2, []),
    ("context_parallel", 1, ["--alone", "4"]),
    ("memory_options", 1, []),
    ("huggingface", 1, []),
    ("linear_attention", 1, []),
    ("hybrid", 1, ["--measure", "steps", "long", "draw"]),
    ("linear_attention_cp", 2, ["--state-space"]),
    ("lora", 1, []),
    ("moe", 1, []),
    ("micro_batches", 1, []),
    ("optimizers", 1, []),
    ("huggingface", 2, ["--tokens", "256"]),
    ("handover", 1, ["--check"]),
    ("rollouts", 1, []),
    ("rollouts", 2, ["--shape", "30b-a3b", "--dims", "dp=2,ep=2", "--engines", "ours-gather", "ours-exchange"]),
    ("rollouts", 2, ["--dims", "tp=2", "--files"]),
    ("turns", 1, []),
    ("gateway", 1, []),
    ("distillation", 1, []),
    ("few_tokens", 1, []),
    ("few_tokens", 2, []),
    ("async", 1, ["--modes", "synchronous", "in-flight"]),
    ("rl_step", 1, ["--shape", "30b-a3b"]),
]
# Programs without `--tiny`: their smallest arguments.
PROGRAMS = {
    "any_family": ["llama"],
    "changed_weights": ["--steps", "1", "--hidden", "64", "--layers", "1", "--mb", "1"],
    "checksums": ["--gb", "0.02", "--rounds", "1"],
    "stream": ["--gb", "0.02", "--rounds", "1"],
}
# Run by a test below, or by none: they need GPUs, vLLM or hours; and what the programs share.
OTHERS = {"checkpoint", "elementwise", "grpo", "longest"}
NOT_RUN = {"agents", "block_fp8", "fp8_rollouts", "gkd", "head", "judged", "three_stages", "weight_sync"}
SHARED = {"kernel_times", "measure", "megatron_model", "random_run"}


def test_every_program_is_in_a_table() -> None:
    programs = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert programs == {name for name, _, _ in RUNS} | PROGRAMS.keys() | OTHERS | NOT_RUN | SHARED


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *PROGRAMS[name]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert re.search(r"\d", run.stdout)
    assert "WRONG" not in run.stdout


def run_benchmark(name: str, ranks: int, arguments: list[str], report: Path) -> dict[str, Any]:
    """Return what the benchmark writes to `report`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "benchmarks" / f"{name}.py"), *arguments, "--json", str(report)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert "| " in run.stdout
    written: dict[str, Any] = json.loads(report.read_text())
    assert written["machine"]["torch"]
    return written


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "arguments"), RUNS)
def test_benchmark_runs(name: str, ranks: int, arguments: list[str], tmp_path: Path) -> None:
    run_benchmark(name, ranks, ["--tiny", "--rounds", "1", *arguments], tmp_path / "report.json")


@pytest.mark.slow
def test_the_longest_pack_is_measured_beside_its_plan(tmp_path: Path) -> None:
    """On a CPU nothing is too long: two packs, and one sequence."""
    only = "recompute full, tiled_mlp 8"
    written = run_benchmark("longest", 1, ["--tiny", "--one", "--lora", "4", "--only", only], tmp_path / "report.json")
    runs = written["variants"][only]["runs"]
    assert [(run["tokens"], run["one"], run["fits"]) for run in runs] == [
        (64, False, True), (128, False, True), (128, True, True),
    ]  # fmt: skip


@pytest.mark.slow
def test_loading_reads_what_a_rank_holds_within_its_memory(tmp_path: Path) -> None:
    """At the least size, one layer between the embeddings: about 1 GB."""
    arguments = ["--gb", "0.02", "--rounds", "1", "--folder", str(tmp_path), "--json"]
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert len(report["loads"]) == 4
    for name, load in report["loads"].items():
        assert 0.9 <= load["read_over_held"] <= 1.02, name
        assert load["peak_extra_mib"] <= load["extra_limit_mib"], name
    assert report["save"]["bytes_held"] == report["loads"]["tp 1, rank 0"]["bytes_held"]
    assert len(report["peers"]) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.gpu
def test_the_first_row_of_elementwise_is_captured(tmp_path: Path) -> None:
    """Its backward, too, before any other capture has run."""
    written = run_benchmark("elementwise", 1, ["--only", "head_norm"], tmp_path / "report.json")
    first = written["rows"][0]
    assert first["variant"] == "ours"
    assert first["note"] == ""
    assert first["backward_us"] > 0
