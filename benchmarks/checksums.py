"""The cost of checksums on the CPU: saves with and without recording them, loads with and without comparing bytes.

    python benchmarks/checksums.py                 # 2 GB in a temporary folder
    python benchmarks/checksums.py --gb 1 --rounds 3

Both sides of a row alternate, in one process, with a warm page cache. Each cell has the median seconds on the clock,
and the median seconds of all cores together, which other programs on the machine disturb less. Each save goes to a
folder of its own and ends with the files synced.
"""

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoint import config_of

import ckpt
from ckpt import Grid, Place
from ckpt.files import sync_and_sum


def without() -> contextlib.AbstractContextManager[object]:
    """Let saves sync their files and record zeros."""
    stack = contextlib.ExitStack()

    def sync(folder: Path, files: Any, tensors: Any) -> dict[str, str]:
        sync_and_sum(folder, files, {})
        return dict.fromkeys(tensors, "0" * 8)

    for module in ("ckpt.files.written_files", "ckpt.transfer.save"):
        stack.enter_context(mock.patch(f"{module}.sync_and_sum", sync))
    return stack


Times = list[tuple[float, float]]


def measure(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of all cores together."""
    clock, cores = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - clock, time.process_time() - cores


def compare(plain: Callable[[], object], checked: Callable[[], object], rounds: int) -> tuple[Times, Times]:
    """Times without and with checksums, after a round that is not counted; the order changes each round."""
    times: tuple[Times, Times] = ([], [])
    for index in range(rounds + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            times[side].append(measure((plain, checked)[side]))
    return times[0][1:], times[1][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint in GB (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each row (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    layout = ckpt.layout_for(config_of(options.gb))
    tensors = {name: torch.randn(block.shape, dtype=torch.bfloat16) for name, block in layout.at(Place()).items()}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch)
        ckpt.save_hf(root / "hf", tensors, layout)
        ckpt.save_training(root / "run", 1, tensors, layout)
        ckpt.reshard(root / "hf", root / "shards", Grid())

        def save(kind: Callable[[Path], object]) -> Callable[[], None]:
            def run() -> None:
                kind(root / "new")
                shutil.rmtree(root / "new")

            return run

        saves: dict[str, Callable[[Path], object]] = {
            "save_hf": lambda out: ckpt.save_hf(out, tensors, layout),
            "save_training": lambda out: ckpt.save_training(out, 1, tensors, layout),
            "reshard": lambda out: ckpt.reshard(root / "hf", out, Grid()),
        }
        loads: dict[str, Callable[[bool], object]] = {
            "load_hf": lambda check: ckpt.load_hf(root / "hf", layout, check=check),
            "load_training": lambda check: ckpt.load_training(root / "run", layout, check=check),
            "load_hf, sharded": lambda check: ckpt.load_hf(root / "shards", layout, check=check),
        }
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        print(f"{date.today()}, {nbytes / 1e9:.2f} GB, {torch.get_num_threads()} cores, torch {torch.__version__}:\n")
        print("| call | without: s, core s | with checksums: s, core s | cost: s, core s |\n|---|---|---|---|")
        for name, kind in saves.items():
            checked = save(kind)

            def plain(checked: Callable[[], None] = checked) -> None:
                with without():
                    checked()

            row(name, *compare(plain, checked, options.rounds))
        for name, load in loads.items():
            row(
                f"{name}(check=True)",
                *compare(lambda load=load: load(False), lambda load=load: load(True), options.rounds),
            )


def row(name: str, plain: Times, checked: Times) -> None:
    medians = [[statistics.median(times) for times in zip(*side, strict=True)] for side in (plain, checked)]
    extra = [100 * (after / before - 1) for before, after in zip(*medians, strict=True)]
    cells = [", ".join(f"{value:.2f}" for value in side) for side in medians]
    print(f"| {name} | {cells[0]} | {cells[1]} | {extra[0]:+.0f} %, {extra[1]:+.0f} % |", flush=True)


if __name__ == "__main__":
    main()
