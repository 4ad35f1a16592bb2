"""What of torch takes a second or more to import, and who needs it."""

from __future__ import annotations

from parallel_layers import ParallelDims


def slow_imports(dims: ParallelDims, *, saves: bool = False) -> list[str]:
    """The modules that ranks of a grid will import, so that the server that forks them can do so once for all.

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
