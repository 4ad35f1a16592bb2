"""The console command `rl-train`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ckpt.cli import printable
from ckpt.files import Store
from rl_train.cli.draw import add_draws
from rl_train.cli.launch import add_launch
from rl_train.cli.mistakes import mistakes_as_messages
from rl_train.cli.recipes import RECIPES, add_recipes, examples
from rl_train.cluster.fork_server import prepare
from rl_train.options.command import OptionsCommand, takes_options
from rl_train.options.fields import as_path, parse_dtype
from rl_train.options.memory_plan import PlanOptions
from rl_train.options.resolve import resolve
from rl_train.options.run_options import DEVICE

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str | None, typer.Option(help=DEVICE)]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the weights: float32 or bfloat16 (default: as for train).")]


def _print_version(chosen: bool) -> None:
    if chosen:
        typer.echo(f"rl-train {version('rl-train')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning of language models on sharded actors and critics."""
    command, count = context.invoked_subcommand, int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" in os.environ and count > 1 and command not in RECIPES:
        why = f"{command} is one process, and torchrun has started {count}"
        typer.secho(f"error: {why}; start it without torchrun", fg="red", err=True)
        raise typer.Exit(2)


@app.command("quickstart", epilog=examples("rl-train quickstart --out quickstart"))
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints and the reward curve.")] = Path("quickstart"),
    steps: Annotated[int, typer.Option(min=10, help="Number of training steps.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights, the prompts and the sampling.")] = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Make a small model, teach it a small task by PPO, save it, and check it against transformers.

    Two ranks run it; with one CUDA device, one rank.
    """
    with mistakes_as_messages(lambda: "the same command starts again from the beginning"):
        # Imported here: the models take seconds to import, and `--help` needs none of them.
        from rl_train.quickstart.run import quickstart as run
        from rl_train.report.terminal import Display, two_columns

        with Display(steps) as display:
            result = run(out, steps, seed, device, display)
        if as_json:
            typer.echo(json.dumps(result))
        else:
            Console().print(two_columns(result, "rl-train quickstart"))


@app.command("score", epilog=examples("rl-train score --model MODEL --data texts.jsonl --out scores.jsonl"))
def score(
    model: Annotated[Path, typer.Option(help="Checkpoint folder, or name on a hub, of a causal language model.")],
    data: Annotated[Path, typer.Option(help='Rows with "tokens", "text" or "messages", as --prompts of train.')],
    dims: Annotated[
        str, typer.Option(help="Grid of ranks: dp, tp, pp, cp, ep, replicate, such as tp=2,pp=2 (default: one rank).")
    ] = "",
    tp: Annotated[int | None, typer.Option(min=1, help="Short for --dims tp=N.")] = None,
    critic: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of a value model: write its values, too (default: none).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the result (default: standard output).")] = None,
    temperature: Annotated[float, typer.Option(min=1e-6, help="Temperature; the logits are divided by it.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in one forward pass.")] = 16384,
    tp_invariant: Annotated[
        bool, typer.Option("--tp-invariant", help="Compute the same bits at every tp and in every batch.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Compute the same bits in every run on the same grid.")
    ] = False,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Write log-prob, entropy and (with a critic) value of every token, as JSON lines in the order of the data."""
    with mistakes_as_messages(lambda: f"{out or 'the output'} is incomplete; the same command starts again"):
        prepare("rl_train.loop.score")
        from parallel_layers import ParallelDims
        from parallel_models.engine import checkpoint_folder
        from rl_models.backends import BackendOptions
        from rl_train.data.prompts import read_prompts
        from rl_train.loop.score import ScoreOptions, open_result, score as run

        if tp is not None and dims:
            raise ValueError(f"--tp {tp} and --dims {dims} both state the grid; write all of it in --dims")
        grid = ParallelDims.parse(dims) if tp is None else ParallelDims(tp=tp)
        model, critic = Path(checkpoint_folder(model)), critic and Path(checkpoint_folder(critic))
        engine = BackendOptions(dtype=parse_dtype(dtype), tp_invariant=tp_invariant, deterministic=deterministic)
        options = ScoreOptions(model, critic, grid, temperature, max_tokens, device, engine)
        console = Console(stderr=True)
        inputs = [path for path in (data, model, critic) if path is not None]
        result = nullcontext(sys.stdout) if out is None else open_result(as_path(out), *inputs)
        with result as file, Progress(console=console, disable=not console.is_terminal) as progress:
            lines = read_prompts(as_path(data), model, max_tokens)
            if lines_with_images := [line.line for line in lines if line.chat is not None]:
                raise ValueError(
                    f"{data}: lines {lines_with_images[:8]} have images, which score does not take; leave them out"
                )
            sequences = [line.tokens for line in lines]
            task = progress.add_task("scoring", total=len(sequences))

            def write(record: dict[str, Any]) -> None:
                file.write(json.dumps(record) + "\n")
                progress.advance(task)

            run(options, sequences, write)


def plan(**arguments: Any) -> None:
    """Plan the memory that training needs on every rank of a grid, from the config alone."""
    as_json = arguments.pop("as_json")
    with mistakes_as_messages():
        from ckpt import Checkpoint
        from parallel_layers import ParallelDims
        from parallel_models import CacheOptions
        from parallel_models.engine import checkpoint_folder
        from rl_train.planner.limits import fitting
        from rl_train.planner.memory import GIB, MemoryOptions
        from rl_train.planner.models import plan_models
        from rl_train.planner.tables import memory_tables

        asked = resolve(PlanOptions, None, arguments)
        ranks = asked.ranks
        grid = ParallelDims.parse(asked.dims) if asked.dims or ranks is None else ParallelDims(dp=ranks)
        if asked.rollouts.cache_gib is not None and asked.longest is None:
            raise ValueError(f"--rollouts.cache-gib {asked.rollouts.cache_gib} needs --longest")
        if ranks is not None and grid.world_size != ranks:
            raise ValueError(
                f"--ranks {ranks} and --dims {asked.dims}, of {grid.world_size} ranks, differ; leave one out"
            )
        cache, limits = None, asked.rollouts
        if asked.longest is not None:
            cache = CacheOptions(
                *(limits.max_sequences, asked.longest, limits.cache_gib),
                float8_cache=limits.float8_cache,
                drafts=limits.drafts,
                experts=limits.experts,
            )
        options = MemoryOptions(
            **vars(asked.engine),
            dims=grid,
            tokens=asked.tokens,
            optimizer=asked.optimizer,
            repeated=asked.repeated,
            micro_batches=asked.micro_batches,
            cache=cache,
            mask_width=asked.mask_width,
        )
        model = Checkpoint(checkpoint_folder(asked.model, weights=False))
        models = {name: asked.value(name) for name in ("critic", "share_backbone", "reference", "offload")}
        for name, folder in {"teacher": asked.teacher, "judge": asked.judge}.items():
            models[name] = None if folder is None else Checkpoint(checkpoint_folder(folder, weights=False))
        planned = plan_models(model, options, **models)
        limit = None if asked.gpu_gib is None else int(asked.gpu_gib * GIB)
        fits = [] if limit is None else fitting(model, options, limit, ranks=ranks, **models)
        if fits and not asked.dims:
            planned = fits[0]
        if as_json:
            fitting_plans = [entry.to_json() for entry in fits]
            typer.echo(
                json.dumps(planned.to_json() | ({} if limit is None else {"limit": limit, "fitting": fitting_plans}))
            )
        else:
            for table in memory_tables(planned, limit, fits):
                Console().print(table)


takes_options(plan, PlanOptions, as_json=(bool, False, typer.Option("--json", help="Print one JSON object.")))
_PLAN = ("rl-train plan --model MODEL --ranks 8 --gpu-gib 80", "rl-train plan --model MODEL --dims tp=2,pp=2 --json")
app.command("plan", cls=OptionsCommand, epilog=examples(*_PLAN))(plan)


add_draws(app)


_EXPORT = ("rl-train export RUN OUT", "rl-train export RUN/training/actor/step-00000020 OUT")


@app.command("export", epilog=examples(*_EXPORT))
def export(
    step: Annotated[
        Path,
        typer.Argument(
            help="Run, its training/MODEL, or a step in it, or its URL (default: the newest step of the policy)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the Hugging Face checkpoint.")],
) -> None:
    """Write a training checkpoint as a Hugging Face checkpoint, with adapters merged."""
    with mistakes_as_messages():
        from rl_train.loop.export import export as run

        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("writing", total=None)
            saved = run(as_path(step), out, lambda done, total: progress.update(task, completed=done, total=total))
        typer.echo(printable(f"wrote step {saved.step} of {saved.folder} to {out}"))


@app.command("report", epilog=examples("rl-train report RUN"))
def report(out: Annotated[Path, typer.Argument(help="Folder or URL of a run, the --out of train.")]) -> None:
    """Write report.html of a run, also while it runs: curves, samples, options and versions.

    Where matplotlib is installed, the curves are written as curves/*.png, too; not at a URL.
    """
    with mistakes_as_messages():
        from rl_train.report.html_report import missing_plots, write_curves, write_page

        typer.echo(printable(write_page(as_path(out))))
        if Store.of(out) is not None:
            return
        advice = missing_plots()
        if advice is None:
            write_curves(out)
        else:
            typer.echo(advice, err=True)


@app.command("compare", epilog=examples("rl-train compare RUN RUN2", "rl-train compare runs/* --out runs.html"))
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders or URLs of runs, the --out of train; two or more.")],
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("compare.html"),
) -> None:
    """Compare runs, also while they run: curves, options that differ, samples of the same prompts, seconds by phase.

    The page is one file that needs no network. A short table goes to the terminal.
    """
    with mistakes_as_messages():
        from rl_train.report.comparison import Comparison
        from rl_train.report.terminal import columns_of_runs

        comparison, out = Comparison([*map(as_path, runs)]), as_path(out)
        comparison.write(out)
        for title, rows in (("rl-train compare", comparison.table()), ("Options that differ", comparison.differing)):
            if rows:
                Console().print(columns_of_runs(title, comparison.names, rows))
        typer.echo(printable(out))


add_recipes(app)
add_launch(app)
