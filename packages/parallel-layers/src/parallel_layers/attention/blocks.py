"""The forward of the backend "triton": `kernels.block_attention`, which decodes, too, with the same bits."""

from torch import Tensor

from parallel_layers.attention.kernel_interface import Scoring, Segments
from parallel_layers.kernels.block_attention import block_attention


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """See `Kernel.forward`."""
    return block_attention(
        q, k, v, segments.cu_q, segments.lengths_k.int(), segments.max_q, begins_S=segments.cu_k,
        causal=scoring.causal, window=scoring.window, scale=scoring.scale, softcap=scoring.softcap,
    )  # fmt: skip
