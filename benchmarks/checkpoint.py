"""Loading and saving checkpoints: bytes, rates and memory, ours beside a plain pread or write and beside other loaders.

    python benchmarks/checkpoint.py                 # about 4 GB in a temporary folder
    python benchmarks/checkpoint.py --gb 1 --json

Every measurement runs in a process of its own with a warm page cache. Rates are medians of alternating rounds, and each
ratio compares neighbours of one round. Peak memory is the high-water mark over what the process held before and what it
loaded.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ckpt import Checkpoint, Place, layout_for, load_hf, save_hf

MIB = 1 << 20
BLOCK = 64 * MIB


def config_of(gb: float) -> dict[str, Any]:
    """A Llama of about `gb` GB in bfloat16, with layers half as wide as those of a model of 8 billion parameters."""
    layer = 2 * (2048 * 2048 * 2.5 + 3 * 2048 * 7168)
    ends = 2 * 2 * 128256 * 2048
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": max(1, round((gb * 1e9 - ends) / layer)),
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def make(folder: Path, gb: float) -> None:
    """Write the checkpoint with random values."""
    layout = layout_for(config_of(gb))
    values = torch.randn(BLOCK // 2).bfloat16()
    tensors = {}
    for name, block in layout.at(Place()).items():
        numel = math.prod(block.shape)
        repeats = -(-numel // values.numel())
        tensors[name] = values.repeat(repeats)[:numel].view(block.shape) if repeats else values[:0]
    save_hf(folder, tensors, layout, max_shard_size="2GB")


def status(field: str) -> int:
    """A memory figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def alternate(ours: Callable[[], Any], plain: Callable[[], Any], rounds: int) -> list[tuple[float, float]]:
    """Seconds of both in each round; who goes first changes from round to round."""
    pairs = []
    for index in range(rounds):
        if index % 2:
            first = seconds(ours)
            pairs.append((first, seconds(plain)))
        else:
            first = seconds(plain)
            pairs.append((seconds(ours), first))
    return pairs


def plain_read(folder: Path, total: int) -> None:
    """Read `total` bytes with large preads into fresh memory, as loading must."""
    memory = memoryview(torch.empty(total, dtype=torch.uint8).numpy()).cast("B")
    done = 0
    for file in sorted(folder.glob("*.safetensors")):
        fd = os.open(file, os.O_RDONLY)
        size, offset = os.fstat(fd).st_size, 0
        while offset < size and done < total:
            got = os.preadv(fd, [memory[done : done + min(BLOCK, size - offset)]], offset)
            offset, done = offset + got, done + got
        os.close(fd)


def plain_write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors one after another into one file, then sync the file and its folder."""
    folder.mkdir()
    fd = os.open(folder / "plain", os.O_CREAT | os.O_WRONLY)
    for tensor in tensors.values():
        data = memoryview(tensor.view(torch.uint8).reshape(-1).numpy()).cast("B")
        for start in range(0, len(data), BLOCK):
            os.write(fd, data[start : start + BLOCK])
    os.fsync(fd)
    os.close(fd)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def measure_load(folder: Path, tp: int, rank: int, rounds: int, threads: int) -> dict[str, Any]:
    layout, place = layout_for(folder), Place(tp=(rank, tp))
    largest = max(math.prod(block.shape) * 2 for block in layout.at(place).values())
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    reads: list[int] = []
    with mock.patch("os.preadv", side_effect=lambda *args, read=os.preadv: reads.append(read(*args)) or reads[-1]):
        tensors = load_hf(folder, layout, place, threads=threads)
    held = nbytes(tensors)
    extra = status("VmHWM") - before - held
    del tensors
    pairs = alternate(lambda: load_hf(folder, layout, place, threads=threads), lambda: plain_read(folder, held), rounds)
    return {
        "bytes_held": held,
        "read_over_held": sum(reads) / held,
        "gb_per_second": held / statistics.median(ours for ours, _ in pairs) / 1e9,
        "over_pread": statistics.median(plain / ours for ours, plain in pairs),
        "peak_extra_mib": extra / MIB,
        "extra_limit_mib": 1.25 * largest / MIB + 64,
    }


def measure_save(folder: Path, rounds: int) -> dict[str, Any]:
    layout = layout_for(folder)
    tensors = load_hf(folder, layout)
    held = nbytes(tensors)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        count = iter(range(2 * rounds))
        # Every write goes to a folder of its own, so that neither pays for removing the other's files.
        pairs = alternate(
            lambda: save_hf(Path(scratch) / str(next(count)), tensors, layout),
            lambda: plain_write(Path(scratch) / str(next(count)), tensors),
            rounds,
        )
    return {
        "bytes_held": held,
        "gb_per_second": held / statistics.median(ours for ours, _ in pairs) / 1e9,
        "over_write": statistics.median(plain / ours for ours, plain in pairs),
    }


def measure_peer(folder: Path, name: str, rounds: int, threads: int) -> dict[str, Any]:
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    times = [seconds(lambda: PEERS[name](folder, threads)) for _ in range(rounds)]
    return {"seconds": statistics.median(times), "peak_mib": (status("VmHWM") - before) / MIB}


def load_ours(folder: Path, threads: int) -> None:
    load_hf(folder, layout_for(folder), threads=threads)


def load_transformers(folder: Path, _threads: int) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    # It maps the files and reads a page when it is first touched: touch them all, as the first forward would.
    for parameter in model.parameters():
        parameter.detach().view(torch.uint8).reshape(-1)[::4096].max()


def load_torch(folder: Path, _threads: int) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = Checkpoint.open(folder).tensors
    state = {name: torch.empty(info.shape, dtype=info.dtype) for name, (_, info) in tensors.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


PEERS: dict[str, Callable[[Path, int], None]] = {
    "ckpt.load_hf": load_ours,
    "transformers.from_pretrained": load_transformers,
    "torch.distributed.checkpoint": load_torch,
}


def in_own_process(folder: Path, threads: int, *args: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--folder", str(folder), "--threads", str(threads), "--measure", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(args)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=4, help="how many threads of load_hf read at once")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder unless given")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        kind, *rest = options.measure
        if kind == "load":
            result = measure_load(options.folder, int(rest[0]), int(rest[1]), int(rest[2]), options.threads)
        elif kind == "save":
            result = measure_save(options.folder, int(rest[0]))
        else:
            result = measure_peer(options.folder, rest[0], int(rest[1]), options.threads)
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "model"
        make(folder, options.gb)
        rounds = str(options.rounds)
        loads = {
            f"tp {tp}, rank {tp - 1}": in_own_process(folder, options.threads, "load", str(tp), str(tp - 1), rounds)
            for tp in (1, 2, 4, 8)
        }
        save = in_own_process(folder, options.threads, "save", rounds)
        peers = {name: in_own_process(folder, options.threads, "peer", name, rounds) for name in PEERS}
    report = {"machine": platform.processor() or platform.machine(), "loads": loads, "save": save, "peers": peers}
    print(json.dumps(report, indent=2) if options.json else markdown(report))


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "| load | GB | GB/s | of pread | bytes read / held | peak extra MiB | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["loads"].items():
        lines.append(
            f"| {name} | {row['bytes_held'] / 1e9:.2f} | {row['gb_per_second']:.2f} | {row['over_pread']:.2f} "
            f"| {row['read_over_held']:.3f} | {row['peak_extra_mib']:.0f} | {row['extra_limit_mib']:.0f} |"
        )
    save = report["save"]
    lines += ["", "| save | GB | GB/s | of a plain write |", "|---|---|---|---|"]
    lines.append(f"| tp 1 | {save['bytes_held'] / 1e9:.2f} | {save['gb_per_second']:.2f} | {save['over_write']:.2f} |")
    lines += ["", "| whole model | seconds | peak MiB |", "|---|---|---|"]
    lines += [f"| {name} | {row['seconds']:.2f} | {row['peak_mib']:.0f} |" for name, row in report["peers"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
