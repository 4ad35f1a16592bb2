"""`Norm`: the weight and the placement that RMSNorm and LayerNorm share.

Shape legend: H normalised size; `...` any leading dims.
"""

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.module.parallel_module import ParallelModule


class NormOptions(TypedDict, total=False):
    """The keyword arguments of `Norm` that every norm passes on."""

    group: ProcessGroup | None
    sequence_parallel: bool
    dtype: torch.dtype | None
    device: torch.device | str | None


class Norm(ParallelModule):
    """A norm over whole rows `[..., H]` whose weight `[H]` is replicated over the tensor-parallel group.

    Forward: no communication. Backward: with `sequence_parallel`, one all-reduce of the weight's gradient `[H]`, which
    `sum_norm_gradients_once` does for all norms of a model together.

    Args:
        hidden_size: H.
        eps: Added to the mean square or the variance.
        group: Tensor-parallel group; None: the layer is whole.
        sequence_parallel: The ranks of `group` hold different rows (tokens or heads).
        dtype: dtype of the weight.
        device: Device of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.gradient_group = group if sequence_parallel else None
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of `x [..., H]` times the weight `[H]`, in x's dtype."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x [..., H]`; returns `[..., H]` in the same dtype."""
        return self.normalize(x, copy_to_tensor_parallel(self.weight, self.gradient_group))

    def add_and_norm(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(norm(s), s)` for the residual stream s = x + residual, or s = x, both `[..., H]`."""
        stream = x if residual is None else x + residual
        return self(stream), stream

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.hidden_size}, eps={self.eps}"
