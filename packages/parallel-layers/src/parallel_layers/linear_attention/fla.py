"""The kernels of fla-core (https://github.com/fla-org/flash-linear-attention), an optional extra.

The package is imported at the first call. Its kernels take one batch entry with `cu_seqlens`. For a gate per head they
take the table of chunks; without a table they would read the boundaries on the host. For a gate per channel
`use_graph` builds the table on the device.
"""

import torch
from torch import Tensor

from parallel_layers.linear_attention.chunks import Chunks
from parallel_layers.linear_attention.operators import SIZE


def fla_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    scale: float,
    normalize: bool,
    output_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `gated_delta_rule`."""
    tensors = [x[None] for x in (q, k, v, log_decay, beta)]
    options = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_state,
        "use_qk_l2norm_in_kernel": normalize,
        "cu_seqlens": cu_seqlens.long(),
    }
    if log_decay.dim() == 3:
        from fla.ops.kda import chunk_kda

        out, state = chunk_kda(*tensors, **options, use_graph=True, chunk_size=SIZE)
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        chunks = Chunks.of(cu_seqlens, len(q), SIZE)
        # A spare chunk is behind the end of the last sequence, where kernels read and write nothing.
        table = torch.stack([chunks.sequences, chunks.numbers], dim=1)
        out, state = chunk_gated_delta_rule(*tensors, **options, chunk_indices=table, chunk_size=SIZE)
    return out[0], state
