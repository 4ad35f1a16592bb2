"""`rl-train launch slurm`: the job's script, and a job on two machines that is stopped, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckpt.training import saved_steps
from rl_train.cli.commands import app
from rl_train.cluster.slurm import SlurmJob, seconds_of

from .processes.living import lives, wait_until

# Slurm's commands on one machine whose nodes are 127.0.0.1 and 127.0.0.2. `scontrol requeue` notes the job.
FAKES = {
    "sbatch": 'SLURM_JOB_ID=$PPID setsid bash "$1" >>"$FAKE/log" 2>&1 &\necho $! >"$FAKE/pid"\n'
    'echo "Submitted batch job 7"',
    "scontrol": 'if [ "$1" = show ]; then printf "%s\\n" 127.0.0.1 127.0.0.2; else echo "$2" >>"$FAKE/requeued"; fi',
    "srun": """while [ "$1" != bash ]; do shift; done
trap 'kill $tasks' TERM
export SLURM_NNODES=2
for node in 0 1; do SLURM_NODEID=$node PET_LOCAL_ADDR=127.0.0.$((node + 1)) "$@" & tasks="$tasks $!"; done
for _ in 0 1; do wait -n || { kill $tasks; wait; exit 1; }; done""",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the fakes, which are on PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "127.0.0.[1-2]")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def arguments(model: Path, prompts: Path, out: Path, *further: str) -> list[str]:
    options: dict[str, Any] = {
        "model": model, "prompts": prompts, "reward": "rewards:alphabet", "prompts-per-step": 8, "max-new-tokens": 6,
        "learning-rate": 3e-3, "save-every": 100, "steps": 3, "algorithm": "ppo", "dims": "dp=2", "out": out,
        "device": "cpu", "rollouts.devices": "cpu",
    }  # fmt: skip
    return ["train", *(f"--{name}={value}" for name, value in options.items()), *further]


def launch(*words: str) -> Any:
    return CliRunner().invoke(app, ["launch", "slurm", *words])


def is_clean(script: Path) -> bool:
    """Say whether bash and shellcheck find no fault."""
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checks = (["bash", "-n", str(script)], [str(shellcheck), str(script)])
    return all(subprocess.run(check).returncode == 0 for check in checks)


def test_the_script_asks_for_the_nodes_and_quotes_the_run(tmp_path: Path) -> None:
    job = SlurmJob(
        ["train", "--data.system-prompt", "it's a $HOME"], tmp_path / "a run", 2, 4, "01:00:00", 90, None, ["--qos=x y"]
    )
    script = tmp_path / "script"
    script.write_text(job.script())
    assert is_clean(script)
    words = subprocess.run(["bash", "-c", f"srun() {{ printf '%s\\n' \"$@\"; }}; . {script}"], text=True,
        capture_output=True, env={"SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}).stdout.splitlines()  # fmt: skip
    assert words[-3:] == job.command
    directives = {line for line in script.read_text().splitlines() if line.startswith("#SBATCH")}
    assert directives >= {
        "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "#SBATCH --time=01:00:00", "#SBATCH --exclusive",
        "#SBATCH --signal=B:USR1@90", "#SBATCH --requeue", "#SBATCH '--qos=x y'", "#SBATCH --ntasks-per-node=1",
        f"#SBATCH '--output={tmp_path}/a run.slurm-%j.log'",
    }  # fmt: skip
    with pytest.raises(ValueError, match="options of sbatch are like --qos=high"):
        SlurmJob(["train"], tmp_path, options=["--a\nrm"]).script()
    with pytest.raises(ValueError, match="save-seconds=30 must be more than 30"):
        SlurmJob(["train"], tmp_path, save_seconds=30).script()
    with pytest.raises(ValueError, match=r"time=00:05:00 must be more than save-seconds=300; change one of them"):
        SlurmJob(["train"], tmp_path, time="00:05:00").script()
    for limit in ("00:05:01", "6", "0"):  # 0: no limit
        SlurmJob(["train"], tmp_path, time=limit).script()


def test_time_limits_are_those_of_sbatch() -> None:
    seconds = {"30": 1800, "30:10": 1810, "04:00:00": 14400, "2-12": 216000, "2-12:30": 217800, "1-0:0:5": 86405}
    assert {time: seconds_of(time) for time in seconds} == seconds


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    ("words", "further", "message"),
    [
        (["--nodes=2"], [], "--device cpu does not go with --gpus-per-node 8"),
        (["--nodes=3", "--gpus-per-node=0"], [], "2 ranks do not divide into 3 equal parts"),
        (["--gpus-per-node=1"], ["--device=cuda"], "2 ranks need as many CUDA devices, found 1"),
        (["--gpus-per-node=0", "--time=soon"], [], "--time soon is no time limit of Slurm"),
        (["--gpus-per-node=0"], ["--save-every=0"], "--save-every 0 keeps no training checkpoint"),
        (["--gpus-per-node=0"], ["--json"], "leave --dry-run and --json out"),
        (["--gpus-per-node=0"], ["--stpes=3"], "No such option"),
        (["--gpus-per-node=0"], ["--reward=rewards:nothing"], "rewards has no"),
        (["--gpus-per-node=0"], ["--ray"], "leave --ray out"),
    ],
)
def test_a_run_that_could_not_start_is_refused(
    model: Path, prompts: Path, tmp_path: Path, words: list[str], further: list[str], message: str
) -> None:
    result = launch(*words, *arguments(model, prompts, tmp_path / "run", *further))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run.slurm.sh").exists()


@pytest.mark.usefixtures("folder_of_rewards")
def test_the_job_of_a_checked_run_is_written_for_gpus_that_this_machine_lacks(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = arguments(model, prompts, tmp_path / "run", "--device=cuda", "--dims=dp=16")
    result = launch("--nodes=2", "--partition=gpu", "--sbatch=--account=me", *run)
    assert result.exit_code == 0, result.output
    script = tmp_path / "run.slurm.sh"
    assert is_clean(script)
    assert {"#SBATCH --partition=gpu", "#SBATCH --account=me"} <= set(script.read_text().splitlines())
    monkeypatch.setenv("PATH", str(tmp_path))
    result = launch("--nodes=2", "--submit", *run)
    assert "--submit needs sbatch, which is not on PATH" in result.output
    assert launch("score").exit_code == 2


def steps(out: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps, without times."""
    if not (out / "metrics.jsonl").is_file():
        return []
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in record.items() if "second" not in name} for record in records]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, and needs 127.0.0.2")
@pytest.mark.usefixtures("folder_of_rewards")
def test_a_job_on_two_machines_is_stopped_killed_and_resumed(
    model: Path, prompts: Path, tmp_path: Path, slurm: Path
) -> None:
    """Its metrics and weights are those of one machine; only the first of torchrun's agents writes files."""
    out, count = tmp_path / "run", 12

    def submit(*further: str) -> int:
        run = arguments(model, prompts, out, f"--steps={count}", *further)
        result = launch("--nodes=2", "--gpus-per-node=0", "--save-seconds=120", "--submit", *run)
        assert result.exit_code == 0, result.output
        assert "Submitted batch job 7" in result.output
        return int((slurm / "pid").read_text())

    def log() -> str:
        return (slurm / "log").read_text()

    # The time limit comes near: the run saves the step under way, and the job is queued again.
    job = submit()
    wait_until(lambda: bool(steps(out)) or not lives(job), 120)
    os.kill(job, signal.SIGUSR1)
    wait_until(lambda: not lives(job), 120)
    assert (slurm / "requeued").is_file(), log()
    (saved,) = saved_steps(out / "training" / "actor")
    assert 1 <= saved < count
    assert len(steps(out)) == saved
    assert f"stopped: {saved} of {count} steps are done; the same command goes on after step {saved}" in " ".join(
        log().split()
    )
    # The second machine is killed: the first one names it.
    job = submit("--save-every=1")
    wait_until(lambda: len(steps(out)) > saved or not lives(job), 120)
    commands = {
        int(path.parent.name): path.read_bytes().split(b"\0")
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(out).encode() in path.read_bytes() and b"torch.distributed.run" not in path.read_bytes()
    }
    runs = [pid for pid, words in commands.items() if b"rl_train" in words]
    of_second = [pid for pid in runs if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(of_second[0], signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: not lives(job), 120)
    assert time.monotonic() - killed < 60
    assert len((slurm / "requeued").read_text().splitlines()) == 1  # a failed run is not queued again
    # The same job runs to the end.
    job = submit()
    wait_until(lambda: not lives(job), 180)
    assert f"done: after {count} steps" in log()
    whole = tmp_path / "whole"
    result = CliRunner().invoke(app, arguments(model, prompts, whole, f"--steps={count}"))
    assert result.exit_code == 0, result.output
    assert steps(out) == steps(whole)
    weights = [(folder / "actor" / "model.safetensors").read_bytes() for folder in (out, whole)]
    assert weights[0] == weights[1]
