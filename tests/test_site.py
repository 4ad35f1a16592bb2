"""The built site in a browser: phones, light and dark pages, the search; and its list for language models.

uv run --group docs pytest --slow tests/test_site.py      # with chromium
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.browser import Browser

ROOT = Path(__file__).resolve().parent.parent
PHONE = 390
pytestmark = pytest.mark.slow


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without a log."""

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("mkdocs", reason="the group docs has mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("page", ["index", "gallery", "choose", "troubleshooting", "come-from"])
def test_a_phone_shows_a_page_without_scrolling_aside(browser: Browser, address: str, page: str) -> None:
    browser.open(f"{address}/{page}.html", PHONE, 800)
    assert browser.value("document.documentElement.scrollWidth") == PHONE
    pictures = browser.value("[...document.images].map(one => [one.naturalWidth, one.getBoundingClientRect().right])")
    assert all(width > 0 and right <= PHONE for width, right in pictures)
    narrow = "[...document.querySelectorAll('.md-typeset table')].filter(one => !one.querySelector('th:nth-child(4)'))"
    assert browser.value(f"{narrow}.filter(one => one.scrollWidth > {PHONE}).map(one => one.textContent)") == []


def test_the_first_command_stands_on_the_first_screen_of_a_phone(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html", PHONE, 800)
    block = browser.value("(({top, bottom}) => [top, bottom])(document.querySelector('pre').getBoundingClientRect())")
    assert 0 < block[0] < block[1] < 800
    style = "(one => [one.clientHeight, ...['lineHeight', 'paddingTop'].map(name => getComputedStyle(one)[name])])"
    height, *sizes = browser.value(f"{style}(document.querySelector('pre code'))")
    line, padding = (float(size.removesuffix("px")) for size in sizes)
    text = browser.value("document.querySelector('pre code').innerText.trim()")
    assert round((height - 2 * padding) / line) == len(text.splitlines()) == 2  # no line is wrapped


@pytest.mark.parametrize("dark", [False, True])
def test_pictures_follow_the_colours_of_the_page(browser: Browser, address: str, dark: bool, tmp_path: Path) -> None:
    """The page has the colours of the system, until the reader chooses others."""
    image = pytest.importorskip("PIL.Image")

    def bars() -> dict[str, int]:
        """Count the pixels of the first figure that have the colours of bars."""
        figure = "document.querySelector('img[src$=\"head.svg\"]')"
        browser.value(f"{figure}.scrollIntoView({{block: 'center'}})")
        box = browser.value(f"(one => [one.left, one.top, one.right, one.bottom])({figure}.getBoundingClientRect())")
        browser.screenshot(tmp_path / "page.png")
        with image.open(tmp_path / "page.png") as page:
            colours = {colour: count for count, colour in page.convert("RGB").crop(box).getcolors(1 << 24)}
        return {"light": colours.get((15, 118, 110), 0), "dark": colours.get((45, 212, 191), 0)}

    browser.open(f"{address}/index.html", dark=dark)
    browser.wait_for("[...document.images].every(one => one.complete)")
    before = bars()
    scheme = "default" if dark else "slate"
    browser.value(f"document.querySelector('#__palette_{1 if dark else 2}').click()")
    browser.wait_for(f"document.body.getAttribute('data-md-color-scheme') == '{scheme}'")
    after = bars()
    dim, bright = (before, after) if dark else (after, before)
    assert dim["dark"] > 3000 > 30 > dim["light"]
    assert bright["light"] > 3000 > 30 > bright["dark"]


@pytest.mark.parametrize(
    ("words", "page"), [("staleness", "guides/metrics.html"), ("importance sampling", "rl-train.html")]
)
def test_the_search_leads_to_pages(browser: Browser, address: str, words: str, page: str) -> None:
    browser.open(f"{address}/index.html")
    browser.value("document.querySelector('.md-search__input').focus()")
    browser.call("Input.insertText", text=words)
    links = "[...document.querySelectorAll('.md-search-result__link')].map(one => one.pathname)"
    assert f"/{page}" in browser.wait_for(f"(links => links.length && links)({links})")


def test_diagrams_are_drawn_by_the_site_itself(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html", PHONE)
    browser.wait_for("document.querySelector('div.mermaid')?.getBoundingClientRect().height > 200")
    assert browser.value("document.querySelector('div.mermaid').getBoundingClientRect().right") <= PHONE
    hosts = browser.value("performance.getEntriesByType('resource').map(one => new URL(one.name).host)")
    assert set(hosts) == {address.removeprefix("http://")}


def test_the_list_for_language_models_names_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Parallel")
    assert re.search(r"^> Train Hugging Face language models", text, re.MULTILINE)
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    assert len(set(links)) == len(links)
    assert {link for link in links if not (site / link).is_file()} == set()
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert pages == set(links)
    described = re.findall(r"^- \[[^\]]+\]\([^)]+\): (.+)$", text, re.MULTILINE)
    assert len(described) > 50
    assert [line for line in described if len(line) > 400] == []
