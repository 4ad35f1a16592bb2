"""Exchange small JSON messages between the ranks of a group, and raise one error on every rank instead of a hang."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ckpt.device import GPU, gpu

T = TypeVar("T")


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in a group; 0 without a group."""
    return 0 if group is None else group.rank()


def group_device(group: ProcessGroup) -> torch.device:
    """Return the device on which a collective of this group takes tensors."""
    return torch.device("cpu") if "gloo" in dist.get_backend(group) else torch.device(GPU, gpu.current_device())


def all_gather_json(message: Any, group: ProcessGroup | None) -> list[Any]:
    """Return every rank's message in rank order; without a group, this process's message alone.

    Messages are JSON values; nothing is pickled.
    """
    if group is None or group.size() == 1:
        return [message]
    device = group_device(group)
    raw = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([raw.numel()], dtype=torch.int64, device=device), group=group)
    sizes = torch.cat(lengths).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    rows = torch.stack(received).cpu()
    return [json.loads(bytes(row[:size].tolist()).decode()) for row, size in zip(rows, sizes, strict=True)]


_KINDS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError, "RuntimeError": RuntimeError}


def require_same(group: ProcessGroup | None, **arguments: object) -> None:
    """Refuse arguments that differ between ranks, where each rank plans files and messages by its own arguments.

    Communication: one small all-gather.
    """
    passed = all_gather_json({name: repr(value) for name, value in arguments.items()}, group)
    for name, value in passed[0].items():
        other = next((rank for rank, entry in enumerate(passed) if entry[name] != value), None)
        if other is not None:
            raise ValueError(
                f"{name} differs between ranks: {value:.200} on rank 0, {passed[other][name]:.200} on rank {other}; "
                "pass the same on every rank"
            )


def described(error: Exception) -> list[str]:
    """Return an error's kind and text as a message for `raise_first`."""
    kind = next((kind for kind in ("OSError", "ValueError") if isinstance(error, _KINDS[kind])), None)
    return ["RuntimeError", f"{type(error).__name__}: {error}"] if kind is None else [kind, str(error)]


def raise_first(error: Exception | None, failures: Sequence[list[str] | None]) -> None:
    """Raise the first failure of a group on every rank of the group, as `agree` says; return if no rank has failed.

    `own` is this rank's error, `failures` has `described` of every rank's error in rank order.
    """
    first = next((rank for rank, entry in enumerate(failures) if entry is not None), None)
    if first is None:
        return
    if error is not None and described(error) == failures[first]:
        raise error
    kind, text = failures[first] or ["RuntimeError", ""]
    raise _KINDS[kind](f"rank {first}: {text}")


def agree(step: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run a step on every rank; if the step fails on any rank, raise the first failure on all ranks.

    No rank goes on to a later collective while another has failed. Communication: one small all-gather after the step.

    Raises:
        ValueError: The first failure is a ValueError; on other ranks the text names the rank.
        OSError: The first failure is an OSError; on other ranks the text names the rank.
        RuntimeError: On other ranks, for any other error; the text names the rank and the kind.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as caught:  # After any error: the other ranks must not wait for this rank.
        error = caught
    if group is None or group.size() == 1:
        if error is not None:
            raise error
    else:
        raise_first(error, all_gather_json(None if error is None else described(error), group))
    return result  # type: ignore[return-value]  # a step that returned is T; one that raised has raised above


def agree_on_first(step: Callable[[], T], group: ProcessGroup | None) -> T | None:
    """Run a step on the first rank alone, and raise its error on all ranks; other ranks get None."""
    return agree(lambda: step() if rank_in(group) == 0 else None, group)
