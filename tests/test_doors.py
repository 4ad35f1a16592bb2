"""Packages and rooms are entered by their doors: narrow, lazy, and recorded beside the changelogs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.distributions import FOLDERS, MODULES, PACKAGES, ROOT, closure, modules_of, project
from tests.doors import changelog, doors_of, imports_of, signatures, uses_of
from tests.pages import DOCS, blocks

SIGNATURES = Path(__file__).parent / "signatures"
DOORS = {door: names for package in MODULES for door, names in doors_of(package).items()}
# The files that set attributes of other packages' files, with the reason: a door's name would not reach the file's own.
PAST_DOORS = {
    # Sweeps the launch parameters of two kernels.
    "benchmarks/elementwise.py": {"parallel_layers.kernels.rotary", "parallel_layers.kernels.swiglu"},
    # Times the step without the GEMMs of quack, which have no switch.
    "benchmarks/step.py": {"parallel_layers.kernels.quack"},
    # Runs the kernels in Triton's interpreter on tensors of the CPU, which the layers give to torch.
    "packages/hf-patches/tests/test_kernels.py": {
        "parallel_layers.kernels.rms_norm",
        "parallel_layers.mlp.layer",
        "parallel_layers.rotary.rotation",
    },
    # Stands in for CUDA's streams, and makes buckets smaller than a parameter.
    "packages/rl-models/tests/backends/parallel/test_optimizer_offload.py": {
        "parallel_layers.memory.streamed",
        "parallel_models.optimizers.rules",
    },
    # Stands in for FP8 GEMMs, and offloads small tensors, too.
    "packages/rl-models/tests/backends/test_memory_options.py": {
        "parallel_layers.linear.float8",
        "parallel_layers.memory.savings",
    },
}
# The pages that show how the packages are used; a changelog names what is gone.
PAGES = [
    os.path.relpath(path, DOCS)
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("packages/*/README.md"))
]


def owner(file: str) -> str | None:
    """The module of the package that a file of the repository belongs to."""
    parts = file.split("/")
    return MODULES[parts[1]] if parts[0] == "packages" else None


def python_files() -> list[str]:
    folders = ("packages", "tests", "examples", "benchmarks", "docs")
    files = chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders)
    return sorted(str(file.relative_to(ROOT)) for file in files)


def programs() -> Iterator[tuple[str, str]]:
    """Yield the name and the code of each Python file, and of each Python block of a page."""
    yield from ((file, (ROOT / file).read_text()) for file in python_files())
    for page in PAGES:
        yield from ((str(block), block.code) for block in blocks(page) if block.language == "python")


def past_doors(code: str, package: str | None) -> list[tuple[int, str]]:
    """Return the lines and dotted names of what a program of a package imports from no door of another package."""
    return [
        (line, f"{module}.{name}".rstrip("."))
        for line, module, name in imports_of(code)
        if module.split(".")[0] != package and name not in DOORS.get(module, ()) and (name or module not in DOORS)
        # `from parallel_layers import invariant`: a door itself.
        if f"{module}.{name}" not in DOORS and not module.endswith(".lazy")
    ]


@pytest.mark.slow  # `.ci/run` has it
def test_other_packages_programs_and_pages_enter_by_doors() -> None:
    wrong = [
        f"{file}:{line}: {name}"
        for file, code in programs()
        for line, name in past_doors(code, owner(file))
        if name not in PAST_DOORS.get(file, ())
    ]
    assert not wrong, "\n".join(wrong)
    assert past_doors("from ckpt.layout.pieces import Piece\nimport ckpt.layout.pieces", "rl_models")


def test_no_exception_is_left_over() -> None:
    for file, names in PAST_DOORS.items():
        assert names == {name for _, name in past_doors((ROOT / file).read_text(), owner(file))}, file


@cache
def used_outside() -> set[str]:
    """Return the dotted names that other packages, tests of compositions, examples, benchmarks and pages use."""
    return {name for file, code in programs() for name in uses_of(code) if name.split(".")[0] != owner(file)}


def codes_of(page: str) -> list[str]:
    """Return the blocks and spans of code of a page."""
    return re.findall(r"```.*?```|`[^`\n]+`", (DOCS / page).read_text(), re.DOTALL)


@cache
def words_of_pages() -> set[str]:
    """Return the words that the pages have in blocks and spans of code."""
    return {word for page in PAGES for code in codes_of(page) for word in re.findall(r"\w+", code)}


def without_user(door: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if f"{door}.{name}" not in used_outside() and name not in words_of_pages()]


@pytest.mark.slow
def test_every_name_of_a_door_has_a_user_outside() -> None:
    """A page uses what it names as code. What the package alone uses stays in its file."""
    unused = {door: names for door in DOORS if (names := without_user(door, DOORS[door]))}
    assert not unused, "take them out of the stubs"
    assert without_user("ckpt.files", ("non_finite", "read_header")) == ["non_finite"]


def behind_doors(code: str) -> list[str]:
    """Return the dotted names in a text that are neither doors nor begin with a name of one."""
    dotted = re.findall(rf"(?<![\w./-])(?:{'|'.join(MODULES.values())})(?:\.\w+)+", code)
    doors = {name: max((door for door in DOORS if f"{name}.".startswith(f"{door}.")), key=len) for name in dotted}
    return [
        name for name, door in doors.items() if name != door and name[len(door) + 1 :].split(".")[0] not in DOORS[door]
    ]


def test_pages_name_what_doors_have() -> None:
    """The page on families is about the tables in files, which its reader changes."""
    wrong = [
        f"{page}: {name}"
        for page in PAGES
        if page != "adding-a-family.md"
        for name in behind_doors("\n".join(codes_of(page)))
    ]
    assert not wrong, "\n".join(wrong)
    assert behind_doors("ckpt.layout.pieces.Piece ckpt.Piece ckpt.layout") == ["ckpt.layout.pieces.Piece"]


@pytest.mark.parametrize("package", MODULES)
def test_files_of_a_package_import_files(package: str) -> None:
    wrong = [
        f"{file.name}:{line}: {name or 'all'} of {module}"
        for file in modules_of(package).values()
        for line, module, name in imports_of(file.read_text())
        if module in doors_of(package) and f"{module}.{name}" not in modules_of(package)
        # A command line enters its own package by the lazy door: its help brings no torch.
        if name or file.parent.name != "cli"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MODULES)
def test_tests_of_a_package_import_what_it_brings(package: str) -> None:
    """Its extras and its dev group included; a test that needs more stands in `tests/`."""
    declared = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())
    needs = [Requirement(line) for line in declared["dependency-groups"]["dev"]]
    folders = closure(package, frozenset(declared["project"].get("optional-dependencies", {})))[0]
    for need in needs:
        if need.name in FOLDERS:
            folders |= closure(FOLDERS[need.name], frozenset(need.extras))[0]
    allowed = {MODULES[folder] for folder in folders}
    wrong = [
        f"{file.name}:{line}: {module}"
        for file in (PACKAGES / package / "tests").rglob("*.py")
        for line, module, _ in imports_of(file.read_text())
        if module.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MODULES)
def test_doors_are_narrow_and_no_name_is_hidden_by_a_file(package: str) -> None:
    """Importing a file sets it as an attribute of its package, which may hide a name of the door."""
    for door, names in doors_of(package).items():
        assert len(names) <= 25, f"{door} has {len(names)} names"
        hidden = [name for name in names if f"{door}.{name}" in modules_of(package)]
        assert not hidden, f"{door}: {hidden}"


# Imports the doors of all packages, then torch, which all names may bring; then each name of each package in turn. A
# package whose names may bring what a later one's never do is used in a fork.
PROGRAM = """
import importlib, json, os, sys
packages = json.loads(sys.argv[1])
for doors, _ in packages:
    for door in doors:
        importlib.import_module(door)
assert "torch" not in sys.modules, "a door brings torch before one of its names is used"
import torch
for number, (doors, heavy) in enumerate(packages):
    assert not [name for name in heavy if name in sys.modules]
    later = {name for _, names in packages[number + 1 :] for name in names}
    forks = not later.issubset(heavy)
    if forks:
        import torch._dynamo  # Megatron-Core and transformers import it: here once for both
    if forks and (child := os.fork()):
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
        continue
    for door in doors:
        module = importlib.import_module(door)
        assert dir(module) == module.__all__
        for name in module.__all__:
            getattr(module, name)
            brought = [name for name in heavy if name in sys.modules]
            assert not brought, f"{name} of {door} brings {brought}"
    if forks:
        break
"""
# What no name of a package's doors ever brings: no door is left out.
FOREIGN = ("transformers", "megatron", "ray", "vllm", "matplotlib")
HEAVY = {
    "ckpt": (*FOREIGN, "triton"),
    "parallel-layers": FOREIGN,
    "parallel-models": FOREIGN,
    "rl-models": FOREIGN,
    "rl-train": FOREIGN,
    "megatron-utils": ("transformers",),
    "hf-patches": ("megatron",),
}


def names_of_doors(heavy: Mapping[str, Sequence[str]]) -> subprocess.CompletedProcess[str]:
    """Use every name of every door of these packages; `heavy` says what they never bring."""
    packages = json.dumps([(list(doors_of(package)), brings) for package, brings in heavy.items()])
    return subprocess.run([sys.executable, "-c", PROGRAM, packages], capture_output=True, text=True)


@pytest.mark.slow  # `.ci/run` has it
def test_doors_are_lazy_and_bring_no_other_framework() -> None:
    assert HEAVY.keys() == MODULES.keys()
    result = names_of_doors(HEAVY)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", MODULES)
def test_doors_refuse_libraries_outside_the_bounds(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ckpt and parallel-layers have a copy of `lazy.py` each."""
    door = importlib.import_module(MODULES[package])
    for owner in ("ckpt", "parallel_layers"):
        importlib.import_module(f"{owner}.lazy").check_requirements.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda _: "0.0.1")
    name = project(package)["name"]
    with pytest.raises(ImportError, match=rf'0\.0\.1 is installed, and {name} supports >=.*: pip install "'):
        door.__getattr__(door.__all__[0])


@pytest.mark.slow
def test_one_name_that_brings_another_framework_is_named() -> None:
    """hf-patches needs transformers; its door stands for one whose name brings what it must not."""
    result = names_of_doors({"ckpt": ("transformers",), "hf-patches": ("transformers",)})
    assert result.returncode
    assert re.search(r"AssertionError: \w+ of hf_patches brings \['transformers'\]", result.stderr)


def test_copies_of_lazy_are_equal() -> None:
    """ckpt and parallel-layers import nothing of each other, so each has its own."""
    assert (
        modules_of("ckpt")["ckpt.lazy"].read_text() == modules_of("parallel-layers")["parallel_layers.lazy"].read_text()
    )


def test_kernels_alone_import_triton() -> None:
    """Others take it from `parallel_layers.kernels`, which has stand-ins where it is not installed."""
    importing = [
        str(file.relative_to(ROOT))
        for package in MODULES
        for file in modules_of(package).values()
        if re.search(r"^ *(from triton\b|import .*\btriton\b)", file.read_text(), re.MULTILINE)
    ]
    assert importing
    assert all(file.startswith("packages/parallel-layers/src/parallel_layers/kernels/") for file in importing)


@pytest.mark.parametrize("package", MODULES)
def test_public_signatures_change_with_a_line_of_the_changelog(package: str, pytestconfig: pytest.Config) -> None:
    """`pytest tests/test_doors.py --record` records the signatures, once the changelog has a line more."""
    file = SIGNATURES / f"{package}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {"changelog": "", "names": {}}
    names = signatures(package)
    if pytestconfig.getoption("--record") and names != recorded["names"]:
        assert recorded["changelog"] != changelog(package), f"add a line to {PACKAGES / package / 'CHANGELOG.md'}"
        record = {"changelog": changelog(package), "names": names}
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
        return
    changed = [name for name in names | recorded["names"] if names.get(name) != recorded["names"].get(name)]
    assert not changed, (
        f"public names of {package} are called otherwise: {changed}; add a line to its CHANGELOG.md, then run "
        "`uv run pytest tests/test_doors.py --record`"
    )


def wrong_names(package: str, readme: str) -> list[str]:
    """Return the names of the first table under "Names" that no door of a package has, as the table spells them."""
    table = re.search(r"^## (?:Names|Table of names)\n.*?^\|(.*?)\n\n", readme, re.DOTALL | re.MULTILINE)
    assert table is not None
    cells = [row.split("|")[0] for row in table[1].split("\n|")[2:] if "`rl-train " not in row.split("|")[0]]
    names = [name for cell in cells for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*)?`", cell)]
    known = {f"{door}.{name}" for door, own in DOORS.items() for name in own}

    def is_public(path: str) -> bool:  # a room, a name of a door, or a method of a class there
        return path in DOORS or path in known or path.rpartition(".")[0] in known

    return [name for name in names if not is_public(f"{package}.{name}")]


# The tests of parallel-layers hold its table, which has another form.
@pytest.mark.parametrize("package", sorted(MODULES.keys() - {"parallel-layers"}))
def test_the_names_of_a_readme_are_at_the_doors_that_it_says(package: str) -> None:
    module, readme = MODULES[package], (ROOT / "packages" / package / "README.md").read_text()
    assert wrong_names(module, readme) == []
    table = "## Names\n\n| name | what |\n|---|---|\n| `nowhere(path)` | x |\n\n"
    assert wrong_names(module, table) == ["nowhere"]
