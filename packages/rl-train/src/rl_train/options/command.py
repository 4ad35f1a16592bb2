"""The command `train`: its help, and the errors about options that it does not have."""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand

from rl_train.options.resolve import THEIRS


class TrainCommand(TyperCommand):
    """Hides the `--no-` forms in `--help`, whose column would cut others off; knows other libraries' option names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        shown = copy.copy(self)
        shown.params = [copy.copy(parameter) for parameter in self.params]
        for parameter in shown.params:
            parameter.secondary_opts = []
        TyperCommand.format_help(shown, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; an unknown option that another library has is answered with the name here."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer's releases have NoSuchOption in different modules
            name = getattr(error, "option_name", None) or ""
            if ours := THEIRS.get(name.lstrip("-").replace("-", "_")):
                error.possibilities = ["--" + ours.replace("_", "-")]  # type: ignore[attr-defined]
            raise
