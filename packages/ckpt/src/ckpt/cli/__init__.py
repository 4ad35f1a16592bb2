"""The command line. Commands import torch when they run, so `--help` and a wrong option answer at once."""

import typer

from ckpt.cli.compare import verify
from ckpt.cli.convert import merge, shard
from ckpt.cli.inspect import inspect
from ckpt.cli.plan import plan

app = typer.Typer(
    help="Hugging Face checkpoints to and from any parallel grid.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (inspect, plan, shard, merge, verify):
    app.command()(command)
# Second names of three commands.
app.command("reshard")(shard)
app.command("convert")(merge)
app.command("diff")(verify)
