"""The console command `rl-train`."""

from __future__ import annotations

import inspect
import json
import math
import sys
import typing
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ckpt.cli import printable
from rl_train.cli.mistakes import mistakes_as_messages
from rl_train.options.command import TrainCommand
from rl_train.options.options import (
    DEVICE,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_OPTIMIZER,
    PANELS,
    RECOMPUTE,
    TILED_MLP,
    Repeats,
    TrainOptions,
)
from rl_train.options.parsing import parse_dtype, parse_float8, parse_recompute
from rl_train.options.resolve import resolve_options

if typing.TYPE_CHECKING:
    from rl_train.loop.checked_run import CheckedRun  # takes seconds to import

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str | None, typer.Option(help=DEVICE)]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the weights: float32 or bfloat16 (default: as stored).")]


# Examples below the help of each command.
_EXAMPLES = {
    "quickstart": ("rl-train quickstart --out quickstart",),
    "score": ("rl-train score --model MODEL --data texts.jsonl --out scores.jsonl",),
    "plan": (
        "rl-train plan --model MODEL --ranks 8 --gpu-gib 80",
        "rl-train plan --model MODEL --dims tp=2,pp=2 --json",
    ),
    "report": ("rl-train report RUN",),
    "train": (
        "rl-train train --model MODEL --prompts prompts.jsonl --reward rewards:exact --out RUN --dry-run",
        "rl-train train --config run.yaml --steps 200",
    ),
}


def _command(name: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds a command with its examples."""
    return app.command(name, epilog="\n\n".join(("Examples:", *_EXAMPLES[name])), **options)


def _print_version(chosen: bool) -> None:
    if chosen:
        typer.echo(f"rl-train {version('rl-train')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning of language models on sharded actors and critics."""


@_command("quickstart")
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


@_command("score")
def score(
    model: Annotated[Path, typer.Option(help="Checkpoint folder, or name on a hub, of a causal language model.")],
    data: Annotated[Path, typer.Option(help=escape('File of JSON lines: {"tokens": [ids]} or {"text": "..."}.'))],
    dims: Annotated[
        str, typer.Option(help="Grid of ranks: sizes of dp, tp, pp, cp and ep, such as tp=2,pp=2 (default: one rank).")
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
        from parallel_layers import ParallelDims
        from parallel_models.engine import located
        from rl_models.backends import BackendOptions
        from rl_train.data.prompts import read_prompts
        from rl_train.loop.score import ScoreOptions, open_result, score as run

        if tp is not None and dims:
            raise ValueError(f"--tp {tp} and --dims {dims} both state the grid; write all of it in --dims")
        grid = ParallelDims.parse(dims) if tp is None else ParallelDims(tp=tp)
        model, critic = Path(located(model)), critic and Path(located(critic))
        engine = BackendOptions(dtype=parse_dtype(dtype), tp_invariant=tp_invariant, deterministic=deterministic)
        options = ScoreOptions(model, critic, grid, temperature, max_tokens, device, engine)
        console = Console(stderr=True)
        inputs = [path for path in (data, model, critic) if path is not None]
        result = nullcontext(sys.stdout) if out is None else open_result(out, *inputs)
        with result as file, Progress(console=console, disable=not console.is_terminal) as progress:
            lines = read_prompts(data, model, max_tokens)
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


@_command("plan")
def plan(
    model: Annotated[Path, typer.Option(help="Checkpoint folder, of which config.json is enough, or name on a hub.")],
    tokens: Annotated[int, typer.Option(help="Number of tokens in a micro-batch (one forward pass).")] = 16384,
    dims: Annotated[
        str,
        typer.Option(
            help="Grid of ranks: sizes of dp, tp, pp, cp and ep, such as tp=2 (default: the fastest that fits "
            "--gpu-gib, else dp=N with --ranks N, else one rank)."
        ),
    ] = "",
    critic: Annotated[bool, typer.Option("--critic", help="Add a critic of the same size.")] = False,
    share_backbone: Annotated[
        bool, typer.Option("--share-backbone", help="Add a critic that is a head on the actor's layers.")
    ] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Add a reference of the same size.")] = False,
    recompute: Annotated[str | None, typer.Option(help=RECOMPUTE)] = None,
    tiled_mlp: Annotated[int | None, typer.Option(min=1, help=TILED_MLP)] = None,
    offload_activations: Annotated[bool, typer.Option("--offload-activations", help=OFFLOAD_ACTIVATIONS)] = False,
    keep_probabilities: Annotated[
        bool, typer.Option("--keep-probabilities", help="Count the probabilities that train keeps in free memory.")
    ] = False,
    float8: Annotated[str | None, typer.Option(help="FP8 recipe: current, block or mxfp8 (default: none).")] = None,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train adapters (LoRA) of this rank alone (0: all weights).")
    ] = 0,
    lora_targets: Annotated[str, typer.Option(help="Adapted layers, as for train.")] = "all-linear",
    lora_shared_experts: Annotated[
        bool, typer.Option("--lora-shared-experts", help="Let experts share gate_up's A and down's B.")
    ] = False,
    base_format: Annotated[
        str | None, typer.Option(help="Form of the frozen projections under adapters: fp8 (default: that of --dtype).")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer: adamw or muon.")] = "adamw",
    moments: Annotated[
        str, typer.Option(help="Storage of the optimizer's moments: float32, bfloat16 or int8.")
    ] = "float32",
    offload_optimizer: Annotated[bool, typer.Option("--offload-optimizer", help=OFFLOAD_OPTIMIZER)] = False,
    repeated: Annotated[
        float, typer.Option(help="Share of the tokens that repeat a prompt, which --share-prefixes leaves out.")
    ] = 0.0,
    virtual_stages: Annotated[int, typer.Option(help="Number of model chunks on each rank of a pipeline.")] = 1,
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Number of micro-batches in an update (default: two for each stage)."),
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep one model on the devices and offload the others to host memory.")
    ] = False,
    longest: Annotated[
        int | None,
        typer.Option(min=1, help="Plan the KV cache for prompts with responses of at most N tokens (default: none)."),
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Number of responses that a rank draws at a time.")] = 512,
    cache_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory of the KV cache on a rank, in GiB (default: as needed).")
    ] = None,
    mask_width: Annotated[
        int,
        typer.Option(min=0, help="Plan sampling masks of at most N tokens, the --top-k of a run (default: none)."),
    ] = 0,
    dtype: Dtype = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="List the grids that fit a device with this memory, in GiB, each with the recomputation, tiles and "
            "offload that it needs, unless you give them; the fastest first (default: no list).",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks (default: the fewest that fit --gpu-gib, else the ranks of --dims)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan the memory that training needs on every rank of a grid, from the config alone."""
    with mistakes_as_messages():
        from parallel_layers import ParallelDims
        from parallel_models import CacheOptions
        from parallel_models.engine import located
        from rl_models import OptimizerOptions, PipelineOptions
        from rl_train.options.derived import planned_adapters
        from rl_train.planner.limits import fitting
        from rl_train.planner.memory import GIB, MemoryOptions
        from rl_train.planner.models import plan_models
        from rl_train.planner.tables import memory_tables

        grid = ParallelDims.parse(dims) if dims or ranks is None else ParallelDims(dp=ranks)
        options = MemoryOptions(
            grid,
            tokens,
            parse_dtype(dtype),
            recompute=parse_recompute(recompute),
            tiled_mlp=tiled_mlp,
            offload_activations=offload_activations,
            keep_probabilities=keep_probabilities,
            float8=parse_float8(float8),  # type: ignore[arg-type]
            lora=planned_adapters(lora_rank, lora_targets, lora_shared_experts),
            base_format=base_format,  # type: ignore[arg-type]
            optimizer=OptimizerOptions(algorithm=optimizer, moments=moments, offload=offload_optimizer),  # type: ignore[arg-type]
            repeated=repeated,
            pipeline=PipelineOptions(virtual_stages=virtual_stages),
            micro_batches=micro_batches,
            cache=None if longest is None else CacheOptions(max_sequences, longest, cache_gib),
            mask_width=mask_width,
        )
        if cache_gib is not None and (longest is None or not math.isfinite(cache_gib * GIB)):
            raise ValueError(f"--cache-gib {cache_gib} must be a number of GiB, and needs --longest")
        model = Path(located(model, weights=False))
        models = {"critic": critic, "share_backbone": share_backbone, "reference": reference, "offload": offload}
        if gpu_gib is not None and not math.isfinite(gpu_gib * GIB):
            raise ValueError(f"--gpu-gib {gpu_gib} must be a number of GiB, such as 80")
        if ranks is not None and grid.world_size != ranks:
            raise ValueError(f"--ranks {ranks} and --dims {dims}, of {grid.world_size} ranks, differ; leave one out")
        planned = plan_models(model, options, **models)
        limit = None if gpu_gib is None else int(gpu_gib * GIB)
        fits = [] if limit is None else fitting(model, options, limit, ranks=ranks, **models)
        if fits and not dims:
            planned = fits[0]
        if as_json:
            fitting_plans = [entry.to_json() for entry in fits]
            typer.echo(
                json.dumps(planned.to_json() | ({} if limit is None else {"limit": limit, "fitting": fitting_plans}))
            )
        else:
            for table in memory_tables(planned, limit, fits):
                Console().print(table)


@_command("report")
def report(out: Annotated[Path, typer.Argument(help="Folder of a run, the --out of train.")]) -> None:
    """Write report.html of a run, also while it runs: curves, samples, options and versions.

    Where matplotlib is installed, the curves are written as curves/*.png, too.
    """
    with mistakes_as_messages():
        from rl_train.report.html_report import missing_plots, write_curves, write_page

        typer.echo(printable(write_page(out)))
        advice = missing_plots()
        if advice is None:
            write_curves(out)
        else:
            typer.echo(advice, err=True)


def train(**arguments: Any) -> None:
    """Train a policy on prompts from a file with a reward in Python; the same command resumes a run that was stopped.

    Every switch has a --no- form, such as --no-ray.
    """
    config, dry_run, as_json = (arguments.pop(name) for name in ("config", "dry_run", "as_json"))
    checked_run: CheckedRun | None = None

    def after() -> str:
        from rl_train.loop.folder import how_to_go_on

        return "no step was done" if checked_run is None or dry_run else how_to_go_on(checked_run.options)

    with mistakes_as_messages(after):
        if sys.stderr.isatty():
            typer.echo("checking the options, the model and the prompts", err=True)
        from rl_train.loop.checked_run import check_run
        from rl_train.loop.folder import check_unlocked
        from rl_train.loop.run import train as run
        from rl_train.report.terminal import Display, counted, two_columns
        from rl_train.rewards.function import Rewards

        options = resolve_options(config, arguments)
        checked_run = check_run(options)
        if dry_run:
            check_unlocked(options.out)
            Rewards(checked_run.options).close()
            if as_json:
                typer.echo(json.dumps(checked_run.describe()))
            else:
                Console().print(two_columns(checked_run.summary(), "This run can start; --json prints every option."))
            return
        grid = options.dims or "one rank"
        title = f"rl-train: {options.algorithm} of {options.model.name} ({grid}), to {options.out}"
        with Display(options.steps, title=title) as display:
            result = run(checked_run, display)
            model, page = options.out / "actor", options.out / "report.html"
            steps = counted(options.steps, "step")
            display({"message": f"done: after {steps} the model is in {model}, the curves in {page}"})
        if as_json:
            typer.echo(json.dumps(result))


def _train_parameters() -> list[inspect.Parameter]:
    """Return an option for every field of `TrainOptions`; its default is None, so that --config decides."""
    kinds, panel = typing.get_type_hints(TrainOptions), ""
    parameters: dict[str, tuple[Any, Any, typer.models.OptionInfo]] = {}
    for name, entry in TrainOptions.model_fields.items():
        panel = PANELS.get(name, panel)
        plain = entry.is_required() or entry.default in (None, "")
        text = f"{entry.description}" if plain else f"{entry.description} [default: {entry.default}]"
        option = typer.Option(help=escape(text), show_default=False, rich_help_panel=panel)
        kind = next(kind for kind in (bool, int, float, Path, str) if kind in _members(kinds[name]))
        parameters[name] = ((list[str] if Repeats in entry.metadata else kind) | None, None, option)
    config = "YAML or TOML file of options; the command line overrides it (default: none)."
    dry_run = "Check everything and print the checked run, without training."
    as_json = "Print the last step's metrics, or the checked run of --dry-run, as one JSON object."
    parameters |= {
        "config": (Path | None, None, typer.Option(help=config)),
        "dry_run": (bool, False, typer.Option("--dry-run", help=dry_run)),
        "as_json": (bool, False, typer.Option("--json", help=as_json)),
    }
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
        for name, (kind, default, option) in parameters.items()
    ]


def _members(kind: Any) -> set[Any]:
    """Return the types that an annotation allows: the members of a union, and of a literal the types of its values."""
    if typing.get_origin(kind) is typing.Literal:
        return {type(value) for value in typing.get_args(kind)}
    members = typing.get_args(kind)
    return set().union(*(_members(member) for member in members)) if members else {kind}


# typer reads a command's options from its signature.
_parameters = _train_parameters()
train.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
train.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters}
_command("train", cls=TrainCommand)(train)
