"""The gradient norm of a sharded model; every parameter counts once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.device.names import GPU
from parallel_layers.distributed.async_collectives import is_sharded
from parallel_layers.module.autocast import wide
from parallel_layers.module.sharding import Sharding, first_row, get_sharding, is_dtensor


@torch.no_grad()
def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    *,
    groups: Sequence[ProcessGroup | None] = (),
    pipeline_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that the 2-norm of the whole model's gradient is at most `max_norm`.

    The squares of a parameter are summed over the groups that it is sharded over, FSDP2's included. So a KV head or a
    parameter that several ranks hold counts once, and experts may be sharded over other ranks than dense layers. The
    function takes modules because they know the sharding (`parallel_layers.module.sharding`).

    Args:
        modules: The model, or the modules of the pipeline stages on this rank.
        max_norm: The largest norm that is left unscaled; `math.inf` only measures.
        groups: Every group over which layers are sharded (tensor parallel, expert parallel). Their ranks get the same
            norm, bit for bit. None entries are ignored.
        pipeline_group: The group of ranks that hold other layers; their norms are added.

    Returns:
        The norm before clipping, the same on every rank: a 0-dim fp32 tensor (fp64 if a parameter is fp64). If the norm
        is not finite, the gradients stay unchanged. On CUDA the host does not wait.

    Raises:
        ValueError: A parameter is sharded over a group that is not in `groups`.
    """
    layered = [group for group in groups if is_sharded(group)]
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    for root in roots:
        if not isinstance(root, nn.Module):
            raise ValueError(
                f"clip_grad_norm_ takes modules, got {type(root).__name__}; pass the model itself, "
                "which knows how its parameters are sharded"
            )
    by_name: dict[str, ProcessGroup] = {}
    classes: dict[frozenset[str], list[Tensor]] = {}
    gradients: list[Tensor] = []
    for owner, name, parameter in _parameters(roots):
        divided = _groups_of(owner, name, parameter, layered)
        by_name |= divided
        # All ranks of a group find the same classes, because parameters without a gradient count, too.
        pieces = classes.setdefault(frozenset(divided), [])
        if (gradient := parameter.grad) is not None:
            local = gradient.to_local() if is_dtensor(gradient) else gradient
            gradients.append(local)
            pieces += _counted(gradient, local, get_sharding(owner, name))
    parameters = [parameter for root in roots for parameter in root.parameters()]
    # A pipeline stage without parameters computes on the device of its group.
    by_nccl = pipeline_group is not None and dist.get_backend(pipeline_group) == "nccl"
    device = parameters[0].device if parameters else torch.device(GPU if by_nccl else "cpu")
    total = _sum_of_squares(classes, by_name, device)
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    for group in layered:
        # Average away last-bit differences between ranks.
        dist.all_reduce(total, group=group)
        total /= group.size()
    has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    norm = total.sqrt().to(torch.float64 if has_double else torch.float32)
    if gradients and max_norm != math.inf:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, torch.where(norm < math.inf, scale, 1.0))
    return norm


def _sum_of_squares(
    classes: Mapping[frozenset[str], list[Tensor]], groups: Mapping[str, ProcessGroup], device: torch.device
) -> Tensor:
    """Return the sum of squares of all classes of pieces; a class is summed over the groups of its key."""
    # Ranks with different dtypes agree on fp64.
    dtype = torch.float64 if device.type in ("cpu", GPU) else torch.float32
    zero = torch.zeros((), dtype=dtype, device=device)
    totals = {
        key: torch.linalg.vector_norm(_norms(pieces), dtype=dtype).square() if pieces else zero
        for key, pieces in classes.items()
    }
    for name, group in groups.items():
        divided = [key for key in totals if name in key]
        together = torch.stack([totals[key] for key in divided])
        dist.all_reduce(together, group=group)
        totals |= zip(divided, together.unbind(), strict=True)
    return torch.stack(list(totals.values())).sum() if totals else zero


def _norms(pieces: Sequence[Tensor]) -> Tensor:
    """Return the norm of each piece in fp32 (fp64 pieces: in fp64)."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for piece in pieces:
        by_dtype.setdefault(wide(piece.dtype), []).append(piece)
    return torch.stack([norm for dtype, group in by_dtype.items() for norm in torch._foreach_norm(group, dtype=dtype)])


def _parameters(roots: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return every trainable parameter once, with its module and name."""
    parameters: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for root in roots:
        for owner in root.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                # Among the owners of a tied parameter, prefer an owner that knows the sharding.
                if parameter.requires_grad and (id(parameter) not in parameters or get_sharding(owner, name)):
                    parameters[id(parameter)] = (owner, name, parameter)
    return list(parameters.values())


def _groups_of(
    owner: nn.Module, name: str, parameter: nn.Parameter, groups: Sequence[ProcessGroup]
) -> dict[str, ProcessGroup]:
    """Return the groups over which a layer and FSDP2 have sharded a parameter, by name."""
    divided = [sharding.group for sharding in get_sharding(owner, name) if is_sharded(sharding.group)]
    for group in divided:
        if group.group_name not in {listed.group_name for listed in groups}:
            raise ValueError(
                f"parameter {name!r} of {type(owner).__name__} is sharded over {group.size()} ranks whose "
                "group is not among the groups; pass it in groups=[...]"
            )
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        divided += [
            mesh.get_group(axis)
            for axis, placement in enumerate(parameter.placements)
            if not placement.is_replicate() and mesh.size(axis) > 1
        ]
    return {group.group_name: group for group in divided}


def _counted(gradient: Tensor, local: Tensor, shardings: Sequence[Sharding]) -> list[Tensor]:
    """Return the pieces of a local gradient that this rank counts."""
    pieces = [local]
    for sharding in shardings:
        # Under FSDP2 the local tensor holds only some rows of dim 0.
        begin = first_row(gradient) if sharding.dim == 0 else 0
        size = local.shape[sharding.dim]
        ranges = [
            (max(offset - begin, 0), min(offset + block.stop - block.start - begin, size))
            for offset, block in sharding.local_ranges()
            if block.counted
        ]
        local_ranges = [(start, stop - start) for start, stop in ranges if stop > start]
        pieces = [piece.narrow(sharding.dim, start, length) for piece in pieces for start, length in local_ranges]
    return pieces
