"""Send a batch from one rank to its group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.sharding import is_dtensor

# Tensors start at multiples of this many bytes in the common buffer, so that it can be viewed as any dtype.
_ALIGNMENT = 16
# torch has no kernel that copies tensors of these dtypes.
_PART_BYTES = frozenset(getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8))


def broadcast_data(
    data: Mapping[str, Tensor] | None,
    group: ProcessGroup | None,
    *,
    source: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return the source's tensors on every rank of the group; tensors may have any dtypes and shapes.

    Args:
        data: Tensors by name; read on the source only.
        group: The ranks; None returns copies of the tensors.
        source: The source's rank in `group`; 0 without a group.
        device: The device of the results and of the communication. Default: CUDA's current device for an `nccl` group,
            else the CPU. The source's tensors may be on other devices.

    Returns:
        New tensors by name, in the source's order, without gradient.

    Communication: three broadcasts: the size of a header, the header (JSON with names, dtypes and shapes), and one
    buffer with all tensors.

    Raises:
        ValueError: The source's data is no mapping of strings to dense tensors, or `source` is no rank of the group;
            on every rank.
    """
    size = 1 if group is None else group.size()
    if not 0 <= source < size:
        raise ValueError(f"broadcast_data: source={source} is no rank of the group, which has 0..{size - 1}")
    if device is None:
        on_cuda = group is not None and dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    if group is None:
        header, tensors = _describe(data)
        _check(header)
        return {name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}
    is_source = group.rank() == source
    header, tensors = _describe(data) if is_source else ({}, {})
    encoded = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([encoded.numel()], device=device)
    dist.broadcast(length, group=group, group_src=source)
    if not is_source:
        encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(encoded, group=group, group_src=source)
    header = json.loads(bytes(encoded.tolist()))
    _check(header)
    buffer = torch.empty(sum(_padded(nbytes) for *_, nbytes in header["tensors"]), dtype=torch.uint8, device=device)
    results = {}
    offset = 0
    for name, dtype, shape, nbytes in header["tensors"]:
        part = buffer[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
        results[name] = part.copy_(tensors[name].detach()) if is_source else part
        offset += _padded(nbytes)
    if buffer.numel():
        dist.broadcast(buffer, group=group, group_src=source)
    return results


def _describe(data: Mapping[str, Tensor] | None) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the header and the tensors. Mistakes go into the header, because the other ranks wait for it."""
    if data is None:
        return {"error": "the source was given data=None"}, {}
    if not isinstance(data, Mapping):
        return {"error": f"data must be a mapping of names to tensors, the source's is a {type(data).__name__}"}, {}
    wrong = {str(name): found for name, value in data.items() if (found := _why_not_sent(name, value))}
    if wrong:
        return {"error": f"data must hold dense tensors by name, the source's holds {wrong}"}, {}
    tensors = [
        (n, str(t.dtype).removeprefix("torch."), list(t.shape), t.numel() * t.element_size()) for n, t in data.items()
    ]
    return {"tensors": tensors}, data


def _why_not_sent(name: object, value: object) -> str | None:
    """Return why an entry cannot be sent, or None if it can."""
    if not isinstance(name, str):
        return f"{type(name).__name__} as a name"
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.dtype in _PART_BYTES:
        return f"{value.dtype}, which torch cannot copy; its bytes are value.view(torch.uint8)"
    kinds = {
        "on meta": value.is_meta,
        "quantized": value.is_quantized,
        "a DTensor": is_dtensor(value),
        str(value.layout).removeprefix("torch."): value.layout != torch.strided,
    }
    return next((kind for kind, is_so in kinds.items() if is_so), None)


def _check(header: dict[str, Any]) -> None:
    if "error" in header:
        raise ValueError(f"broadcast_data: {header['error']}")


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
