"""The command `train`: its help, and its errors about unknown options."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand

from rl_train.options.resolve import THEIRS


class TrainCommand(TyperCommand):
    """Hide the `--no-` forms in `--help`, which would truncate other options; translate other libraries' names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        shown = copy.copy(self)
        shown.params = [copy.copy(parameter) for parameter in self.params]
        for parameter in shown.params:
            parameter.secondary_opts = []
        TyperCommand.format_help(shown, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; for an option of another library, the error names the option here."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # releases of typer define NoSuchOption in different modules
            name = getattr(error, "option_name", None) or ""
            if ours := THEIRS.get(name.lstrip("-").replace("-", "_")):
                error.possibilities = ["--" + ours.replace("_", "-")]  # type: ignore[attr-defined]
            raise
