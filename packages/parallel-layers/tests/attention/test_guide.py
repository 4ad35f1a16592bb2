"""The guide's programs print what their comments say, and its table of attention backends is the code's."""

import math
import re
from pathlib import Path

import pytest
import torch

from parallel_layers.attention.backends import ANY_FLOAT, BACKENDS, HALF, Backend

GUIDE = (Path(__file__).parents[4] / "docs/parallel-layers.md").read_text()
DTYPES = {HALF: "fp16, bf16", HALF | {torch.float32}: "fp16, bf16, fp32", ANY_FLOAT: "any float"}


def expected_cells(backend: Backend) -> list[str]:
    sizes = "any"
    if backend.max_head_dim < math.inf:
        sizes = f"to {backend.max_head_dim}, multiples of {backend.head_dim_multiple}"
    device = "any" if backend.device is None else backend.device.upper()
    yes = {True: "yes", False: "no"}
    return [device, DTYPES[backend.dtypes], sizes, yes[backend.softcap], yes[backend.lse]]


def test_backend_table() -> None:
    section = GUIDE.split("## Attention backends")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    table = {row[0]: row[2:] for row in rows[2:]}
    assert list(table) == list(BACKENDS)  # the order is that of preference
    for name, backend in BACKENDS.items():
        assert table[name] == expected_cells(backend)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """They are one program: the second goes on with the layers of the first. Each prints what its comment says."""
    program = "\n".join(re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL))
    exec(compile(program, "the guide's programs", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
