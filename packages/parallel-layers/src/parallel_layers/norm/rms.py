"""RMSNorm over whole rows, and over rows whose heads are sharded.

Shape legend: H normalised size; T tokens, N heads of this rank, D head size; `...` any leading dims.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from parallel_layers.kernels.rms_norm import fused_rms_norm, supports_rms_norm
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.norm.base import Norm, NormOptions


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float = 1e-6, unit_offset: bool = False) -> Tensor:
    """Root-mean-square normalisation, https://arxiv.org/abs/1910.07467: `x [..., H]`, `weight [H]` -> `[..., H]`.

        y = x / sqrt(mean(x²) + eps) · w,        w = weight, or 1 + weight with `unit_offset` (Gemma), or 1 for None

    Arithmetic is fp32 (fp64 for fp64 input), rounded once to x's dtype, by a Triton kernel where possible.
    """
    if weight is None:
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    if supports_rms_norm(x, weight):
        return fused_rms_norm(x, weight, eps=eps, unit_offset=unit_offset)[0]
    if unit_offset:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class RMSNorm(Norm):
    """RMSNorm whose weight is replicated over the tensor-parallel group; see `rms_norm`.

    Args:
        hidden_size: H.
        eps: Added to the mean square.
        unit_offset: Multiply by `1 + weight`; the weight starts at zero (Gemma).
        **options: `group`, `sequence_parallel`, `dtype` and `device`, see `Norm`.
    """

    def __init__(
        self, hidden_size: int, *, eps: float = 1e-6, unit_offset: bool = False, **options: Unpack[NormOptions]
    ) -> None:
        self.unit_offset = unit_offset  # read by reset_parameters
        super().__init__(hidden_size, eps=eps, **options)

    def reset_parameters(self) -> None:
        """Set the effective weight to one."""
        nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        return rms_norm(x, weight, eps=self.eps, unit_offset=self.unit_offset)

    def add_and_norm(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Norm`. Triton uses one kernel each way, which also adds both gradients of s."""
        if supports_rms_norm(x, self.weight, residual):
            weight = copy_to_tensor_parallel(self.weight, self.gradient_group)
            return fused_rms_norm(x, weight, residual, eps=self.eps, unit_offset=self.unit_offset)
        return super().add_and_norm(x, residual)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{super().extra_repr()}, unit_offset={self.unit_offset}"


class HeadShardedRMSNorm(ParallelModule):
    """RMSNorm over all heads of a token together, with heads sharded over the tensor-parallel group (OLMo-2).

        y = x / sqrt(sum over the heads of all ranks of x² / (num_heads · D) + eps) · weight[this rank's heads]

    Forward: one all-reduce `[T]` fp32. Backward: one all-reduce `[T]`, and one of the replicated weight's gradient
    `[num_heads · D]`.

    Args:
        num_heads: Heads over all ranks.
        head_dim: D.
        eps: Added to the mean square.
        group: Tensor-parallel group; None: the layer is whole. With more ranks than heads, rank r holds head
            r · num_heads // tp.
        dtype: dtype of the weight.
        device: Device of the weight.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        eps: float = 1e-6,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group = self.gradient_group = group
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self.replicas = max(1, size // num_heads)
        heads = max(1, num_heads // size)
        first_head = rank * num_heads // size
        self.local = slice(first_head * head_dim, (first_head + heads) * head_dim)
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x_TND: Tensor) -> Tensor:
        """Normalise this rank's heads `[T, N, D]`; returns the same shape and dtype."""
        x = x_TND.flatten(1).to(torch.promote_types(x_TND.dtype, torch.float32))
        squares = x.square().sum(-1, keepdim=True) / self.replicas
        # Every rank's output depends on the global sum, so the forward and the backward all-reduce.
        total = copy_to_tensor_parallel(reduce_from_tensor_parallel(squares, self.group), self.group)
        weight = copy_to_tensor_parallel(self.weight, self.gradient_group)[self.local].to(x.dtype)
        y = x * torch.rsqrt(total / self.weight.numel() + self.eps) * weight
        return y.to(x_TND.dtype).view(x_TND.shape)
