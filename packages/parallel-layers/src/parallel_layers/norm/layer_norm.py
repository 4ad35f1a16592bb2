"""LayerNorm without bias over whole rows.

Shape legend: H normalised size; `...` any leading dims.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.parallel_module import ParallelModule


class LayerNorm(ParallelModule):
    """LayerNorm without bias, https://arxiv.org/abs/1607.06450, with a weight that is replicated over tp (Cohere).

        y = (x - mean(x)) / sqrt(var(x) + eps) · weight

    Arithmetic is fp32 (fp64 for fp64 input), rounded once to x's dtype. Forward: no communication. Backward: with
    `sequence_parallel`, one all-reduce of the weight's gradient `[H]`.

    Args:
        hidden_size: H.
        eps: Added to the variance.
        group: Tensor-parallel group; None: the layer is whole.
        sequence_parallel: The ranks of `group` hold different rows (tokens).
        dtype: dtype of the weight.
        device: Device of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.group = group if sequence_parallel else None
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x [..., H]`; returns `[..., H]` in the same dtype."""
        weight = copy_to_tensor_parallel(self.weight, self.group)
        # On a CPU torch's kernel for bf16 sums the weight's gradient in bf16.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), None, self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(norm(s), s)` for the residual stream s = x + residual, or s = x, both `[..., H]`."""
        stream = x if residual is None else x + residual
        return self(stream), stream

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.hidden_size}, eps={self.eps}"
