"""Commands whose parameters are options: their help, and their errors about unknown options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from typer.core import TyperCommand

from rl_train.options.fields import Repeats
from rl_train.options.names import SHORT_NAMES, flag, nearest
from rl_train.options.nested import Leaf, Options
from rl_train.options.options import TrainOptions

# The panels of the help of `train`: the title of each group, and the first option of each part without a group.
PANELS = {
    "model": "What to train",
    "prompts": "What to train",
    "steps": "Steps",
    "prompts_per_step": "Steps",
    "dims": "Grid",
    "ray": "Grid",
    "save_every": "Checkpoints and logs",
    "show_every": "Checkpoints and logs",
    "engine": "engine: memory and numerics of the models",
    "optimizer": "optimizer: of the policy; the critic has its own learning rate",
    "data": "data: the form of the prompts",
    "rewards": "rewards: their processes, and the shape of scores",
    "critic": "critic: of ppo",
    "sampling": "sampling: how responses are drawn",
    "rollouts": "rollouts: the engine that draws them",
    "objective": "objective: advantages and losses",
    "evaluation": "evaluation: held-out prompts",
}


class OptionsCommand(TyperCommand):
    """Write a help that truncates no name on 80 columns, and name the option that was meant in place of an unknown one.

    typer's own help divides a line into five columns, too many for names such as `--engine.pipeline.virtual-stages`.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, the text, and a panel of options for each group, without the `--no-` forms."""
        console, panels = Console(), dict[str, list[RenderableType]]()
        parameters = sorted(self.get_params(ctx), key=lambda parameter: parameter.param_type_name != "argument")
        arguments = [shown.name.upper() for shown in parameters if shown.param_type_name == "argument" and shown.name]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *arguments])
        console.print(Text(f"\n{usage}\n\n{inspect.cleandoc(self.help or '')}\n"))
        for parameter in parameters:
            shown: Any = parameter
            known_as = shown.opts[0] if shown.opts[0].startswith("-") else shown.name.upper()
            name = Text(known_as, "bold cyan") + Text(f" {shown.metavar or ''}", "yellow")
            panel = panels.setdefault(shown.rich_help_panel or "Options", [])
            panel += [name, Padding(Text.from_markup(shown.help), (0, 0, 0, 4))]
        for title in sorted(panels, key=lambda title: title != "Options"):
            console.print(Panel(Group(*panels[title]), title=title, title_align="left", border_style="dim"))
        console.print(Text(f"{self.epilog}\n"))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; the error about an unknown option names the nearest one."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # releases of typer define NoSuchOption in different modules
            name = (getattr(error, "option_name", None) or "").lstrip("-").replace("-", "_")
            if name and hasattr(error, "possibilities"):
                known = {parameter.name.replace("__", ".") for parameter in self.params if parameter.name}
                if name in TrainOptions.names() - known:
                    message = f"{flag(name)} is an option of train, not of {self.name}"
                    vars(error).update(message=message, possibilities=[])
                else:
                    error.possibilities = [flag(nearest(name, known))]
            raise


def takes_options(
    command: Callable[..., None],
    kind: type[Options],
    panels: Mapping[str, str] | None = None,
    **further: tuple[Any, Any, Any],
) -> None:
    """Give a command a parameter for every option of a kind; its default is None, so that a file may decide.

    Args:
        command: The function with `**arguments`; typer reads its parameters from the signature that this sets.
        kind: The options.
        panels: The title of a panel of the help, by the option or the group that it begins with.
        **further: The annotation, the default and the `typer.Option` of further parameters.
    """
    made = [parameter for parameter in _parameters(kind, panels or {}) if parameter.name not in further]
    for name, (annotation, default, option) in further.items():
        made.append(_parameter(name, default, Annotated[annotation, option]))
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in made}


def _parameters(kind: type[Options], panels: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    panel: str | None = None
    for option in kind.leaves():
        panel = panels.get(option.name.partition(".")[0], panel)
        annotation: Any = next(each for each in (bool, int, float, Path, str) if each in option.kinds)
        flags = [f"{flag}/{_negated(flag)}" if annotation is bool else flag for flag in option.flags]
        if Repeats in option.field.metadata:
            annotation = list[str]
        metavar = None if annotation is bool else annotation.__name__.upper()
        made = typer.Option(
            *flags, help=escape(_help(option)), show_default=False, rich_help_panel=panel, metavar=metavar
        )
        yield _parameter(option.name.replace(".", "__"), None, Annotated[annotation | None, made])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _negated(flag: str) -> str:
    group, dot, last = flag.removeprefix("--").rpartition(".")
    return f"--{group}{dot}no-{last}"


def _help(option: Leaf) -> str:
    default, notes = option.field.default, ""
    if option.name in SHORT_NAMES.values():
        notes = f" [whole name: {option.name}]"
    if not option.field.is_required() and default not in (None, "", ()):
        notes += f" [default: {','.join(map(str, default)) if isinstance(default, tuple) else default}]"
    return f"{option.field.description}{notes}"
