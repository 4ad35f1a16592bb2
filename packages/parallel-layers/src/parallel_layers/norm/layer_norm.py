"""LayerNorm without bias over whole rows."""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.norm.base import Norm, NormOptions


class LayerNorm(Norm):
    """LayerNorm without bias, https://arxiv.org/abs/1607.06450 (Cohere).

        y = (x - mean(x)) / sqrt(var(x) + eps) · weight

    Arithmetic is fp32 (fp64 for fp64 input), rounded once to x's dtype.

    Args:
        hidden_size: H.
        eps: Added to the variance.
        **options: `group`, `sequence_parallel`, `dtype` and `device`, see `Norm`.
    """

    def __init__(self, hidden_size: int, *, eps: float = 1e-5, **options: Unpack[NormOptions]) -> None:
        super().__init__(hidden_size, eps=eps, **options)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        # On a CPU torch's kernel for bf16 sums the weight's gradient in bf16.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), None, self.eps).to(x.dtype)
