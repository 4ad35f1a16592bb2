"""The backend "triton": `kernels.block_attention`, which also decodes, so that both have the same bits."""

from torch import Tensor
from torch.nn import functional as F

from parallel_layers.attention.flash import VARLEN
from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.attention.reference import REFERENCE
from parallel_layers.kernels.block_attention import block_attention


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    return block_attention(
        q, k, v, segments.cu_q, segments.lengths_k.int(), segments.max_q, begins_S=segments.cu_k,
        causal=scoring.causal, window=scoring.window, scale=scoring.scale, softcap=scoring.softcap,
    )  # fmt: skip


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by FlashAttention-2, which has no soft-cap, and wants values of the keys' size."""
    kernel = VARLEN if scoring.softcap is None else REFERENCE
    size = v.shape[-1]
    d_out, v, out = (F.pad(x, (0, q.shape[-1] - size)) for x in (d_out, v, out))
    d_q, d_k, d_v = kernel.backward(d_out, q, k, v, out, lse, segments, scoring)
    return d_q, d_k, d_v[..., :size]


BLOCKS = Kernel(_forward, _backward, VARLEN.workspace)
