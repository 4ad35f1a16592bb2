"""Each source file has a test at the mirrored path, a test that imports it, or a line in `tested_by.toml`."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if (path / "src").is_dir())
TESTED_BY = tomllib.loads((ROOT / "tests" / "tested_by.toml").read_text())


def imported_by_tests(package: str) -> set[str]:
    """Return the modules that the tests of a package import, also by a name in them."""
    modules = set()
    for test in (ROOT / "packages" / package / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(test.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
            elif isinstance(node, ast.Import):
                modules |= {name.name for name in node.names}
    return modules


def without_test(package: str) -> Iterator[str]:
    """Yield the source files that a reader finds no test of by their path or by an import."""
    (source,) = (ROOT / "packages" / package / "src").iterdir()
    imported = imported_by_tests(package)
    for file in sorted(source.rglob("*.py")):
        name = file.relative_to(source)
        mirrored = ROOT / "packages" / package / "tests" / name.parent / f"test_{name.name}"
        module = ".".join((source.name, *name.with_suffix("").parts))
        if not file.stem.startswith("__") and not mirrored.exists() and module not in imported:
            yield name.as_posix()


@pytest.mark.slow  # `.ci/run` has it
@pytest.mark.parametrize("package", PACKAGES)
def test_a_reader_finds_the_tests_of_each_source_file(package: str) -> None:
    listed = TESTED_BY.get(package, {})
    assert sorted(listed) == list(without_test(package)), "tests/tested_by.toml names other files"
    for test in listed.values():
        assert any((folder / test).is_file() for folder in (ROOT / "packages" / package / "tests", ROOT)), test
