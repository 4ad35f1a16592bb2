"""`for_inference`: a trained model's linears as inference runs them, without a copy of any weight."""

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel_layers.overlap import why_not_symmetric_memory
from parallel_layers.shared_weights import Model, view_of

Column = ColumnParallelLinear | MergedColumnParallelLinear | QKVParallelLinear
Linear = Column | RowParallelLinear
BACKENDS = ("symmetric-memory", "collectives")


def available_linear_backends(group: ProcessGroup | None, device: torch.device | str) -> tuple[str, ...]:
    """How the linears of `group` can gather and scatter tokens in inference on `device`, the preferred first.

    "symmetric-memory": the product overlaps with the gather or scatter (NVLink, no multicast needed). "collectives": as
    in training. Every rank of the group has to ask; all get the same answer.
    """
    return BACKENDS if why_not_symmetric_memory(group, torch.device(device)) is None else BACKENDS[1:]


def for_inference(model: Model, *, backend: str = "auto", reduce_dtype: torch.dtype | None = None) -> Model:
    """The same model for inference, with the same parameters.

    Under sequence parallelism a column-parallel layer multiplies the tokens of one rank while it copies those of the
    next, and a row-parallel one sends the sums of one while it multiplies the next, where the GPUs can
    (`available_linear_backends`): `overlap="symmetric-memory"`, for any number of tokens. Everything else is computed
    bitwise as in training: layers without sequence parallelism, other backends, and calls that do not fit (no tokens;
    an output or sums in a wider dtype than the input's).

        fast = for_inference(model)
        with torch.no_grad():
            logits = fast(...)

    The result is a view (`views.view_of`), in evaluation mode: its parameters are the very ones of `model`, which is
    not changed.

    An overlapping row-parallel product rounds each rank's part to the input's dtype before it sums them (in fp32), so
    a bf16 layer takes it only with `reduce_dtype=torch.bfloat16`: its default are sums of fp32 parts.

    Every rank has to call it. Communication: `why_not_symmetric_memory`'s, once for each group.

    Args:
        model: Any module.
        backend: "auto", or one that must be taken: "symmetric-memory" or "collectives". Each linear says in
            `inference_backend` which it got.
        reduce_dtype: In the place of the linears' own; None: as in training.

    Returns:
        A view of the model.

    Raises:
        ValueError: The backend is unknown, or a group of the model cannot use it (says why).
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto' or one of {', '.join(BACKENDS)}")
    chosen: dict[ProcessGroup | None, str] = {None: "collectives"}
    for module in model.modules():
        if isinstance(module, Linear) and (group := _group_of(module)) not in chosen:
            chosen[group] = _choose(backend, group, next(model.parameters()).device)

    def change(module: nn.Module, view: nn.Module) -> None:
        own = view.__dict__
        own["training"] = False
        if not isinstance(view, Linear):
            return
        if reduce_dtype is not None:
            own["reduce_dtype"] = reduce_dtype
        if "forward" in own:  # a view already, of in FP8
            own.setdefault("inference_backend", "collectives")
            return
        own["inference_backend"] = chosen[_group_of(view)]
        if own["inference_backend"] == "symmetric-memory":
            own["overlap"] = "symmetric-memory"

    return view_of(model, change)


def _choose(backend: str, group: ProcessGroup | None, device: torch.device) -> str:
    if backend == "collectives":
        return backend
    reason = why_not_symmetric_memory(group, device)
    if reason is not None and backend != "auto":
        raise ValueError(f"backend={backend!r} cannot be used: {reason}; use 'auto' or 'collectives'")
    return BACKENDS[0] if reason is None else BACKENDS[1]


def _group_of(layer: Linear) -> ProcessGroup | None:
    """The group over which the layer gathers or scatters tokens."""
    return layer.group if layer.sequence_parallel and async_collectives.is_sharded(layer.group) else None
