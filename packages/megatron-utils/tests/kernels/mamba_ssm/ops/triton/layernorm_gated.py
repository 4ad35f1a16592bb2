"""The grouped norm of `mamba-ssm` in plain torch, for tests on a CPU."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """An RMSNorm over each group of the last dim."""

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, device: object, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `[..., D]`."""
        groups = x.unflatten(-1, (-1, self.group_size))
        return (groups * (groups.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight
