"""`ReportBrowser`: a browser that reads and changes the pages of runs as their readers do."""

from __future__ import annotations

import itertools

from tests.browser import Browser


class ReportBrowser(Browser):
    """A browser with one page of a run; see `Browser`."""

    def set(self, selector: str, value: str) -> None:
        """Change a control as a user does."""
        node = f"node = document.querySelector({selector!r})"
        self.value(f"void (({node}) => {{ node.value = {value!r}; node.dispatchEvent(new Event('input')) }})()")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of elements."""
        texts: list[str] = self.value(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent)")
        return texts

    def check_layout(self) -> None:
        """Check at three widths, light and dark, that nothing is wider than the window and the console is empty."""
        root, papers = "document.documentElement", set()
        for width, dark in itertools.product((390, 820, 1400), (False, True)):
            self.show(width, dark=dark)
            assert self.value(f"{root}.scrollWidth") <= self.value(f"{root}.clientWidth"), (width, dark)
            boxes = "[...document.querySelectorAll('h1, h2, .card, pre, dl, select, input, button')]"
            beyond = f"node.getBoundingClientRect().right > {root}.clientWidth + 1"
            assert self.value(f"{boxes}.filter(node => {beyond}).length") == 0, (width, dark)
            papers.add(self.value("getComputedStyle(document.body).backgroundColor"))
        assert len(papers) == 2, "light and dark have the same colours"
        assert self.problems == []
