"""The package's public names, and what is not imported for them."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import ckpt

PROGRAM = """
import sys
from typer.testing import CliRunner
from ckpt.cli import app
for arguments in (["--help"], ["--version"], *([command.name, "--help"] for command in app.registered_commands)):
    assert CliRunner().invoke(app, arguments).exit_code == 0
assert "torch" not in sys.modules, "help is printed without torch"
import ckpt
assert all(hasattr(ckpt, name) for name in ckpt.__all__)
print(*sys.modules)
"""


def test_every_public_name_is_there() -> None:
    assert dir(ckpt) == ckpt.__all__
    for name in ckpt.__all__:
        assert getattr(ckpt, name) is not None
    # A folder of the package would take the place of a function of its name once it is imported.
    assert not {module.name for module in pkgutil.iter_modules(ckpt.__path__)} & {*ckpt.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'convert'"):
        ckpt.convert  # noqa: B018


@pytest.mark.slow  # `.ci/run` has it
def test_help_needs_no_torch_and_nothing_imports_what_takes_as_long() -> None:
    """DTensors are recognised without `torch.distributed.tensor`."""
    slow = {"torch.distributed.tensor", "torch.distributed.checkpoint"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not slow & set(result.stdout.split())
