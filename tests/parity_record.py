"""The record of the parity cases that have passed, `tests/parity.json`: column -> model -> grids.

A test marked `parity(backend)` compares a model (its parameter `name`) with transformers on a grid (`grid`). With
`--record` its outcome goes into the record: a case that passes is added, and a case that fails is removed.
`tests/test_families.py` makes the table of families from the record. A column is a backend, or for Megatron-Core a
version.
"""

import json
from collections.abc import Collection, Generator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("parity.json")
# The column, the model and the grid.
Case = tuple[str, str, str]
CORES = ("0.16", "0.17", "0.18", "0.19")


def columns(backend: str) -> list[str]:
    """Return the columns of a backend."""
    return [f"megatron {core}" for core in CORES] if backend == "megatron" else [backend]


def installed_column(backend: str) -> str:
    """Return the column of a backend as it is installed."""
    if backend != "megatron":
        return backend
    return f"megatron {'.'.join(version('megatron-core').split('.')[:2])}"


def recorded() -> set[Case]:
    """Return the cases that have passed."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {
        (column, model, grid) for column, models in record.items() for model, grids in models.items() for grid in grids
    }


def record(outcomes: Mapping[Case, bool], existing: Collection[Case]) -> None:
    """Change the record by whether cases passed; cases that do not exist any more go."""
    kept = {case for case in recorded() if case in existing and outcomes.get(case, True)}
    passed = sorted(kept | {case for case, good in outcomes.items() if good})
    lines = []
    for column in sorted({column for column, _, _ in passed}):
        models = sorted({model for c, model, _ in passed if c == column})
        rows = [f"  {json.dumps(m)}: {json.dumps([g for c, n, g in passed if (c, n) == (column, m)])}" for m in models]
        lines.append(f"{json.dumps(column)}: {{\n" + ",\n".join(rows) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


class Recorder:
    """A plugin of pytest that records the outcomes of a run."""

    def __init__(self) -> None:
        self.outcomes: dict[Case, bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep whether a parity case passed, its setup and teardown included."""
        report = yield
        mark = item.get_closest_marker("parity")
        if mark is not None and not report.skipped:
            parameters: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
            case = installed_column(mark.args[0]), parameters["name"], parameters["grid"]
            self.outcomes[case] = self.outcomes.get(case, True) and report.passed
        return report

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        from tests.test_families import PARITY_CASES  # imports every table of models

        record(self.outcomes, PARITY_CASES)
