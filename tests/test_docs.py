"""Each block of code in docs/ is run by a test or says why not; links and paths in the pages lead somewhere."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import runpy
import shlex
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from tests.pages import DOCS, ROOT, SNIPPET, Block, blocks, expanded, indented_commands, programs

from rl_train.quickstart import make_checkpoint

PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
TEXTS = [
    *DOCS.rglob("*.md"),
    *ROOT.glob("*.md"),
    *ROOT.glob("packages/*/README.md"),
    ROOT / "benchmarks" / "RESULTS.md",
]
# Whose commands are compared with the command lines: the pages, and the READMEs beside them.
SHOWN = [*PAGES, *(f"../{page.relative_to(ROOT)}" for page in TEXTS if not page.is_relative_to(DOCS))]
SHELL = ("bash", "sh", "console")
# Pages whose Python blocks a test beside them runs.
RUN_BY = {
    "parallel-layers.md": "packages/parallel-layers/tests/test_readme.py",  # and test_guide.py, the blocks of `py`
    "hf-patches.md": "packages/hf-patches/tests/test_readme.py",
    "rl-models.md": "tests/test_examples.py",
    "ray.md": "tests/test_examples.py",
}
RUN_BY |= {
    f"../packages/{name}/README.md": f"packages/{name}/tests/test_readme.py"
    for name in ("parallel-layers", "hf-patches", "megatron-utils", "ckpt", "parallel-models", "rl-train")
}
RUN_BY |= {"../README.md": "tests/test_readme.py", "../packages/rl-models/README.md": "tests/test_examples.py"}
COMMANDS = {"rl-train": "rl_train.cli", "ckpt": "ckpt.cli"}
# Words before a command that change nothing about it.
PREFIXES = re.compile(r"^(\$ |uv run |--with-requirements \S+ |[A-Z_]+=\S+ )*")


@cache
def options_of(command: str) -> dict[str, set[str]]:
    """Return the options of each subcommand."""
    group = typer.main.get_command(importlib.import_module(COMMANDS[command]).app)
    return {
        name: {
            option
            for each in (one, *getattr(one, "commands", {}).values())
            for parameter in each.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, one in group.commands.items()  # type: ignore[attr-defined]
    }


@cache
def sources() -> str:
    """Return the source of the tests that run programs of examples/."""
    return "".join(
        (ROOT / "tests" / f"test_{name}.py").read_text() for name in ("examples", "guides", "migrations", "smollm2")
    )


def is_run(path: str) -> bool:
    """Whether a file is a program of examples/ or one of its parts, and a test names the program."""
    parts = Path(path).with_suffix("").parts
    return (
        parts[0] == "examples"
        and (ROOT / path).is_file()
        and re.search(rf'"[^"]*\b{parts[1]}\b', sources()) is not None
    )


def wrong_with(command: str) -> str | None:
    """Return what is wrong with a line of a shell; None if its options exist or a test runs its program."""
    first, both, rest = command.partition("&&")
    if both:
        return wrong_with(first) or wrong_with(rest.strip())
    words = shlex.split(PREFIXES.sub("", command), comments=True)
    if not words:
        return None
    if words[0] == "pytest":
        paths = [path for word in words[1:] if "/" in word for path in expanded(word)]
        return None if all((ROOT / path).exists() for path in paths) else f"not all of {paths} exist"
    if programs := [word for word in words if word.endswith(".py")]:
        return None if all(map(is_run, programs)) else f"no test runs {programs}"
    if words[0] in COMMANDS:
        known = options_of(words[0])
        if len(words) < 2 or words[1] not in known:
            return f"{words[0]} has no command {words[1:2]}"
        given = {word.split("=")[0] for word in words if word.startswith("--")}
        unknown = given - known[words[1]] - {"--help"}
        return f"{words[0]} {words[1]} has no option {sorted(unknown)}" if unknown else None
    if words == ["uv", "sync"]:
        return None
    if words[:2] == ["pip", "install"]:
        paths = [path for word in words[2:] if word.startswith("./") for path in expanded(word.split("[")[0])]
        missing = [path for path in paths if not any(ROOT.glob(path))]
        return f"there is no {missing}" if missing else None
    return "no test runs this command; write <!-- not run: REASON --> before the block"


def wrong_block(block: Block) -> str | None:
    """Return what is wrong with a block; None if it is run, or says why not, or is no code."""
    lines = [line for line in block.code.splitlines() if line.strip()]
    if any("8<" in line for line in lines):
        found = [SNIPPET.fullmatch(line) for line in lines]
        if not all(found):
            return f'a snippet is a line --8<-- "PATH" or "PATH:SECTION", got {lines}'
        for path, section in (one.groups() for one in found if one is not None):
            if not is_run(path):
                return f"no test runs {path}"
            if section and f"[start:{section}]" not in (ROOT / path).read_text():
                return f"{path} has no section {section}"
        return None
    if block.reason:
        return None
    if block.language in SHELL:
        commands = re.sub(r"\\\n *", "", block.code).splitlines()
        return next((wrong for command in commands if (wrong := wrong_with(command))), None)
    if block.language in ("", "text"):
        if found := re.search(
            r"^\s*(\$ )?(rl-train|ckpt|pip install|pytest|uv run|uv sync) ", block.code, re.MULTILINE
        ):
            return f"{found[0].strip()} is a command; write bash"
        try:
            hidden = any(
                isinstance(one, ast.FunctionDef | ast.Import | ast.ImportFrom) for one in ast.parse(block.code).body
            )
        except SyntaxError:
            return None
        return "this is Python; name the language" if hidden else None
    if block.language == "py" and block.page != "parallel-layers.md":
        return "no test runs this block; write python"
    return None


@pytest.mark.parametrize("page", SHOWN)
def test_each_block_is_run_or_says_why_not(page: str) -> None:
    wrong = [f"{block}: {reason}" for block in blocks(page) if (reason := wrong_block(block))]
    assert not wrong, "\n".join(wrong)
    text = (DOCS / page).read_text()
    snippet = re.compile(r"^ *--8<-- ", re.MULTILINE)
    assert len(snippet.findall(text)) == sum(len(snippet.findall(block.code)) for block in blocks(page)), (
        "a snippet is in no block"
    )
    if page.startswith("../") and programs(page):
        assert page in RUN_BY, f"no test runs the Python of {page}"


# A usage of a command shows choices, and places for values.
@pytest.mark.parametrize("page", SHOWN)
def test_the_options_of_commands_without_a_fence_exist(page: str) -> None:
    for line in indented_commands(page):
        command = re.sub(r"[\[\]]|\.{3}| #.*|  .*", " ", line) if line.startswith(tuple(COMMANDS)) else line
        assert not (wrong := wrong_with(command.replace(" | ", " "))), f"{page}: {line}: {wrong}"


OWN = [page for page in PAGES if page not in RUN_BY and any("8<" not in code for code in [programs(page)] if code)]


@pytest.mark.parametrize("page", OWN)
def test_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program; `checkpoint` is a folder with a small Llama."""
    make_checkpoint(tmp_path / "checkpoint", seed=0)
    monkeypatch.chdir(tmp_path)
    exec(compile(programs(page), f"docs/{page}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_of_a_page_names_it(page: str) -> None:
    assert Path(page).name in (ROOT / RUN_BY[page]).read_text()


# Each with a fault that a check once passed over.
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```bash\nrl-train train --nonsense 1\n```\n", "has no option"),
        ("1. A list:\n\n    ```bash\n    rl-train train --nonsense 1\n    ```\n", "has no option"),
        ("~~~bash\nckpt inspekt x\n~~~\n", "has no command"),
        ("```\nrl-train train --nonsense 1\n```\n", "is a command; write bash"),
        ("```bash\npip install uv && uv run rl-train quickstrat\n```\n", "has no command"),
        ("```bash\npip install ./packages/{ckpt,nowhere}\n```\n", "there is no"),
        ("```bash\nmake\n```\n", "no test runs this command"),
        ("```py\nprint(1)\n```\n", "write python"),
        ('```python\n--8<-- "examples/extend/nowhere.py"\n```\n', "no test runs examples/extend/nowhere.py"),
        ("    ckpt inspect DIR [--chek]    what it holds\n", "has no option"),
    ],
)
def test_a_planted_fault_is_seen(text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr("tests.pages.DOCS", tmp_path)
    monkeypatch.setitem(globals(), "DOCS", tmp_path)
    check = (
        test_each_block_is_run_or_says_why_not
        if "```" in text or "~~~" in text
        else test_the_options_of_commands_without_a_fence_exist
    )
    with pytest.raises(AssertionError, match=reason):
        check("page.md")


def test_each_example_has_a_page() -> None:
    shown = {Path(path).parts[1] for page in PAGES for path, _ in SNIPPET.findall((DOCS / page).read_text())}
    assert {path.name for path in (ROOT / "examples").iterdir() if path.name != "__pycache__"} == shown


def test_paths_in_the_pages_exist() -> None:
    found = {
        f"{text.relative_to(ROOT)}: {path}"
        for text in TEXTS
        for path in re.findall(r"`((?:examples|benchmarks|docs|packages)/[\w./-]+)`", text.read_text())
        if not path.startswith("packages/NAME") and not (ROOT / path).exists()
    }
    assert not found


@cache
def literals() -> str:
    """Return the text of all sources; the parts of a string are joined, and a value in a string is …."""
    text = "".join(file.read_text() for file in ROOT.glob("packages/*/src/**/*.py"))
    return re.sub(r"\{[^{}\n]*\}", "…", re.sub(r'"\s+f?"', "", text))


def unknown_messages(text: str) -> list[str]:
    """Return the messages in tables with the column "message" that no source has; torch's own are marked (torch)."""
    rows = re.findall(r"^ *\| ((?:`[^`]+`(?: and )?)+)( \(torch\))? \|", text.replace("\n    |", "\n|"), re.MULTILINE)
    quoted = [message for cell, torch in rows if not torch for message in re.findall(r"`([^`]+)`", cell)]
    return [message for message in quoted if " " in message and message not in literals()]


def test_the_messages_of_the_page_of_troubles_are_those_of_the_sources() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    assert text.count("| message |") >= 3
    assert unknown_messages(text) == []
    assert unknown_messages("| `ranks … have been lost` | a | b |\n") == ["ranks … have been lost"]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of docs/hooks.py, without mkdocs, which only the group `docs` brings."""
    for module, names in {"exceptions": ("PluginError",), "structure.files": ("File", "Files")}.items():
        stub = ModuleType(module)
        vars(stub).update({name: type(name, (Exception,), {}) for name in names})
        monkeypatch.setitem(sys.modules, f"mkdocs.{module}", stub)
    return runpy.run_path(str(DOCS / "hooks.py"))


@pytest.mark.parametrize("text", ["a text", "a text\nover two lines"])
def test_the_site_points_links_at_its_own_pages(hooks: dict[str, Any], text: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    files = SimpleNamespace(get_file_from_path=lambda uri: None if uri.startswith("packages/ckpt/") else uri)

    def shown(link: str) -> str:
        return hooks["on_page_markdown"](link, page=page, files=files)

    assert shown(f"See [{text}](docs/install.md#extras).") == f"See [{text}](install.md#extras)."
    assert shown(f"See [{text}](packages/ckpt/CHANGELOG.md).") == f"See {text} (`packages/ckpt/CHANGELOG.md`)."
    assert shown(f"[not a link]\n\n[{text}](docs/nowhere.md)") == f"[not a link]\n\n[{text}](docs/nowhere.md)"


def test_the_list_for_language_models_has_titles_addresses_and_first_sentences(hooks: dict[str, Any]) -> None:
    """`tests/test_site.py` looks at the list of the built site."""
    texts = {
        "index.md": "# Home\n\n**Train models** on [any grid](grid.md), fast. More.",
        "grid.md": "# Grid\n\n```bash\nrl-train plan\n```\n\n| a | b |\n\nTake `dp`\nfirst: it is simple.",
        "names.md": "::: name\n",
    }

    def file(uri: str) -> SimpleNamespace:
        return SimpleNamespace(url=uri.replace(".md", ".html"), page=SimpleNamespace(markdown=texts[uri]))

    nav = [{"Home": "index.md"}, {"Guides": [{"Choose": "grid.md"}, {"Names": "names.md"}]}]
    assert hooks["llms"]("Site", nav, SimpleNamespace(get_file_from_path=file)).splitlines() == [
        *("# Site", "", "> Train models on any grid, fast.", "", "## Pages", ""),
        *("- [Home](index.html): Train models on any grid, fast.", "", "## Guides", ""),
        *("- [Choose](grid.html): Take dp first", "- [Names](names.html)"),
    ]


def test_a_strict_build_of_the_site_sees_its_warnings(hooks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdocs counts warnings by a handler, so that under `--quiet` it counts none and exits with 0."""
    hooks["on_config"](SimpleNamespace(strict=True))
    monkeypatch.setattr(logging.getLogger("mkdocs"), "level", logging.ERROR)
    hooks["on_config"](SimpleNamespace(strict=False))
    with pytest.raises(hooks["PluginError"], match="leave --quiet out"):
        hooks["on_config"](SimpleNamespace(strict=True))


def external() -> dict[str, str]:
    """Return each address outside of the repository, and a text that has it."""
    links = re.compile(r"\]\((https?://[^)\s]+)\)")
    return {link: str(text.relative_to(ROOT)) for text in TEXTS for link in links.findall(text.read_text())}


def test_external_links_are_well_formed() -> None:
    for link, page in external().items():
        assert re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}(/[\w./#%~+=?&-]*)?", link), (page, link)
        if "arxiv.org" in link:
            assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{4,5}", link), (page, link)


def answer(link: str) -> int | str:
    """Return the status of an address, or the error of the network."""
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)


@pytest.mark.slow
def test_external_links_answer() -> None:
    links = list(external())
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(links, pool.map(answer, links), strict=True))
    if all(isinstance(status, str) for status in answers.values()):
        pytest.skip(f"no network: {next(iter(answers.values()), 'no links')}")
    # 403 and 429: the server is there and refuses programs.
    assert not {link: status for link, status in answers.items() if status not in (200, 403, 429)}
