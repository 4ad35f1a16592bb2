"""The kernels of fla-core (https://github.com/fla-org/flash-linear-attention), an optional extra.

The package is imported at the first call. Its kernels take one batch entry with `cu_seqlens`, and the table of chunks,
without which they read the boundaries on the host. For a gate per channel they take no table: each call waits for the
GPU once (`use_graph` would avoid it, but keeps buffers for every length of a pack until the process ends). The
boundaries are copied for each call, because fla remembers its tables by the tensor object, whatever is written into it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from parallel_layers.attention.context_parallel.sequence_layout import Layout
from parallel_layers.linear_attention.chunks import Chunks
from parallel_layers.linear_attention.operators import SIZE
from parallel_layers.linear_attention.planned import PlannedConvolution, PlannedDeltaRule


def fla_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor, scale: float, normalize: bool, output_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `gated_delta_rule`."""
    if v.is_meta:
        planned: tuple[Tensor, Tensor | None] = PlannedDeltaRule.apply(
            q, k, v, log_decay, beta, len(cu_seqlens) - 1, normalize, output_state
        )
        return planned
    options = {
        "initial_state": initial_state,
        "output_final_state": output_state,
        "cu_seqlens": cu_seqlens.long(),
    }
    if log_decay.dim() == 2:
        options["chunk_indices"] = _table(cu_seqlens, len(q))
    return _delta_rule(q, k, v, log_decay, beta, scale, normalize, **options)


def fla_context_parallel_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, scale: float,
    normalize: bool, group: ProcessGroup, layout: Layout,
) -> Tensor:  # fmt: skip
    """See `context_parallel_delta_rule`; the host reads `cu_seqlens` once for each pack."""
    if v.is_meta:
        out: Tensor = PlannedDeltaRule.apply(q, k, v, log_decay, beta, len(cu_seqlens) - 1, normalize, False)[0]
        return out
    context = _context(cu_seqlens, group, layout)
    return _delta_rule(q, k, v, log_decay, beta, scale, normalize, cp_context=context)[0]


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float, normalize: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if log_decay.dim() == 3:
        from fla.ops.kda import chunk_kda as operator
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as operator
    tensors = (x[None] for x in (q, k, v, log_decay, beta))
    out, state = operator(*tensors, scale=scale, use_qk_l2norm_in_kernel=normalize, chunk_size=SIZE, **options)
    return out[0], state


# Boundaries of a pack -> fla's description of it, by the group, the layout and the number of writes into them.
_CONTEXTS: Any = WeakTensorKeyDictionary()


def _context(cu_seqlens: Tensor, group: ProcessGroup, layout: Layout) -> Any:
    """Return fla's description of a pack that is divided over a group."""
    from fla.ops.cp import build_cp_context

    contexts = _CONTEXTS.setdefault(cu_seqlens, {})
    key = group, layout, None if cu_seqlens.is_inference() else cu_seqlens._version
    if key not in contexts:
        contexts[key] = build_cp_context(cu_seqlens.long(), group, layout=layout)
    return contexts[key]


def fla_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str | None
) -> Tensor:
    """See `short_convolution`."""
    if x.is_meta:
        out: Tensor = PlannedConvolution.apply(x, weight, bias, activation is not None)
        return out
    from fla.modules.causal_conv1d.ops import causal_conv1d

    table = _table(cu_seqlens, len(x))
    out, _ = causal_conv1d(
        x[None], weight, bias, activation=activation, cu_seqlens=cu_seqlens.long(), chunk_indices=table
    )
    return out[0]


def _table(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the sequence of each chunk and its number there, `[M, 2]`.

    A spare chunk is behind the end of the last sequence, where kernels read and write nothing.
    """
    chunks = Chunks.of(cu_seqlens, num_tokens, SIZE)
    return torch.stack([chunks.sequences, chunks.numbers], dim=1)
