"""Sequence parallelism by Megatron's rule: mark replicated parameters that see only a part of the tokens.

Under sequence parallelism the norms between two blocks run on `[T / tp, H]`, so the gradient of a norm's weight on each
rank is a part of the sum. Megatron marks such parameters with the attribute `sequence_parallel` and completes their
gradients by one all-reduce per step. `finalize_model_grads` does this for models of `build_gpt`; these functions do it
for other models, and for gradients outside Megatron's buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F


def mark_sequence_parallel(parameters: Iterable[nn.Parameter], *, marked: bool = True) -> None:
    """Mark parameters that see a part of the tokens on each rank, or remove the mark."""
    for parameter in parameters:
        parameter.sequence_parallel = marked  # type: ignore[attr-defined]


def is_sequence_parallel(parameter: Tensor) -> bool:
    """Return whether a parameter is marked."""
    return bool(getattr(parameter, "sequence_parallel", False))


def sequence_parallel_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the marked parameters of a module with their names, each once."""
    return ((name, parameter) for name, parameter in module.named_parameters() if is_sequence_parallel(parameter))


def pad_to_group(x: Tensor, group_size: int, *, dim: int = 0, value: float = 0.0) -> Tensor:
    """Pad one dim of a tensor at its end, up to a multiple of `group_size`; `unpad` removes the padding.

    Gradients of the padding are dropped.

    Raises:
        ValueError: `group_size` is below 1, or `x` has no such dim.
    """
    _check(x, group_size, dim)
    missing = -x.shape[dim] % group_size
    if missing == 0:
        return x
    after = x.dim() - 1 - dim % x.dim()
    return F.pad(x, [0, 0] * after + [0, missing], value=value)


def unpad(x: Tensor, size: int, *, dim: int = 0) -> Tensor:
    """Return the first `size` entries of one dim, which reverts `pad_to_group`.

    Raises:
        ValueError: `x` has fewer entries, or no such dim.
    """
    _check(x, 1, dim)
    if not 0 <= size <= x.shape[dim]:
        raise ValueError(f"size={size} is outside 0..{x.shape[dim]}, the size of dim {dim}")
    return x.narrow(dim, 0, size)


def all_reduce_gradients(module: nn.Module, group: ProcessGroup | None) -> int:
    """Sum the gradients of the marked parameters over the tensor-parallel group, in place, once per step.

    One all-reduce per dtype covers all gradients of that dtype. The gradient is Megatron's `main_grad` if it exists,
    else `.grad`. Parameters without a gradient are skipped; they must be the same on every rank.

    Returns:
        The number of reduced gradients.

    Raises:
        ValueError: `group` is neither a process group nor None.
    """
    if not isinstance(group, ProcessGroup | None):
        raise ValueError(f"group={group!r} must be a torch.distributed.ProcessGroup, such as grid.tp, or None")
    if group is None or group.size() == 1:
        return 0
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, parameter in sequence_parallel_parameters(module):
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return sum(map(len, by_dtype.values()))


def _check(x: Tensor, group_size: int, dim: int) -> None:
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} is not a dim of a tensor of shape {list(x.shape)}")
