"""List the lines of Megatron-Core that read its global state in training, and in saving and loading checkpoints.

`python core_reads.py` prints them for the installed version as one line of JSON; with `--record` it writes them to
`core_reads.json`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import multiprocessing
import os
import sys
import tempfile
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
WORLD = 4
_STATE = "megatron.core.parallel_state"
# Sizes of a grid, options of a run, and the family of the model.
CASES: list[tuple[dict[str, int], dict[str, Any], str]] = [
    ({"tp": 2, "dp": 2}, {"distributed": True}, "qwen3"),
    ({"pp": 2, "cp": 2}, {}, "qwen3"),
    ({"tp": 2, "pp": 2}, {"virtual_stages": 2}, "qwen2"),
    ({"dp": 4, "ep": 2}, {"distributed": True}, "qwen3_moe"),
    ({"tp": 2, "dp": 2, "ep": 2}, {}, "deepseek_v3"),
    ({"tp": 2, "dp": 2}, {}, "olmo2"),
]


class _Watched(MetaPathFinder, Loader):
    """Import `parallel_state` with every getter noting the line that calls it."""

    def __init__(self, lines: set[str]) -> None:
        self.lines = lines
        self.loader: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _STATE:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        self.loader.exec_module(module)
        for name, value in list(vars(module).items()):
            if (
                name.startswith(("get_", "is_"))
                and isinstance(value, types.FunctionType)
                and value.__module__ == _STATE
            ):
                setattr(module, name, self.watched(value))

    def watched(self, getter: Any) -> Any:
        @functools.wraps(getter)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            file = frame.f_code.co_filename
            if file.endswith("/parallel_state.py") or "/megatron" not in file:
                return getter(*args, **kwargs)
            label = file[file.rindex("/megatron") + 1 :]
            line = f":{frame.f_lineno}" if label.startswith("megatron/") else ""  # our own lines move
            self.lines.add(f"{label}{line} {getter.__name__}")
            return getter(*args, **kwargs)

        return call


def _train(dims: dict[str, int], options: dict[str, Any], family: str, root: str) -> None:
    import torch

    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import load_checkpoint, save_checkpoint
    from megatron_utils.gpt import build_gpt
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in, tiny_config
    from parallel_layers import PackedSequence, ParallelDims, next_token_labels

    virtual, distributed = options.get("virtual_stages"), options.get("distributed", False)
    with cpu_stand_in(), megatron_grid(ParallelDims(**dims), virtual_stages=virtual, seed=0) as grid:
        chunks = build_gpt(tiny_config(family), grid)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.data.normal_(0, 0.1)
        model = wrap_data_parallel(chunks, grid, distributed=distributed)
        optimizer = Optimizer(model, grid, OptimizerConfig(lr=1e-2, distributed=distributed))
        batches = [PackedSequence.from_sequences([torch.arange(n) for n in (9, 7)])] * 2
        optimizer.zero_grad()
        labels = [next_token_labels(batch) for batch in batches]
        run_schedule(model, batches, grid, labels=labels, loss=lambda output, _: -output.log_probs.sum())
        optimizer.step()
        save_checkpoint(root, 1, optimizer, grid)
        load_checkpoint(root, optimizer, grid)


def _rank(rank: int, folder: str, results: Any) -> None:
    lines: set[str] = set()
    sys.meta_path.insert(0, _Watched(lines))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for number, case in enumerate(CASES):
        _train(*case, f"{folder}/{number}")
    dist.barrier()
    dist.destroy_process_group()
    results.put(sorted(lines))


def core_reads() -> list[str]:
    """Return `file:line getter` of every read by Megatron-Core, and `file getter` by this package, over all cases."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, results)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(300)
            codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return sorted({line for _ in ranks for line in results.get()})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    reads, version = core_reads(), importlib.metadata.version("megatron-core")
    print(json.dumps(reads))
    if "--record" in sys.argv:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps(dict(sorted({**record, version: reads}.items())), indent=1) + "\n")
