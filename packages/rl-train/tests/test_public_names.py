"""The package's public names, and what is not imported for them and for the command line."""

import subprocess
import sys

import pytest

import rl_train
from parallel_layers import ParallelDims
from rl_train.cluster.launch import slow_imports


def test_every_public_name_is_there() -> None:
    assert dir(rl_train) == rl_train.__all__
    for name in rl_train.__all__:
        assert getattr(rl_train, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Policy'"):
        rl_train.Policy  # noqa: B018


def test_help_is_printed_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from rl_train.cli import app; "
        "result = CliRunner().invoke(app, ['--help']); print(result.exit_code, 'torch' in sys.modules, result.output)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith("0 False")
    assert "quickstart" in output
    assert "score" in output


def test_only_who_needs_them_imports_what_takes_a_second() -> None:
    slow = {*slow_imports(ParallelDims(dp=2, pp=2), saves=True), "torch.distributed.tensor"}
    assert len(slow) == 5
    assert slow_imports(ParallelDims(tp=2)) == ["torch._dynamo"]
    code = "import sys, rl_train.score, rl_train.loop.run; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not slow & set(output.split())
