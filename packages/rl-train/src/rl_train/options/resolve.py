"""The options of a run from a YAML or TOML file and the command line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_train.options.options import TrainOptions, declared


def resolve_options(file: Path | None, given: Mapping[str, Any]) -> TrainOptions:
    """The options of a YAML or TOML file and of the command line, which wins; both by the names of `TrainOptions`.

    Raises:
        ValueError: a name is unknown (the nearest known one is named), a value has the wrong type or does not fit, or
            something required is missing.
    """
    known = declared()
    values: dict[str, Any] = {}
    sources = [] if file is None else [(str(file), _read(file))]
    for source, entries in (*sources, ("the command line", given)):
        keys: dict[str, Any] = {}
        for key, value in entries.items():
            name = str(key).replace("-", "_")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"{source}: unknown option {key!r}; did you mean {near!r}?")
            if (other := keys.setdefault(name, key)) != key:
                raise ValueError(f"{source}: {other!r} and {key!r} are the same option; leave one of them out")
            if value is not None:
                values[name] = _convert(value, known[name][0], f"{source}: {key}")
    required = [e.name for e in dataclasses.fields(TrainOptions) if e.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"missing: {', '.join('--' + name for name in missing)} (or in the file of --config)")
    return TrainOptions(**values)


def _read(path: Path) -> Mapping[str, Any]:
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
    import yaml  # only a YAML file needs it

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-13-45 looks like a date
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options by name, got {type(values).__name__}")
    return values


def _convert(value: Any, kind: Any, what: str) -> Any:
    accepted = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    of = next(option for option in accepted if option is not type(None))
    try:
        if of is bool and isinstance(value, bool):
            return value
        if of is int and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
        if of is float and not isinstance(value, bool):
            return float(value)  # YAML takes 1e-5 for a text
        if of is Path and isinstance(value, str | Path):
            return Path(value)
        if of is str and isinstance(value, dict):
            return ",".join(f"{name}={size}" for name, size in value.items())
        if of is str and isinstance(value, list):
            return ",".join(map(str, value))
        if of is str and isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{what} must be {of.__name__}, got {json.dumps(value, default=str, skipkeys=True)}")
