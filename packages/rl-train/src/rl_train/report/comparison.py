"""`compare`: several runs on one page, and in a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rl_train.data.sources import exists, is_folder, opened
from rl_train.report.html_report import CHARTS, PHASES, RunFiles, charts_of, page_template, write_content
from rl_train.report.page_samples import shared_samples


class Comparison:
    """Two or more runs, which may still be running.

    Attributes:
        names: The name of each run: of its folder, or its whole path where folders share a name.
        differing: The options that differ, each with its value in every run; None where a run has no such option.

    Args:
        folders: The folders of the runs.

    Raises:
        ValueError: There are fewer than two folders, a folder holds no run, or one of its files is damaged.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
            raise ValueError(f"{', '.join(map(str, folders))}: give two or more runs, each once")
        self._runs = [RunFiles(folder) for folder in folders]
        names = [folder.resolve().name for folder in folders]
        self.names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
        options = [run.options for run in self._runs]
        values = {name: [each.get(name) for each in options] for name in dict.fromkeys(chain(*options))}
        self.differing = {
            name: row for name, row in values.items() if name != "out" and any(value != row[0] for value in row)
        }

    def table(self) -> dict[str, list[str]]:
        """Return rows of numbers that sum the runs up: the tiles of their pages, and the mean seconds of each phase."""
        columns = []
        for run in self._runs:
            speeds = [record["tokens_per_second"] for record in run.metrics if "tokens_per_second" in record]
            column = run.tiles | ({"Tokens per second": f"{fmean(speeds):.0f}"} if speeds else {})
            total = max(1, sum("seconds" in record for record in run.metrics))
            for name in CHARTS[PHASES]:
                if seconds := [record[name] for record in run.metrics if name in record]:
                    title = name.replace("seconds_", "Seconds ").replace("_", " ")
                    column[title] = f"{sum(seconds) / total:.2f}"
            columns.append(column)
        return {name: [column.get(name, "") for column in columns] for name in dict.fromkeys(chain(*columns))}

    def write(self, path: Path) -> None:
        """Write the page.

        Raises:
            ValueError: The path or URL has a file that is no such page, or a folder; or the disk refuses the page.
        """
        beginning = page_template().partition("<style>")[0].encode()
        if exists(path):
            content = b""
            if not is_folder(path):
                with opened(path) as file:
                    content = file.read(len(beginning))
            if content != beginning:
                raise ValueError(f"{path} exists and is no page of rl-train; choose another --out")
        contents: list[dict[str, Any]] = [
            run.content | {"name": name} for run, name in zip(self._runs, self.names, strict=True)
        ]
        charts = charts_of(list(chain(*(run.metrics for run in self._runs))))
        samples = shared_samples([run.samples for run in self._runs])
        write_content(path, {"runs": contents, **charts, **samples, "differing": list(self.differing)})
