"""The kernels of fla-core (https://github.com/fla-org/flash-linear-attention), an optional extra.

The package is imported at the first call. Its kernels take one batch entry with `cu_seqlens`, and the table of chunks,
without which they read the boundaries on the host. For a gate per channel they take no table: each call waits for the
GPU once (`use_graph` would avoid it, but keeps buffers for every length of a pack until the process ends). The
boundaries are copied for each call, because fla remembers its tables by the tensor object, whatever is written into it.
"""

import torch
from torch import Tensor

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
    tensors = [x[None] for x in (q, k, v, log_decay, beta)]
    options = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_state,
        "use_qk_l2norm_in_kernel": normalize,
        "cu_seqlens": cu_seqlens.long(),
        "chunk_size": SIZE,
    }
    if log_decay.dim() == 3:
        from fla.ops.kda import chunk_kda

        out, state = chunk_kda(*tensors, **options)
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        out, state = chunk_gated_delta_rule(*tensors, **options, chunk_indices=_table(cu_seqlens, len(q)))
    return out[0], state


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
