"""Sending a batch from one rank to its group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Each tensor begins at a multiple of this in the common buffer, so that any dtype can be viewed there.
_ALIGNMENT = 16


def broadcast_data(
    data: Mapping[str, Tensor] | None,
    group: ProcessGroup | None,
    *,
    source: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """The source's tensors on every rank of the group, whatever their dtypes, numbers of dims and sizes.

    Args:
        data: On the source, tensors by name; on the other ranks it is not looked at and may be None.
        group: The ranks; None returns the source's tensors.
        source: The source's rank in `group`.
        device: Where the results lie, and what is sent over: default CUDA's current device for an `nccl` group, else
            the CPU. The source's own tensors may lie elsewhere.

    Returns:
        A dict in the source's order, of tensors that share no memory with the source's.

    Communication: three broadcasts, however many tensors: the size of a header, the header (JSON: names, dtypes,
    shapes; nothing is pickled), and all the tensors in one buffer.

    Raises:
        ValueError: The source was given no data; on every rank alike.
    """
    if device is None:
        on_cuda = group is not None and dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    if group is None:
        header, tensors = _describe(data)
        _check(header)
        return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
    is_source = group.rank() == source
    header, tensors = _describe(data) if is_source else ({}, {})
    encoded = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([encoded.numel()], device=device)
    dist.broadcast(size, group=group, group_src=source)
    if not is_source:
        encoded = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(encoded, group=group, group_src=source)
    header = json.loads(bytes(encoded.tolist()))
    _check(header)
    buffer = torch.empty(sum(_padded(nbytes) for *_, nbytes in header["tensors"]), dtype=torch.uint8, device=device)
    results = {}
    offset = 0
    for name, dtype, shape, nbytes in header["tensors"]:
        part = buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
        results[name] = part.copy_(tensors[name]) if is_source else part
        offset += _padded(nbytes)
    if buffer.numel():
        dist.broadcast(buffer, group=group, group_src=source)
    return results


def _describe(data: Mapping[str, Tensor] | None) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    if data is None:
        return {"error": "the source was given data=None"}, {}
    wrong = {name: type(value).__name__ for name, value in data.items() if not isinstance(value, Tensor)}
    if wrong:
        return {"error": f"data must hold tensors only, the source's holds {wrong}"}, {}
    tensors = [
        (n, str(t.dtype).removeprefix("torch."), list(t.shape), t.numel() * t.element_size()) for n, t in data.items()
    ]
    return {"tensors": tensors}, data


def _check(header: dict[str, Any]) -> None:
    if "error" in header:
        raise ValueError(f"broadcast_data: {header['error']}")


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
