"""The command line.

Its files import what needs torch inside the commands: `--help` and a wrong option wait for nothing.

Exit codes: 0 all is well, 1 differences were found, 2 a mistake, which one line on standard error names; 130 after
Ctrl-C, 143 after SIGTERM, once unfinished output is removed.
"""

import typer

from ckpt.cli.compare import diff, verify
from ckpt.cli.convert import merge, shard
from ckpt.cli.inspect import inspect
from ckpt.cli.plan import plan

app = typer.Typer(
    help="Hugging Face checkpoints to and from any parallel grid.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (inspect, plan, shard, merge, verify, diff):
    app.command()(command)
# One conversion serves both: what the source is, is found out.
app.command(
    "reshard",
    help="Write one file for each rank of a grid, from another grid's files, or from a "
    "Hugging Face checkpoint. The same command as shard: choose by what the source is.",
)(shard)
