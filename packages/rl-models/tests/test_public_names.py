"""The package's public names, and that the command line does not import torch to print its help."""

import subprocess
import sys

import pytest

import rl_models


def test_every_public_name_is_there() -> None:
    assert dir(rl_models) == rl_models.__all__
    for name in rl_models.__all__:
        assert getattr(rl_models, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Policy'"):
        rl_models.Policy  # noqa: B018


def test_help_is_printed_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from rl_models.cli import app; "
        "result = CliRunner().invoke(app, ['--help']); print(result.exit_code, 'torch' in sys.modules, result.output)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.startswith("0 False")
    assert "quickstart" in output
    assert "score" in output
