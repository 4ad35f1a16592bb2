"""The record of the parity cases that have passed, `tests/parity.json`: backend -> model -> grids.

A test marked `parity(backend)` compares a model (its parameter `name`) with transformers on a grid (`grid`). With
`--record` its outcome goes into the record: a case that passes is added, and a case that fails is removed.
`tests/test_families.py` makes the table of families from the record.
"""

import json
from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).with_name("parity.json")
# The backend, the model and the grid.
Case = tuple[str, str, str]


def recorded() -> set[Case]:
    """Return the cases that have passed."""
    backends = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {(b, model, grid) for b, models in backends.items() for model, grids in models.items() for grid in grids}


def record(outcomes: Mapping[Case, bool], existing: Collection[Case]) -> None:
    """Change the record by whether cases passed; cases that do not exist any more go."""
    kept = {case for case in recorded() if case in existing and outcomes.get(case, True)}
    passed = sorted(kept | {case for case, good in outcomes.items() if good})
    lines = []
    for backend in sorted({backend for backend, _, _ in passed}):
        models = sorted({model for b, model, _ in passed if b == backend})
        rows = [f"  {json.dumps(m)}: {json.dumps([g for b, n, g in passed if (b, n) == (backend, m)])}" for m in models]
        lines.append(f"{json.dumps(backend)}: {{\n" + ",\n".join(rows) + "\n}")
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
            case = mark.args[0], parameters["name"], parameters["grid"]
            self.outcomes[case] = self.outcomes.get(case, True) and report.passed
        return report

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        from tests.test_families import PARITY_CASES  # imports every table of models

        record(self.outcomes, PARITY_CASES)
