"""The package's public names, and what is not imported for them."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import ckpt


def imported(code: str) -> set[str]:
    """The modules that a new process has imported after running `code`."""
    program = (
        f"import contextlib, io, sys\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}\nprint(*sys.modules)"
    )
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_every_public_name_is_there() -> None:
    assert dir(ckpt) == ckpt.__all__
    for name in ckpt.__all__:
        assert getattr(ckpt, name) is not None
    # A folder of the package would take the place of a function of its name once it is imported.
    assert not {module.name for module in pkgutil.iter_modules(ckpt.__path__)} & {*ckpt.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'convert'"):
        ckpt.convert  # noqa: B018


def test_help_is_printed_without_torch() -> None:
    imports = "from typer.testing import CliRunner; from ckpt.cli import app"
    codes = "[CliRunner().invoke(app, arguments).exit_code for arguments in (['--help'], ['shard', '--help'])]"
    assert "torch" not in imported(f"{imports}; assert {codes} == [0, 0]")


def test_nothing_imports_what_takes_as_long_as_torch() -> None:
    """DTensors are recognised without `torch.distributed.tensor`."""
    slow = {"torch.distributed.tensor", "torch.distributed.checkpoint"}
    assert not slow & imported(f"import ckpt; {', '.join(f'ckpt.{name}' for name in ckpt.__all__)}")
