"""`for_inference`: a view of a trained model whose linears overlap GEMMs with communication."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel_layers.linear.layers import ColumnLinear, RowParallelLinear
from parallel_layers.linear.products import PlainProduct
from parallel_layers.linear.symmetric_memory import why_not_symmetric_memory
from parallel_layers.shared_weights import Model, view_of

Linear = ColumnLinear | RowParallelLinear
BACKENDS = ("symmetric-memory", "collectives")


def available_linear_backends(group: ProcessGroup | None, device: torch.device | str) -> tuple[str, ...]:
    """Return how the linears of `group` can send tokens in inference on `device`, the preferred way first.

    "symmetric-memory" overlaps the GEMM with the gather or scatter over NVLink; "collectives" is the way of training.
    Every rank of the group must call the function; all get the same answer.
    """
    return BACKENDS if why_not_symmetric_memory(group, torch.device(device)) is None else BACKENDS[1:]


def for_inference(model: Model, *, backend: str = "auto", reduce_dtype: torch.dtype | None = None) -> Model:
    """Return the same model for inference, with the same parameters.

    Under sequence parallelism a column-parallel layer multiplies the tokens of one rank while it copies those of the
    next, and a row-parallel layer sends the sums of one rank while it multiplies for the next, where the GPUs can
    (`available_linear_backends`): `overlap="symmetric-memory"`, for any number of tokens. Everything else is computed
    bitwise as in training: layers without sequence parallelism, other backends, and calls that do not fit (no tokens;
    an output or sums in a wider dtype than the input's).

        fast = for_inference(model)
        with torch.no_grad():
            logits = fast(...)

    The result is a view (`shared_weights.view_of`) in evaluation mode, with the very parameters of `model`, which is
    not changed.

    An overlapping row-parallel product rounds each rank's part to the input's dtype before it sums them (in fp32), so
    a bf16 layer takes it only with `reduce_dtype=torch.bfloat16`: the default sums fp32 parts.

    Every rank has to call it. Communication: `why_not_symmetric_memory`'s, once for each group.

    Args:
        model: Any module.
        backend: "auto", or a backend that must be taken: "symmetric-memory" or "collectives". Each linear says in
            `inference_backend` which it got.
        reduce_dtype: dtype of the sums over the ranks; None: as in training.

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
        plain = isinstance(view.execution.product, PlainProduct)
        own["inference_backend"] = chosen[_group_of(view)] if plain else "collectives"
        if reduce_dtype is not None:
            own["execution"] = replace(view.execution, reduce_dtype=reduce_dtype)
        if own["inference_backend"] == "symmetric-memory":
            own["execution"] = replace(view.execution, overlap="symmetric-memory")

    return view_of(model, change)


def _choose(backend: str, group: ProcessGroup | None, device: torch.device) -> str:
    if backend == "collectives":
        return backend
    reason = why_not_symmetric_memory(group, device)
    if reason is not None and backend != "auto":
        raise ValueError(f"backend={backend!r} cannot be used: {reason}; use 'auto' or 'collectives'")
    return BACKENDS[0] if reason is None else BACKENDS[1]


def _group_of(layer: Linear) -> ProcessGroup | None:
    """Return the group over which the layer gathers or scatters tokens."""
    return layer.placement.sharded if layer.placement.sequence_parallel else None
