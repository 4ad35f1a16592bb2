"""`SlurmJob`: the script of a Slurm job that trains, saves before its time limit, and queues itself again."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Slurm sends the signal to the script alone. torchrun on each node starts one command, and this one the node's ranks.
# A run that could not save anything within the time limit would be queued again for ever.
_SCRIPT = """\
run={run}
newest() {{ cat "$run"/training/*/latest 2>/dev/null; }}
before=$(newest)
asked=
trap 'asked=1; touch "$run/stop"' USR1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((12000 + SLURM_JOB_ID % 20000))
# shellcheck disable=SC2016  # each node has its own number
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c 'exec "$0" -m torch.distributed.run --nnodes "$SLURM_NNODES" \\
  --node-rank "$SLURM_NODEID" --master-addr "$1" --master-port "$2" -m rl_train "${{@:3}}"' \\
  {python} "$first" "$port" \\
  {command} &
step=$!
wait "$step"
status=$?
if [ -n "$asked" ]; then
  deadline=$((SECONDS + {patience}))
  while kill -0 "$step" 2>/dev/null && ((SECONDS < deadline)); do sleep 1; done
  kill "$step" 2>/dev/null
  wait "$step"
  status=$?
  if [ "$(newest)" = "$before" ]; then
    echo "the job saved no step within its time limit, and is not queued again; give more --time or --save-seconds" >&2
    exit 1
  fi
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
# Seconds of `save_seconds` that Slurm gets to queue the job again.
_REQUEUE_SECONDS = 30


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit of sbatch, such as 30 (minutes), 04:00:00 or 2-12; 0: no limit."""
    if (match := _TIME.fullmatch(time)) is None:
        raise ValueError(f"--time {time} is no time limit of Slurm, such as 04:00:00 or 2-12:00:00")
    numbers = [int(number) for number in match["rest"].split(":")]
    if match["days"] is None and len(numbers) < 3:
        numbers.insert(0, 0)  # without days, the hours may be left out
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True)
class SlurmJob:
    """A job whose nodes each start an equal part of a run's ranks.

    Its fields are the options of `rl-train launch slurm`, the command line of the run, such as
    `["train", "--model", "M"]`, the folder of the run, and further options of sbatch.
    """

    command: Sequence[str]
    run: Path
    nodes: int = 1
    gpus_per_node: int = 8
    time: str = "24:00:00"
    save_seconds: int = 300
    cpus_per_node: int | None = None
    options: Sequence[str] = ()

    def script(self) -> str:
        """Return the text of the job's script.

        Raises:
            ValueError: An option has a line break, or the seconds to save leave no time to queue the job again, or to
                run before.
        """
        if self.save_seconds <= _REQUEUE_SECONDS:
            raise ValueError(f"save-seconds={self.save_seconds} must be more than {_REQUEUE_SECONDS}")
        if 0 < seconds_of(self.time) <= self.save_seconds:
            raise ValueError(f"time={self.time} must be more than save-seconds={self.save_seconds}; change one of them")
        out = self.run.absolute()
        options = [
            f"--job-name=rl-train-{self.run.name}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *(["--exclusive", "--mem=0"] if self.cpus_per_node is None else [f"--cpus-per-task={self.cpus_per_node}"]),
            f"--time={self.time}",
            f"--signal=B:USR1@{self.save_seconds}",
            "--requeue",
            "--open-mode=append",
            f"--output={out}.slurm-%j.log",
            f"--chdir={Path.cwd()}",
            *self.options,
        ]
        if broken := [option for option in options if "\n" in option or not option.startswith("-")]:
            raise ValueError(f"options of sbatch are like --qos=high, on one line; got {broken}")
        lines = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
        body = _SCRIPT.format(
            run=shlex.quote(str(out)),
            python=shlex.quote(sys.executable),
            command=shlex.join(self.command),
            patience=self.save_seconds - _REQUEUE_SECONDS,
        )
        return f"#!/bin/bash\n{lines}\n{body}"
