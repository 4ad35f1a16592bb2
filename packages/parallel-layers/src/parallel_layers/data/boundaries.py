"""`check_boundaries`: the check of `cu_seqlens`, for everything that takes a packed batch."""

from itertools import pairwise

import torch
from torch import Tensor


def check_boundaries(
    cu_seqlens: Tensor,
    num_tokens: int,
    max_seqlen: int | None = None,
    *,
    name: str = "cu_seqlens",
    least: int = 1,
    covers: bool = True,
) -> None:
    """Raise ValueError for boundaries that describe no segments of `num_tokens` tokens.

    Values are read on the CPU only: on a GPU the host would wait for the device. Kernels on a GPU trust the boundaries,
    and with wrong ones they return wrong numbers, read outside of the tensors, or end by an assertion on the device.

    Args:
        cu_seqlens: `[S+1]` int32.
        num_tokens: The last boundary; with `covers=False` its upper bound.
        max_seqlen: Upper bound of a segment's length; None skips this check.
        name: The name of the boundaries in errors.
        least: The smallest number of boundaries.
        covers: Whether every token is in a segment.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{name} must be 1-D int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; use {name}.int()"
        )
    if len(cu_seqlens) < least:
        raise ValueError(f"{name} has {len(cu_seqlens)} entries; give at least {least}, for a segment of length 0")
    if not host_reads(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or min(lengths, default=0) < 0 or bounds[-1] > num_tokens or (covers and bounds[-1] < num_tokens):
        raise ValueError(
            f"{name} {bounds!s:.100} must start at 0, never decrease, and end at {'' if covers else 'or before '}the "
            f"{num_tokens} tokens; padding is a last segment"
        )
    if max_seqlen is not None and (longest := max(lengths, default=0)) > max_seqlen:
        limit = name.replace("cu_seqlens", "max_seqlen")
        raise ValueError(
            f"{limit}={max_seqlen} is less than the longest segment, {longest} tokens; pass at least {longest}"
        )


def host_reads(tensor: Tensor) -> bool:
    """Return whether the host may read values for a check: on the CPU, outside of plans and of torch.compile."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and tensor.is_cpu
