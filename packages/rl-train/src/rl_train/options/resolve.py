"""Read the options of a run from a YAML or TOML file and the command line."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rl_train.options.fields import as_path
from rl_train.options.names import flattened, nearest
from rl_train.options.nested import Options, plain

Kind = TypeVar("Kind", bound=Options)


def resolve(kind: type[Kind], file: Path | None, arguments: Mapping[str, Any]) -> Kind:
    """Return the options of a YAML or TOML file and of the command line, which wins; see `Options` for their names.

    In the names of `arguments`, the parameters of a command, `__` stands for a dot.

    Raises:
        ValueError: A name is unknown (the error names the nearest one), a value has the wrong type or is out of range,
            or something required is missing; names every such option and where it was given.
    """
    known = kind.names()
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    sources = [] if file is None else [(str(file), read_table(file))]
    by_name = {name.replace("__", "."): value for name, value in arguments.items()}
    for source, entries in (*sources, ("the command line", by_name)):
        keys: dict[str, Any] = {}
        for key, name, value in flattened(entries, known, kind.groups()):
            if name not in known:
                raise ValueError(f"{source}: unknown option {key!r}; did you mean {nearest(name, known)!r}?")
            if (earlier_key := keys.setdefault(name, key)) != key:
                raise ValueError(f"{source}: {earlier_key!r} and {key!r} are the same option; leave one of them out")
            if value is not None:
                values[name], where[name] = as_path(value) if isinstance(value, Path) else value, source
    try:
        return kind(**values)
    except ValidationError as error:
        raise ValueError("; ".join(_messages(error, kind.groups(), values, where))) from None


def _messages(
    error: ValidationError, groups: Collection[str], values: Mapping[str, Any], where: Mapping[str, str]
) -> Iterator[str]:
    """Yield a sentence for each option that is wrong, and one for the required options that are missing."""
    missing = []
    reasons: dict[str, list[str]] = {}
    for details in error.errors():
        name = ".".join(map(str, details["loc"]))
        if details["type"] == "missing" and "." not in name:
            missing.append(name)
        elif details["type"] == "missing":
            group = name.rpartition(".")[0]
            members = ", ".join(option for option in values if option.startswith(f"{group}."))
            yield f"{where[members.split(', ')[0]]}: {members} needs {name}; give that, or leave {members} out"
        elif name in groups:  # a dataclass refuses its fields together
            sources = dict.fromkeys(source for option, source in where.items() if option.startswith(f"{name}."))
            yield f"{', '.join(sources)}: {name}: {details['msg'].removeprefix('Value error, ')}"
        else:
            # A value that may have several types has a reason for each.
            option = next(option for option in (name, name.rpartition(".")[0]) if option in values)
            reasons.setdefault(option, []).append(_fix(details["msg"]))
    for option, messages in reasons.items():
        yield f"{where[option]}: {option}={plain(values[option])!r} {', or '.join(messages)}"
    if missing:
        yield f"missing: {', '.join('--' + name for name in missing)} (or in the file of --config)"


def _fix(message: str) -> str:
    """Return pydantic's "Input should be ..." as the end of a sentence about the value."""
    return message.removeprefix("Value error, ").replace("Input should", "must", 1).replace("Input is", "is", 1)


def read_table(path: Path) -> Mapping[str, Any]:
    """Return the values of a TOML or YAML file by name; ValueError for another file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{path} must end with .yaml, .yml or .toml")
    import yaml  # Only a YAML file needs it.

    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-13-45 looks like a date
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options by name, got {type(values).__name__}")
    keys = Counter(key.value for key, _ in document.value)
    if repeated := [key for key, number in keys.items() if number > 1]:
        raise ValueError(f"{path}: {', '.join(map(str, repeated))} is given more than once; keep one of them")
    return values
