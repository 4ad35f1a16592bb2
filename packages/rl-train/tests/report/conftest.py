"""The browser that the tests of pages share."""

from collections.abc import Iterator

import pytest

from .browser import ReportBrowser


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportBrowser]:
    """A browser; without Chromium the test is skipped."""
    with ReportBrowser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
