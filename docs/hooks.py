"""Pages that the site makes from files elsewhere: READMEs, figures, public names and the help of the commands.

A link to a file of the repository leads to its page, where it has one; else its path is shown as text.
"""

import ast
import logging
import os
import re
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("parallel-layers", "ckpt", "hf-patches", "megatron-utils", "parallel-models", "rl-models", "rl-train")
COPIED = {
    "README.md": "index.md",
    **{f"packages/{name}/README.md": f"packages/{name}.md" for name in PACKAGES},
    "benchmarks/RESULTS.md": "performance.md",
    "CONTRIBUTING.md": "contributing.md",
}
# Names of a door that another library defines.
ELSEWHERE = ("tl", "triton")
# `ckpt` of ckpt, and so on: the commands whose help is a page.
COMMANDS = {"rl-train": "rl_train.cli.commands", "ckpt": "ckpt.cli"}
# Of the package mmdc, which brings it; the theme would load it from a server.
MERMAID = "assets/mermaid.js"
# A text in brackets, which may go on in the next line of its paragraph, and a target in parentheses.
LINK = re.compile(r"(!?)\[((?:[^\]\n]|\n(?!\s*\n))*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> None:
    """Refuse a strict build that would not see its warnings: under `--quiet`, mkdocs counts none."""
    if config.strict and logging.getLogger("mkdocs").getEffectiveLevel() > logging.WARNING:
        raise PluginError("--quiet hides the warnings that --strict counts: leave --quiet out")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, page in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for name in PACKAGES:
        module = name.replace("-", "_")
        files.append(File.generated(config, f"reference/{module}.md", content=reference(name)))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    program = str(resources.files("mmdc").joinpath("assets/mermaid.js"))
    files.append(File.generated(config, MERMAID, abs_src_path=program))
    return files


def on_env(env: Any, config: Any, files: Files) -> Any:
    """Add `llms.txt`, the list of the pages for language models (https://llmstxt.org)."""
    files.append(File.generated(config, "llms.txt", content=llms(config.site_name, config.nav, files)))
    return env


def llms(name: str, nav: list[dict[str, Any]], files: Files) -> str:
    """Return the pages of the site by section, each with its title, its address and its first sentence."""

    def line(title: str, uri: str) -> str:
        file = files.get_file_from_path(uri)
        return f"- [{title}]({file.url}): {first_sentence(file.page.markdown)}".removesuffix(": ")

    ((_, home),) = nav[0].items()
    lines = [f"# {name}", "", f"> {first_sentence(files.get_file_from_path(home).page.markdown)}", "", "## Pages", ""]
    for entry in nav:
        ((title, pages),) = entry.items()
        if isinstance(pages, str):
            lines.append(line(title, pages))
        else:
            lines += ["", f"## {title}", "", *(line(*pair) for page in pages for pair in page.items())]
    return "\n".join(lines) + "\n"


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's first paragraph, without marks; empty for a page without one."""
    text_alone = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text_alone):
        if re.match(r"[\w*`\[]", text := " ".join(paragraph.split())):
            text = re.sub(r"[*`]", "", LINK.sub(r"\2", text))
            return re.split(r"(?<=[.!?:])\s", text)[0].removesuffix(":")
    return ""


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the program that draws diagrams from the site itself, on the pages that have one; wide diagrams scroll."""
    if 'class="mermaid"' not in output:
        return output
    script = f'<script src="{os.path.relpath(MERMAID, Path(page.file.dest_uri).parent)}"></script>'
    wide = r'<pre class="mermaid"><code>(?!graph TB).*?</pre>'  # from left to right
    output = re.sub(wide, r'<div class="wide">\g<0></div>', output, flags=re.DOTALL)
    return output.replace("</head>", f"{script}</head>")


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point links at pages, and show those that lead to other files of the repository as code."""
    uri = page.file.src_uri
    folder = Path({page: path for path, page in COPIED.items()}.get(uri, f"docs/{uri}")).parent

    def linked(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, _, anchor = target.partition("#")
        there = os.path.normpath(folder / path)
        if re.match(r"\w+:|#", target) or not (ROOT / there).exists():
            return found[0]  # `--strict` names one that leads nowhere.
        readme = os.path.join(there, "README.md")
        to = COPIED.get(there, COPIED.get(readme, there.removeprefix("docs/")))
        if files.get_file_from_path(to) is None:
            return text if there in text else f"{text} (`{there}`)"
        return f"{image}[{text}]({os.path.relpath(to, Path(uri).parent)}{'#' + anchor if anchor else ''})"

    return LINK.sub(linked, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site on which a public name is neither described nor linked to its description."""
    for package in PACKAGES:
        page = f"reference/{package.replace('-', '_')}"
        shown = (Path(config.site_dir) / f"{page}.html").read_text()
        if not (named := {name for found in modules(package).values() for name in found}):
            raise PluginError(f"{package} has no public name, as far as docs/hooks.py sees")
        if missing := [name for name in sorted(named) if not re.search(rf'(id="|#){re.escape(name)}"', shown)]:
            raise PluginError(f"{page}.md lacks {', '.join(missing)}, which are in `__all__`")


def reference(package: str) -> str:
    """Return a page with the public names of each public module, which are those of its `__all__`."""
    lines, seen = [f"# Reference of {package}", ""], set()
    elsewhere = {name for other in PACKAGES if other != package for name in own_names(other)}
    for module, found in modules(package).items():
        names = [name for name in found if name not in seen]
        seen.update(names)
        if names:
            lines += [f"## {module}", ""]
        for name in names:
            alias = f"- `{name.rpartition('.')[2]}` is [`{name}`][{name}]"
            lines += [alias if name in elsewhere else f"::: {name}", ""]
    return "\n".join(lines)


def own_names(package: str) -> set[str]:
    """Return where the public names of a package are defined, as far as it defines them itself."""
    return {name for found in modules(package).values() for name in found if name.startswith(package.replace("-", "_"))}


@cache
def modules(package: str) -> dict[str, list[str]]:
    """Return the doors of a package, each with where its public names are defined, as its stub lists them."""
    source = ROOT / "packages" / package / "src"
    stubs = sorted(source.rglob("__init__.pyi"), key=lambda stub: stub.parent)
    return {".".join(stub.relative_to(source).parent.parts): public_names(stub) for stub in stubs}


def public_names(stub: Path) -> list[str]:
    """Return where each name of a stub is defined, in the order of the names."""
    homes = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return [homes[name] for name in sorted(homes) if name not in ELSEWHERE]


def commands() -> str:
    """Return a page with what each command prints for `--help`."""
    lines = ["# Command lines", ""]
    for name, module in COMMANDS.items():
        lines += [f"## {name}", "", "```text", help_of(name, module), "```", ""]
        if not (found := re.findall(r"^[│ ]+([a-z]+)  ", help_of(name, module), re.MULTILINE)):
            raise PluginError(f"the help of {name} lists no command, as far as docs/hooks.py sees")
        for command in found:
            lines += [f"### {name} {command}", "", "```text", help_of(name, module, command), "```", ""]
    return "\n".join(lines)


def help_of(name: str, module: str, *command: str) -> str:
    """Return the help of a command, as on a terminal of 96 columns."""
    program = f"import sys; sys.argv[0] = {name!r}; from {module} import app; app()"
    environment = {**os.environ, "COLUMNS": "96", "NO_COLOR": "1", "TERM": "dumb"}
    call = [sys.executable, "-c", program, *command, "--help"]
    return subprocess.run(call, env=environment, capture_output=True, text=True, check=True).stdout.strip("\n")
