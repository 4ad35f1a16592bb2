"""Check a resumed run: it may change some options, and its inputs only with `--accept-changes`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckpt.files import Store
from rl_train.data.sources import files_of, is_folder, read_json
from rl_train.options.derived import needs
from rl_train.options.fields import as_text, place_of
from rl_train.options.file_options import needs as needs_of_files
from rl_train.options.names import of_earlier_runs
from rl_train.options.options import TrainOptions
from rl_train.options.run_options import RunOptions
from rl_train.rewards.function import folders_of_judges, parse_rewards

# The keys of the command and of `inputs_of` in `options.json`.
COMMAND, INPUTS = "command", "inputs"

# Files of a checkpoint folder that a run reads.
_FILES = (".json", ".jinja", ".model", ".safetensors")
# At most this number of blocks of a file are read, with this number of bytes each.
_BLOCKS, _BLOCK = 16, 65536
# Options with a module of the user, as module:name.
_MODULES = ("reward", "environment", "agent", "objective.advantages", "objective.loss", "rollouts.engine")


class Row(Protocol):
    """A row of a run's data: its tokens, and its columns."""

    @property
    def tokens(self) -> Sequence[Any]: ...  # noqa: D102
    @property
    def row(self) -> Mapping[str, Any]: ...  # noqa: D102


def check_options(options: RunOptions, before: Mapping[str, Any]) -> None:
    """Raise ValueError if a run with the options `before` (of `to_json`) cannot be resumed with these options."""
    if (command := before.get(COMMAND, "train")) != options.command:
        raise ValueError(
            f"{place_of(options.out)} holds a run of rl-train {command}; choose another out for {options.command}"
        )
    earlier, now = of_earlier_runs(before, options.names()), options.to_json()
    for option in options.leaves():
        name = option.name
        if option.may_change or name not in earlier:
            continue
        value = _text(now[name])
        if value != _text(earlier[name]) and value != _text(_in_effect(options, earlier)[name]):
            raise ValueError(
                f"{place_of(options.out)} holds a run with {name}={earlier[name]!r}, this one has {now[name]!r}; "
                f"choose another out, or give the same {name} to resume it"
            )


def _in_effect(options: RunOptions, earlier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of an earlier run, without those that had no effect and are refused by now."""
    values = {name: value for name, value in earlier.items() if name in options.names()}
    try:
        run: Any = type(options)(**values)
    except ValueError:
        return earlier
    needed = needs(run) if isinstance(run, TrainOptions) else needs_of_files(run)
    without_effect = dict(run.without_effect(needed))
    return type(options)(**{name: values[name] for name in values.keys() - without_effect.keys()}).to_json()


def _text(value: Any) -> Any:
    """Return the text of an option, to compare; earlier runs have written URLs with one slash."""
    text = as_text(value) or None
    return re.sub(":/+", ":/", text) if isinstance(text, str) else text


def inputs_of(options: RunOptions, rows: Mapping[str, Sequence[Row | Path]]) -> dict[str, dict[str, Any]]:
    """Return a count and a digest of each option's input, by the name of the option.

    The digest of prompts covers their tokens and rows. The digest of a checkpoint covers its files, large files by
    evenly spaced blocks. The digest of a module covers its file, without the modules that it imports.

    `rows` are those of the run, or the files of rows that are not read yet, by the option that names them.
    """
    digests = dict[str, dict[str, Any]]()
    for name, entries in rows.items():
        files = [file for source in entries if isinstance(source, Path) for file in _files_of(source)]
        if entries:
            rows_of_name = [entry for entry in entries if not isinstance(entry, Path)]
            digests[name] = _counted("files", map(_file, files)) if files else _counted("rows", map(_row, rows_of_name))
    for name in ("model", "critic.model", "reference", "teacher"):
        if name in options.names() and (folder := options.value(name)) is not None:
            digests[name] = _counted("files", _checkpoint(folder))
    for name in _MODULES:
        if name in options.names() and (files := list(_modules(options, name))):
            contents = [file.read_bytes() for file in files]
            folders = folders_of_judges(options.value(name)) if name == "reward" else ()
            digests[name] = _counted("files", [*contents, *(block for x in folders for block in _checkpoint(x))])
    return digests


def _checkpoint(folder: Path) -> Iterator[bytes]:
    """Yield the files of a checkpoint folder, large files by evenly spaced blocks."""
    yield from map(_file, sorted(file for file in folder.iterdir() if file.suffix in _FILES and file.is_file()))


def changed_inputs(options: RunOptions, inputs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the inputs that have changed since the run in `options.out` began, if it goes on from a checkpoint.

    Raises:
        ValueError: Something has changed, and `options.accept_changes` is not given.
    """
    file = options.out / "options.json"
    if not file.is_file() or not (options.out / "training" / options.trained[0] / "latest").is_file():
        return []
    before, now = of_earlier_runs(read_json(file), options.names()), options.to_json()
    earlier = of_earlier_runs(before.get(INPUTS, {}), options.names())
    changed = [
        f"{name}={now[name]} had {_entry_text(earlier[name])}, and now has {_entry_text(inputs[name])}"
        for name in inputs
        if name in earlier and _text(before.get(name)) == _text(now[name]) and earlier[name] != inputs[name]
    ]
    if changed and not options.accept_changes:
        raise ValueError(
            f"{place_of(options.out)} holds a run with other inputs: {'; '.join(changed)}; give the same again, choose "
            "another out, or go on with --accept-changes"
        )
    return changed


def _entry_text(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{value} {name}" if name != "digest" else f"digest {value[:8]}" for name, value in entry.items())


def _counted(noun: str, contents: Iterable[bytes]) -> dict[str, Any]:
    digest, count = hashlib.sha256(), 0
    for count, content in enumerate(contents, start=1):  # noqa: B007
        digest.update(len(content).to_bytes(8) + content)
    return {noun: count, "digest": digest.hexdigest()}


def _row(row: Row) -> bytes:
    return json.dumps([row.tokens, row.row], skipkeys=True, default=_plain).encode()


def _plain(value: Any) -> str:
    """Return a text for a value that JSON cannot hold, such as an image."""
    if isinstance(value, set | frozenset):
        value = sorted(map(str, value))
    if not isinstance(value, bytes) and not hasattr(value, "tobytes"):
        return re.sub(" at 0x[0-9a-f]+", "", str(value))
    return hashlib.sha256(value if isinstance(value, bytes) else value.tobytes()).hexdigest()


def _files_of(source: Path) -> list[Path]:
    """Return the files of a source of rows."""
    if source.is_dir():
        return sorted(file for file in source.rglob("*") if file.is_file())
    if (files := files_of(f"{source}/**" if is_folder(source) else str(source))) is None:
        return [source]
    return [file for entry in files for file in ([entry] if Store.of(entry) else _files_of(entry))]


def _file(path: Path) -> bytes:
    """Return the name and the size of a file, and its bytes or evenly spaced blocks of them."""
    if (store := Store.of(path)) is not None:
        return json.dumps([store.url, *store.version]).encode()
    size = path.stat().st_size
    places: Iterable[int] = range(0, size, _BLOCK)
    if size > _BLOCKS * _BLOCK:
        places = [(size - _BLOCK) * number // (_BLOCKS - 1) for number in range(_BLOCKS)]
    blocks = [f"{path.name} {size}".encode()]
    with open(path, "rb") as file:
        for place in places:
            file.seek(place)
            blocks.append(file.read(_BLOCK))
    return b"".join(blocks)


def _modules(options: RunOptions, name: str) -> Iterator[Path]:
    """Yield the files of the user's modules and rubrics that an option names."""
    text = options.value(name) or ""
    if name == "reward":
        rewards = parse_rewards(text)
        modules = [reward.module for reward in rewards if reward.rubric is None]
        yield from (reward.rubric for reward in rewards if reward.rubric is not None)
    else:
        modules = [text.partition(":")[0]] if re.fullmatch(r"[\w.]+:\w+", text) else []
    for module in modules:
        if module.partition(".")[0] == __name__.partition(".")[0]:
            continue  # a module of this package, which may be a newer version
        try:
            spec = importlib.util.find_spec(module)
        except Exception:  # a package around the module fails to import; the run raises its error
            continue
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            yield Path(spec.origin)
