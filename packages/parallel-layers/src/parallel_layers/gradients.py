"""The gradient norm of a model that is spread over ranks, with every parameter counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.sharding import Sharding, get_sharding, is_dtensor


@torch.no_grad()
def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    *,
    groups: Sequence[ProcessGroup | None] = (),
    pipeline_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that the whole model's gradient has at most the 2-norm `max_norm`.

    It takes modules, not parameters, because the modules know what is divided (`parallel_layers.sharding`); parameter
    objects forget it when FSDP2 or `to_empty` replaces them. A parameter that is divided over one of `groups` counts
    with all its parts, a KV head on several ranks once. Any other parameter is taken to be the same on all ranks of
    `groups` and counts once. Gradients that FSDP2 has sharded along dim 0 are summed over its mesh.

    Args:
        modules: The model, or the pipeline stages' modules that this rank holds.
        max_norm: The largest norm to leave as it is; `math.inf` only measures.
        groups: Every group over which layers are divided (tensor parallel, expert parallel). None entries are left out.
        pipeline_group: The group of ranks that hold other layers; their norms are added.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor, the same on every rank. On CUDA nothing waits for it.

    Communication: one all-reduce of a number for each of `groups`, the pipeline group, and each FSDP mesh dim.

    Raises:
        ValueError: A parameter is divided over a group that is not in `groups`.
    """
    layered = [group for group in groups if group is not None]
    # Squares that must still be summed over the same FSDP groups, keyed by these groups' names.
    squares: dict[tuple[str, ...], tuple[list[ProcessGroup], Tensor]] = {}
    gradients: list[Tensor] = []
    for owner, name, parameter in _parameters(modules):
        shardings = get_sharding(owner, name)
        _check_groups(name, owner, shardings, layered)
        gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
        data_groups = _shard_groups(parameter)
        device = parameter.device
        key = tuple(group.group_name for group in data_groups)
        _, total = squares.setdefault(key, (data_groups, torch.zeros((), dtype=torch.float32, device=device)))
        if gradient is None:
            continue
        local = gradient.to_local() if is_dtensor(gradient) else gradient
        gradients.append(local)
        if _counts_here(shardings, layered):
            for piece in _counted(gradient, local, shardings):
                total += torch.linalg.vector_norm(piece, dtype=torch.float32).square()
    if not squares:
        return torch.zeros(())
    for data_groups, total in squares.values():
        for group in data_groups:
            dist.all_reduce(total, group=group)
    norm = torch.stack([total for _, total in squares.values()]).sum()
    for group in [*layered, *([pipeline_group] if pipeline_group is not None else [])]:
        dist.all_reduce(norm, group=group)
    norm = norm.sqrt()
    # A non-finite norm makes every gradient non-finite: the caller sees it in the norm and can drop the step.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _parameters(modules: nn.Module | Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every trainable parameter once, with the module that owns it."""
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    found: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for root in roots:
        if not isinstance(root, nn.Module):
            raise ValueError(
                f"clip_grad_norm_ takes modules, got {type(root).__name__}; pass the model itself, "
                "which knows how its parameters are divided"
            )
        for owner in root.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                # Of a tied parameter the owner that knows how it is divided counts.
                if parameter.requires_grad and (id(parameter) not in found or get_sharding(owner, name)):
                    found[id(parameter)] = (owner, name, parameter)
    return list(found.values())


def _check_groups(name: str, owner: nn.Module, shardings: Sequence[Sharding], groups: list[ProcessGroup]) -> None:
    names = {group.group_name for group in groups}
    for sharding in shardings:
        if sharding.group is not None and sharding.group.size() > 1 and sharding.group.group_name not in names:
            raise ValueError(
                f"parameter {name!r} of {type(owner).__name__} is divided over {sharding.group.size()} ranks whose "
                "group is not among the groups; pass it in groups=[...]"
            )


def _counts_here(shardings: Sequence[Sharding], groups: list[ProcessGroup]) -> bool:
    """Whether this rank counts a parameter: of ranks that hold the same, the first."""
    divided = {sharding.group.group_name for sharding in shardings if sharding.group is not None}
    return all(group.rank() == 0 for group in groups if group.group_name not in divided)


def _counted(gradient: Tensor, local: Tensor, shardings: Sequence[Sharding]) -> list[Tensor]:
    """The pieces of a local gradient that this rank counts."""
    pieces = [local]
    for sharding in shardings:
        # FSDP2 leaves a run of rows: of dim 0 only what lies in it is at hand.
        first = _first_row(gradient) if sharding.dim == 0 else 0
        size = local.shape[sharding.dim]
        ranges = [
            (max(offset - first, 0), min(offset + block.stop - block.start - first, size))
            for offset, block in sharding.local_ranges()
            if block.counted
        ]
        pieces = [
            piece.narrow(sharding.dim, start, stop - start)
            for piece in pieces
            for start, stop in ranges
            if stop > start
        ]
    return pieces


def _first_row(gradient: Tensor) -> int:
    """The index of the first row that FSDP2 has left on this rank."""
    if not is_dtensor(gradient):
        return 0
    first, rows = 0, gradient.shape[0]
    for axis, placement in enumerate(gradient.placements):
        if placement.is_shard():
            if not placement.is_shard(0):
                raise ValueError(f"gradients must be sharded along dim 0, got {placement}")
            chunk = -(-rows // gradient.device_mesh.size(axis))
            start = min(gradient.device_mesh.get_local_rank(axis) * chunk, rows)
            first, rows = first + start, min(chunk, rows - start)
    return first


def _shard_groups(parameter: Tensor) -> list[ProcessGroup]:
    if not is_dtensor(parameter):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if placement.is_shard() and mesh.size(axis) > 1
    ]
