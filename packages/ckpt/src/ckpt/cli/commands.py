"""The command line. Commands import torch when they run, so `--help` and a wrong option answer at once."""

from importlib.metadata import version
from typing import Annotated

import typer

from ckpt.cli.compare import verify
from ckpt.cli.convert import merge, shard
from ckpt.cli.inspect import inspect
from ckpt.cli.plan import plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Each command with its names and examples.
_COMMANDS = (
    (inspect, ("inspect",), ("ckpt inspect MODEL", "ckpt inspect RUN --check --json")),
    (plan, ("plan",), ("ckpt plan MODEL --tp 8 --pp 2", "ckpt plan MODEL --tp 4 --ep 8 --target megatron")),
    (
        shard,
        ("shard", "reshard"),
        ("ckpt shard MODEL SHARDS --tp 2 --target megatron", "ckpt reshard SHARDS OTHER --tp 4 --pp 2"),
    ),
    (
        merge,
        ("merge", "convert"),
        (
            "ckpt merge SHARDS MODEL",
            "ckpt merge ADAPTER MODEL --base BASE",
            "ckpt convert MODEL OUT --dtype bfloat16 --max-shard-size 2GB",
            "ckpt convert MODEL RUN --to megatron --dims tp=2,pp=2",
            "ckpt convert RUN MODEL --copy-from ORIGINAL",
        ),
    ),
    (verify, ("verify", "diff"), ("ckpt verify MODEL OTHER", "ckpt diff MODEL OTHER --ignore-dtype --rtol 0.01")),
)
for command, names, examples in _COMMANDS:
    for name in names:
        app.command(name, epilog="\n\n".join(("Examples:", *examples)))(command)


def _print_version(chosen: bool) -> None:
    if chosen:
        typer.echo(f"rl-ckpt {version('rl-ckpt')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Hugging Face checkpoints to and from any parallel grid."""
