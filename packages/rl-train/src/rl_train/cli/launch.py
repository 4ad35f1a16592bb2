"""`rl-train launch slurm`: a Slurm job for one of the commands that train."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt.cli import printable
from parallel_layers.device import GPU
from rl_train.cli.mistakes import mistakes_as_messages
from rl_train.cli.recipes import RECIPES, examples, functions_of, told
from rl_train.cluster.slurm import SlurmJob, seconds_of
from rl_train.options.resolve import resolve
from rl_train.options.run_options import RunOptions

_EXAMPLE = (
    "rl-train launch slurm --nodes 2 --gpus-per-node 8 --time 04:00:00 --submit train --config run.yaml --dims dp=16"
)


def add_launch(app: typer.Typer) -> None:
    """Add `launch`."""
    launch = typer.Typer(no_args_is_help=True, help="Start a run on a cluster.", epilog=examples(_EXAMPLE))
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": False}

    @launch.command("slurm", context_settings=settings, epilog=examples(_EXAMPLE))
    def slurm(
        context: typer.Context,
        command: Annotated[list[str], typer.Argument(help="A command that trains, with its options.", metavar="TRAIN")],
        nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
        gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each node; 0: ranks on CPUs.")] = 8,
        time: Annotated[str, typer.Option(help="Time limit, such as 04:00:00; the job queues itself again.")] = (
            "24:00:00"
        ),
        save_seconds: Annotated[
            int, typer.Option(help="Seconds before the time limit at which the run saves; more than a step takes.")
        ] = 300,
        cpus_per_node: Annotated[
            int | None, typer.Option(min=1, help="CPU cores of each node (default: the job has whole nodes).")
        ] = None,
        partition: Annotated[str | None, typer.Option(help="Partition (default: the cluster's).")] = None,
        sbatch: Annotated[
            list[str] | None, typer.Option(help="Further option of sbatch, such as --sbatch=--account=me; repeats.")
        ] = None,
        script: Annotated[Path | None, typer.Option(help="File of the script (default: OUT.slurm.sh).")] = None,
        submit: Annotated[bool, typer.Option("--submit", help="Submit the script by sbatch.")] = False,
    ) -> None:
        """Check a run, and write the Slurm job that runs it on all nodes and resumes by itself."""
        arguments = _parsed(context, command)
        with mistakes_as_messages():
            seconds_of(time)  # a wrong one is an error before the run is checked
            options = _checked(command[0], arguments, nodes, gpus_per_node)
            further = [*([f"--partition={partition}"] if partition else []), *(sbatch or [])]
            job = SlurmJob(command, options.out, nodes, gpus_per_node, time, save_seconds, cpus_per_node, further)
            file = script or Path(f"{options.out}.slurm.sh")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(job.script())
            typer.echo(printable(f"wrote {file}"), err=True)
            if submit:
                if shutil.which("sbatch") is None:
                    raise ValueError(f"--submit needs sbatch, which is not on PATH; submit {file} on a login node")
                done = subprocess.run(["sbatch", str(file)], text=True, capture_output=True)
                if done.returncode:
                    raise ValueError(f"sbatch {file} failed: {done.stderr.strip()}")
                typer.echo(printable(done.stdout.strip()))

    app.add_typer(launch, name="launch")


def _parsed(context: typer.Context, command: list[str]) -> dict[str, Any]:
    """Return the arguments of a command that trains, as its own parser reads them."""
    name, *words = command
    if name not in RECIPES:
        raise typer.BadParameter(f"launch slurm starts {', '.join(RECIPES)}; got {name}")
    root: Any = context.find_root().command
    parsed: dict[str, Any] = root.commands[name].make_context(f"rl-train {name}", words).params
    return parsed


def _checked(name: str, arguments: dict[str, Any], nodes: int, gpus_per_node: int) -> RunOptions:
    """Return the options of the run, checked as by `--dry-run`, for the devices of the nodes."""
    config, switches = arguments.pop("config"), [arguments.pop("dry_run"), arguments.pop("as_json")]
    if any(switches):
        raise ValueError("launch slurm checks the run itself, and a job shows no JSON; leave --dry-run and --json out")
    options: Any = resolve(RECIPES[name], config, arguments)
    from rl_train.cluster.launch import Devices  # imports torch, which takes seconds
    from rl_train.cluster.machines import Machines
    from rl_train.loop.folder import check_unlocked

    if getattr(options, "ray", False):
        raise ValueError("launch slurm starts the ranks by torchrun; leave --ray out")
    if not options.save_every:
        raise ValueError("--save-every 0 keeps no training checkpoint, from which the job could resume; leave it out")
    if (options.device == "cpu") != (gpus_per_node == 0):
        raise ValueError(f"--device {options.device} does not go with --gpus-per-node {gpus_per_node}; change one")
    Machines(count=nodes).ranks(options.grid.world_size)
    check, rehearse, _ = functions_of(options)
    check_unlocked(options.out, told)
    kind, backend = (GPU, "nccl") if gpus_per_node else ("cpu", "gloo")
    rehearse(check(options, devices=Devices(kind, backend, nodes * gpus_per_node)))
    return options
