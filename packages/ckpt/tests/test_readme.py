"""The README's program runs as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ckpt import layout_for, load_hf, save_hf
from parallel_layers.testing import RankPool

PACKAGE = Path(__file__).resolve().parent.parent
README = (PACKAGE / "README.md").read_text()


(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
# The rest of the package's job: the commands, a training run's checkpoint, an adapter. The first argument is a model.
JOB = """
import torch
from ckpt.cli import app

def command(*arguments):
    code = app([*map(str, arguments)], standalone_mode=False)
    assert code in (None, 0), (arguments, code)

source, out = sys.argv[1], "work"
layout = ckpt.layout_for(source)
tensors = ckpt.load_hf(source, layout, check=True)
optimizer = {name: {"exp_avg": tensor.clone(), "step": torch.tensor(1.0)} for name, tensor in tensors.items()}
for step in (1, 2):
    saving = ckpt.save_training(f"{out}/run", step, tensors, layout, optimizer=optimizer, asynchronous=True)
    saving.wait()
state = ckpt.load_training(f"{out}/run", layout, check=True)
ckpt.restore_rng(state.rng)
assert state.step == 2 and all((state.tensors[name] == tensor).all() for name, tensor in tensors.items())
settings = {"base_model_name_or_path": source, "lora_alpha": 2}
adapter = ckpt.AdapterLayout(layout, ["model.layers.0.mlp.up_proj"], 2, settings)
factors = {name: torch.randn(block.shape) for name, block in adapter.at(ckpt.Place()).items()}
ckpt.save_adapter(f"{out}/adapter", factors, adapter)
torch.save(dict(ckpt.stream_hf(tensors, layout)), f"{out}/pickled/pytorch_model.bin")
for shown in (source, f"{out}/run", f"{out}/adapter"):
    command("inspect", shown, "--check")
command("plan", source, "--tp", 2)
command("shard", source, f"{out}/sharded", "--tp", 2)
command("reshard", f"{out}/sharded", f"{out}/other", "--pp", 2, "--target", "megatron")
command("merge", f"{out}/other", f"{out}/merged")
command("verify", source, f"{out}/merged")
command("merge", f"{out}/adapter", f"{out}/with-adapter")
command("convert", f"{out}/pickled", f"{out}/converted", "--format", "fp8")
command("convert", f"{out}/converted", f"{out}/plain", "--dtype", "float32")
"""


def check(source: Path, out: Path) -> None:
    saved, original = load_hf(out, layout_for(out)), load_hf(source, layout_for(source))
    assert all((saved[name] == tensor.bfloat16() / 2).all() for name, tensor in original.items())
    assert (out / "generation_config.json").is_file()


def run_program(group: ProcessGroup, *arguments: str) -> None:
    """Run the program on ranks that have their default process group already."""
    kept = {"init_process_group": lambda backend: None, "destroy_process_group": lambda: None}
    with mock.patch.object(sys, "argv", ["halve.py", *arguments]), mock.patch.multiple(dist, **kept):
        exec(compile(PROGRAM, "README.md", "exec"), {"__name__": "__main__"})


def test_the_program_runs(ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    ranks.run(run_program, str(source), str(out))
    check(source, out)


@pytest.mark.slow
def test_the_program_runs_on_two_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "halve.py").write_text(PROGRAM)
    source, out = checkpoint("llama"), tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "halve.py"]
    done = subprocess.run(
        [*command, str(source), str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check(source, out)


@pytest.mark.slow  # the wheel's test runs the README's program with these alone
def test_torch_and_safetensors_are_enough(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The program and the commands run in a process that cannot import numpy."""
    source, ours = checkpoint("llama"), tmp_path / "ours"
    save_hf(ours, load_hf(source, layout_for(source)), layout_for(source), copy_from=source)
    (tmp_path / "work" / "pickled").mkdir(parents=True)
    shutil.copyfile(source / "config.json", tmp_path / "work" / "pickled" / "config.json")
    program = "import sys\nsys.modules['numpy'] = None\n" + PROGRAM + JOB
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(ours), str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | ranks | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check(source, tmp_path / "out")
