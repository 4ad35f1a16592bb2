"""The parts of torch that take a second or more to import, and the grids that need them."""

from __future__ import annotations

from parallel_layers import ParallelDims


def slow_imports(dims: ParallelDims, *, saves: bool = False) -> list[str]:
    """Return the modules that ranks of a grid will import; the server that forks the ranks imports them once for all.

    `saves`: they write training checkpoints.
    """
    needed = {
        # torch imports it when a process first calls an operator written in Python, or makes an optimizer.
        "torch._dynamo": True,
        "torch.distributed.fsdp": dims.dp * dims.cp > 1,
        "torch.distributed.pipelining": dims.pp > 1,
        "torch.distributed.checkpoint": saves,
    }
    return [name for name, needs in needed.items() if needs]
