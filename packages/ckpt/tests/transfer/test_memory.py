"""Conversions of files hold a small, fixed part of them in memory at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FIXED_BYTES = 64 << 20
MEASURED = """
import sys
from ckpt import *  # here already, not inside the command
import torch, torch.distributed.checkpoint.filesystem
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.empty(1)
from ckpt.cli import app

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) << 10

before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew (proc_pid_clear_refs(5))
app(sys.argv[1:], standalone_mode=False)
print(status("VmHWM") - before, file=sys.stderr)
"""


def extra_bytes(*arguments: object) -> int:
    """The most memory that a command takes beyond what its imports hold."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return int(run.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_conversions_need_far_less_memory_than_the_files(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=1024, intermediate_size=4096, vocab_size=20_000)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert size > 4 * FIXED_BYTES
    two, four, back = tmp_path / "two", tmp_path / "four", tmp_path / "back"
    for command in (
        ("shard", source, two, "--tp", 2),
        ("reshard", two, four, "--tp", 2, "--pp", 2),
        ("merge", four, back),
        ("merge", four, tmp_path / "cast", "--dtype", "bfloat16"),
        ("convert", source, tmp_path / "run", "--to", "megatron", "--dims", "tp=2,pp=2"),
        ("convert", tmp_path / "run", tmp_path / "from-run"),
        ("verify", source, back),
        ("diff", source, back),
    ):
        assert extra_bytes(*command) < FIXED_BYTES, command
