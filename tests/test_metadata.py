"""The versions and requirements that pages print are those of the packages' pyproject.toml files."""

import re
import shlex
from email.message import Message

import pytest
from packaging.requirements import Requirement
from tests.distributions import FOLDERS, MODULES, PACKAGES, ROOT, closure, project
from tests.pages import expanded

RELEASE = ROOT / "docs" / "release.md"


def row(metadata: Message) -> str:
    """The row of docs/release.md of a package with this metadata, that of a wheel or of a pyproject.toml."""
    needs: list[str] = []
    extras: dict[str, list[str]] = {name: [] for name in metadata.get_all("Provides-Extra", [])}
    for line in metadata.get_all("Requires-Dist", []):
        need = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(need.marker))
        asked_for = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
        (extras[extra[1]] if extra else needs).append(f"`{need.name}{asked_for}{need.specifier}`")
    of_extras = "; ".join(f"`{name}`: {', '.join(found)}" for name, found in sorted(extras.items()))
    python = f"`{metadata['Requires-Python'].replace(' ', '')}`"
    return f"| {metadata['Name']} | {metadata['Version']} | {python} | {', '.join(needs)} | {of_extras} |"


def declared(package: str) -> Message:
    """The metadata that the pyproject.toml of a package declares, in the form of a wheel's."""
    given, found = project(package), Message()
    for name, value in (("Name", "name"), ("Version", "version"), ("Requires-Python", "requires-python")):
        found[name] = given[value]
    for need in given["dependencies"]:
        found["Requires-Dist"] = need
    for extra, needs in given.get("optional-dependencies", {}).items():
        found["Provides-Extra"] = extra
        for need in needs:
            base, _, marker = need.partition(";")
            found["Requires-Dist"] = f"{base}; {f'({marker}) and ' if marker else ''}extra == '{extra}'"
    return found


def test_the_table_of_versions_is_that_of_the_packages() -> None:
    """Packages need each other in the minor version that they have; the table says so."""
    rows = [row(declared(package)) for package in MODULES]
    version = {project(package)["name"]: project(package)["version"] for package in MODULES}
    for package in MODULES:
        for line in declared(package).get_all("Requires-Dist", []):
            need = Requirement(line)
            assert need.name not in version or need.specifier.contains(version[need.name]), (package, line)
            assert need.name not in version or len(need.specifier) == 2, f"{package}: {line} lacks a bound"
    print("\n".join(rows))
    table = RELEASE.read_text().split("|---|---|---|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == rows, "replace the table in docs/release.md by the one above"


PIP_INSTALL = re.compile(r"(?<![\w`])pip install ((?:\\\n|[^\n#`])+)")


def installed(command: str) -> dict[str, frozenset[str]]:
    """Return the folders that the arguments of `pip install` name, each with its extras."""
    paths = [path for word in shlex.split(command) for path in expanded(word)]
    named = [found for path in paths if (found := re.fullmatch(r"\./packages/([\w-]+)(?:\[([\w,-]+)\])?", path))]
    return {found[1]: frozenset((found[2] or "").split(",")) - {""} for found in named}


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", *(f"packages/{name}/README.md" for name in MODULES)])
def test_each_command_that_installs_names_all_packages_that_are_needed(page: str) -> None:
    """pip finds none of them on an index, so a command names the package's own needs in the workspace, too."""
    commands = [found for line in PIP_INSTALL.findall((ROOT / page).read_text()) if (found := installed(line))]
    assert commands
    for named in commands:
        needed = {folder for package, extras in named.items() for folder in closure(package, extras)[0]}
        assert needed <= named.keys(), f"{page}: {sorted(named)} lacks {sorted(needed - named.keys())}"


def test_the_page_of_the_installation_has_each_package_and_each_extra() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    alone = [set(installed(line)) for line in PIP_INSTALL.findall(text.split("## One package")[1])]
    assert [closure(package)[0] for package in MODULES if closure(package)[0] not in alone] == []
    rows = re.findall(r"^\| (.*?) \|", text.split("## Extras")[1], re.MULTILINE)
    listed = [
        (package[1], extra)
        for row in rows
        for package in [re.search(r"\./packages/([\w-]+)\[", row)]
        if package
        for extra in re.findall(r"\[([\w-]+)\]", row)
    ]
    extras = [(package, extra) for package in MODULES for extra in project(package).get("optional-dependencies", {})]
    assert sorted(listed) == sorted(extras)


@pytest.mark.parametrize("package", MODULES)
def test_the_readmes_name_what_a_package_needs(package: str) -> None:
    """The sentence of the package's own README, with versions, and the row of the root's."""
    names = {line: Requirement(line).name for line in project(package)["dependencies"]}
    *needs, last = (f"`{line.split('>')[0] if name in FOLDERS else line}`" for line, name in names.items())
    sentence = f"It needs Python `{project(package)['requires-python']}`, {', '.join(needs)} and {last}."
    assert sentence in " ".join((PACKAGES / package / "README.md").read_text().split()), sentence
    cell = re.search(rf"^\| \[{package}\]\(.* \| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert cell is not None
    assert cell[1] == ", ".join(names.values())
