"""The parts of torch that take a second or more to import, and the grids that need them."""

from __future__ import annotations

from parallel_layers import ParallelDims


def slow_imports(dims: ParallelDims, *, saves: bool = False) -> list[str]:
    """Return the modules that the ranks of a grid import; the server that forks the ranks imports them once.

    `saves`: the ranks write training checkpoints.
    """
    needed = {
        # torch imports torch._dynamo at the first operator written in Python, or the first optimizer.
        "torch._dynamo": True,
        "torch.distributed.fsdp": dims.dp * dims.cp > 1,
        "torch.distributed.pipelining": dims.pp > 1,
        "torch.distributed.checkpoint": saves,
    }
    return [name for name, needs in needed.items() if needs]
