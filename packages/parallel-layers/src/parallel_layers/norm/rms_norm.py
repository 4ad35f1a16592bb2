"""RMSNorm over whole rows, and over rows whose heads are sharded.

Shape legend: H normalised size; T tokens, N heads of this rank, D head size; `...` any leading dims.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from parallel_layers.kernels.rms_norm import fused_add_rms_norm, fused_rms_norm, fused_rms_norm_and_keep
from parallel_layers.norm.backends import TransformerEngineNorm, check_norm_backend, choose_norm_backend
from parallel_layers.parallel_module import ParallelModule


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, unit_offset: bool = False, backend: str = "auto"
) -> Tensor:
    """Root-mean-square normalisation, https://arxiv.org/abs/1910.07467.

        y = x / sqrt(mean(x²) + eps) · w,        w = weight, or 1 + weight with `unit_offset` (Gemma)

    Arithmetic is fp32 (fp64 for fp64 input), rounded once to x's dtype.

    Args:
        x: `[..., H]`.
        weight: `[H]`.
        eps: Added to the mean square.
        unit_offset: The weight is stored as its difference from one.
        backend: "triton", "torch", or "auto": triton if it supports the tensors, else torch.

    Returns:
        `[..., H]` in x's dtype.

    Raises:
        ValueError: The backend is unknown, not installed, or does not support the tensors.
    """
    chosen = choose_norm_backend(backend, x, weight)
    if chosen == "te":
        raise ValueError("backend='te' needs the module; use RMSNorm(..., backend='te')")
    if chosen == "triton":
        return fused_rms_norm(x, weight, eps=eps, unit_offset=unit_offset)
    if unit_offset:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class RMSNorm(ParallelModule):
    """RMSNorm whose weight is replicated over the tensor-parallel group.

    Forward: no communication. Backward: with `sequence_parallel`, one all-reduce of the weight's gradient `[H]`,
    because the ranks normalise different rows (tokens or heads) with the same weight; otherwise no communication.

    Args:
        hidden_size: H, the size of the last dim.
        eps: Added to the mean square.
        unit_offset: Multiply by `1 + weight`; the weight starts at zero (Gemma).
        group: Tensor-parallel group; None: the layer is whole.
        sequence_parallel: The ranks of `group` hold different rows.
        backend: A name of `available_norm_backends()`, or "auto": triton on CUDA, else torch. "te" imports Transformer
            Engine.
        dtype: dtype of the weight.
        device: Device of the weight.

    Raises:
        ValueError: The backend is unknown or not installed.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        unit_offset: bool = False,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_norm_backend(backend)
        self.hidden_size = hidden_size
        self.eps = eps
        self.unit_offset = unit_offset
        self.group = group if sequence_parallel else None
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        self._te = TransformerEngineNorm(hidden_size, eps, unit_offset, self.weight.dtype) if backend == "te" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the effective weight to one."""
        nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def active_backend(self, x: Tensor) -> str:
        """Return the backend that `forward(x)` uses; raise ValueError if the given backend does not support x."""
        return choose_norm_backend(self.backend, x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x [..., H]`; returns `[..., H]` in the same dtype."""
        weight = copy_to_tensor_parallel(self.weight, self.group)
        if self._te is not None:
            choose_norm_backend("te", x, weight)  # raises ValueError for unsupported tensors
            return self._te(x, weight, self.weight)
        return rms_norm(x, weight, eps=self.eps, unit_offset=self.unit_offset, backend=self.backend)

    def norm_and_keep(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise the residual stream and keep it: return `(norm(x), x)`, both `[..., H]`.

        The backward of the Triton backend adds both gradients of x in one kernel.
        """
        if choose_norm_backend(self.backend, x, self.weight) == "triton":
            weight = copy_to_tensor_parallel(self.weight, self.group)
            return fused_rms_norm_and_keep(x, weight, eps=self.eps, unit_offset=self.unit_offset)
        return self(x), x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and normalise: return `(norm(x + residual), x + residual)`, both `[..., H]`.

        The Triton backend uses one kernel each way.
        """
        if choose_norm_backend(self.backend, x, self.weight, residual) == "triton":
            weight = copy_to_tensor_parallel(self.weight, self.group)
            return fused_add_rms_norm(x, residual, weight, eps=self.eps, unit_offset=self.unit_offset)
        total = x + residual
        return self(total), total

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        unit_offset = ", unit_offset=True" if self.unit_offset else ""
        backend = f", backend={self.backend!r}" if self.backend != "auto" else ""
        return f"{self.hidden_size}, eps={self.eps}{unit_offset}{backend}"


class HeadShardedRMSNorm(ParallelModule):
    """RMSNorm over all heads of a token together, with heads sharded over the tensor-parallel group (OLMo-2).

        y = x / sqrt(sum over the heads of all ranks of x² / (num_heads · D) + eps) · weight[this rank's heads]

    Forward: one all-reduce `[T]` fp32. Backward: one all-reduce `[T]`, and one of the weight's gradient
    `[num_heads · D]`. The weight is replicated. A head on several ranks counts once.

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
        self.group = group
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self.replicas = max(1, size // num_heads)
        heads = max(1, num_heads // size)
        first = rank * num_heads // size
        self.local = slice(first * head_dim, (first + heads) * head_dim)
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
        weight = copy_to_tensor_parallel(self.weight, self.group)[self.local].to(x.dtype)
        y = x * torch.rsqrt(total / self.weight.numel() + self.eps) * weight
        return y.to(x_TND.dtype).view(x_TND.shape)
