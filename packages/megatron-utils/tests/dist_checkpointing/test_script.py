"""Saving starts processes, which import the entry script again: one with a guard saves, in both ways, none without."""

import contextlib
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megatron_utils.dist_checkpointing import latest_step
from megatron_utils.dist_checkpointing.entry_script import check_entry_script

SCRIPT = """
import sys

import torch.distributed as dist
from megatron_utils import megatron_grid
from megatron_utils.dist_checkpointing import load_checkpoint, save_checkpoint
from megatron_utils.gpt import build_gpt
from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
from megatron_utils.testing import cpu_stand_in, tiny_config
from parallel_layers import ParallelDims


def main(root):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu_stand_in(), megatron_grid(ParallelDims()) as grid:
        chunks = wrap_data_parallel(build_gpt(tiny_config("llama"), grid), grid)
        for parameter in chunks[0].parameters():
            parameter.data.zero_()
        optimizer = Optimizer(chunks, grid, OptimizerConfig())
        save_checkpoint(root, 1, optimizer, grid)
        save_checkpoint(root, 2, optimizer, grid, asynchronous=True).wait()
        print("loaded", load_checkpoint(root, optimizer, grid).step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.slow
def test_an_entry_script_with_a_guard_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "train.py", "checkpoints"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "loaded 2\n"
    assert latest_step(tmp_path / "checkpoints") == 2


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return what this process seems to have been started with: `python train.py`."""
    main, path = sys.modules["__main__"], tmp_path / "train.py"
    monkeypatch.setattr(main, "__file__", str(path), raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    return path


@pytest.mark.parametrize(
    "source",
    [
        "train()",
        "import logging\nlog = logging.getLogger(__name__)\ntrain()",
        "def main():\n    if __name__ == '__main__':\n        train()\ntrain()",
        "# if __name__ == '__main__':\ntrain()",
        "if __name__ == 'train':\n    train()",
    ],
)
def test_an_entry_script_without_a_guard_is_refused(script: Path, source: str) -> None:
    check_entry_script()  # there is no such file: what runs is no script
    script.write_text(source)
    with pytest.raises(RuntimeError, match=r"train\.py saves .* put the code that the script runs under `if __name__"):
        check_entry_script()


@pytest.mark.parametrize(
    "source",
    [
        "if __name__ == '__main__':\n    train()",
        'import os\nif "__main__" == __name__ and os.environ:\n    train()',
        "\x7fELF \0",
    ],
)
def test_an_entry_script_with_a_guard_is_not(script: Path, source: str) -> None:
    script.write_text(source)
    check_entry_script()


@pytest.mark.parametrize(
    ("name", "refused"), [("package.__main__", False), ("__main__", False), ("package.train", True)]
)
def test_a_package_that_is_run_needs_a_guard_where_it_is_imported_again(
    script: Path, monkeypatch: pytest.MonkeyPatch, name: str, refused: bool
) -> None:
    script.write_text("train()")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(name, None))
    with pytest.raises(RuntimeError) if refused else contextlib.nullcontext():
        check_entry_script()
