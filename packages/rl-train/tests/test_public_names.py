"""The package's public names, and what is not imported for them and for the command line."""

import subprocess
import sys

import pytest

import rl_train


def test_every_public_name_is_there() -> None:
    assert dir(rl_train) == rl_train.__all__
    for name in rl_train.__all__:
        assert getattr(rl_train, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Policy'"):
        rl_train.Policy  # noqa: B018


PROGRAM = """
import sys
from typer.testing import CliRunner
from rl_train.cli.commands import app
names = [command.name for command in app.registered_commands]
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in names)):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, arguments
    assert arguments != ["train", "--help"] or "--max-new-tokens" in result.output
assert {"train", "sft"} <= {*names}
assert "torch" not in sys.modules, "help is printed without torch"
import rl_train.loop.run, rl_train.loop.score
print(*sys.modules)
"""


@pytest.mark.slow  # `.ci/run` has it
def test_help_needs_no_torch_and_the_commands_leave_slow_imports_to_the_ranks_that_need_them() -> None:
    slow = {"torch._dynamo"} | {f"torch.distributed.{name}" for name in ("fsdp", "pipelining", "tensor", "checkpoint")}
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not slow & set(result.stdout.split())
