"""The files of lines of a run: metrics and samples, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.files import replacing, room_for
from rl_train.data.sources import parse_json, read_json
from rl_train.report.signs import Signs

# The files of lines in the folder of a run.
LINES = ("metrics.jsonl", "samples.jsonl")
# Metrics in the lines of older runs -> their names now.
_RENAMED = {"seconds_handing_over": "seconds_syncing_weights"}


class Metrics:
    """Write `metrics.jsonl` and `samples.jsonl`, of lines `{"step": n, name: value, ...}`, into the folder of a run.

    A resumed run drops the lines of the steps that run again.

    Attributes:
        last: The metrics of the last finished step; empty without one.
        signs: The signs of a collapse in the steps so far.
    """

    def __init__(self, folder: Path, *, done: int) -> None:
        self._folder = folder
        self.last: dict[str, float] = {}
        self.signs = Signs()
        for name in reversed(LINES):
            # A run that starts again also evaluates before step 1 again.
            records = [record for record in read_lines(folder / name) if done and record["step"] <= done]
            replace_text(folder / name, "".join(json.dumps(record) + "\n" for record in records))
            self.last = {key: value for key, value in records[-1].items() if key != "step"} if records else {}
        for record in records:
            self.signs.add(record)

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append the metrics of a step as one line, and each of its samples as one line."""
        # The metrics come last: a step that has them is complete.
        for name, records in reversed(tuple(zip(LINES, ([values], samples), strict=True))):
            text = "".join(json.dumps({"step": step, **record}) + "\n" for record in records)
            with room_for(len(text), self._folder / name), open(self._folder / name, "a", encoding="utf-8") as file:
                file.write(text)


def read_options(folder: Path, fix: str) -> dict[str, Any]:
    """Return what `options.json` of a run holds; the ValueError for the file of another program ends with `fix`."""
    file = folder / "options.json"
    try:
        options = read_json(file)
        if not (isinstance(options, dict) and options.keys() >= {"model", "steps"}):
            raise ValueError(f"{file} does not come from rl-train")
    except ValueError as error:
        raise ValueError(f"{error}; {fix}") from None
    return options


def _is_record(file: str, record: Any) -> bool:
    """Say whether a JSON value is a line of metrics or of samples."""
    if not (isinstance(record, dict) and type(record.get("step")) is int):
        return False
    if file == LINES[1]:
        return isinstance(record.get("reward"), int | float) and record.keys() >= {"prompt", "response"}
    return all(isinstance(value, int | float) for value in record.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of `LINES`, or an empty list without the file; ValueError for a wrong line."""
    if not path.is_file():
        return []
    # A kill may cut the last line short; its step comes after the last checkpoint and runs again.
    *complete_lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(complete_lines, start=1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not _is_record(path.name, record):
            raise ValueError(f"{path}, line {number}: not a line of a step; remove it, or choose another out")
        records.append({_RENAMED.get(str(name), str(name)): value for name, value in record.items()})
    return records


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically (`ckpt.files.disk.replacing`)."""
    content = text.encode()
    with room_for(len(content), path), replacing(path) as file:
        file.write(content)
