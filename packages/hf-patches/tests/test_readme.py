"""The examples of the README and of the page in docs run as they stand."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
PAGES = (PACKAGE / "README.md", PACKAGE.parents[1] / "docs" / "hf-patches.md")
EXAMPLES = [
    pytest.param(example, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(example):
    exec(compile(example, "an example", "exec"), {})  # our own pages
