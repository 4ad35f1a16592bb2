"""Cut tensors into equal parts, and join the parts. No gradient crosses the ranks here; see `collectives`."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives


def split_last_dim(x: Tensor, parts: int, *, contiguous: bool = False) -> tuple[Tensor, ...]:
    """Cut the last dim into `parts` equal parts: views of `x` or, with `contiguous`, tensors in memory of their own.

    Raises:
        ValueError: The last dim does not divide.
    """
    if parts < 1 or x.shape[-1] % parts:
        raise ValueError(f"the last dim of shape {tuple(x.shape)} cannot be cut into {parts} equal parts")
    views = x.split(x.shape[-1] // parts, -1) if x.shape[-1] else (x,) * parts
    return tuple(view.contiguous() for view in views) if contiguous else views


def flat_chunk(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Copy this rank's equal 1-D chunk `[numel / tp]` of a tensor that is the same on all ranks.

    Raises:
        ValueError: The number of elements does not divide by the group's size.
    """
    return x.reshape(-1).clone() if group is None else async_collectives.split(x.reshape(-1), group)


def gather_flat(chunk: Tensor, group: ProcessGroup | None) -> Tensor:
    """Join the ranks' 1-D chunks of one size, in order of rank: `[tp * n]`. Communication: an all-gather."""
    return chunk if group is None or group.size() == 1 else async_collectives.all_gather(chunk, group)
