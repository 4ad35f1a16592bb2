"""Norms in the places of Megatron-Core's own, and the residual addition with a norm before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_utils.gpt.config import parameter_device
from parallel_layers import RMSNorm
from parallel_layers.norm import HeadShardedRMSNorm


class Norm(RMSNorm):
    """RMSNorm with Megatron's constructor and Megatron's rule for its gradient.

    Under sequence parallelism each rank sees different tokens. The weight is marked, and `finalize_model_grads` sums
    marked gradients over the tensor-parallel group once per step. (It knows QK-norms by their names.)
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        offset = config.layernorm_zero_centered_gamma
        device = parameter_device(config)
        super().__init__(hidden_size, eps=eps, unit_offset=offset, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class AllHeadsNorm(HeadShardedRMSNorm):
    """A norm over all heads of queries or keys together (OLMo-2); it replaces Megatron's QK-norm.

    Input `[T, 1, N, D]` of this rank's heads. Every rank holds the whole weight and computes its whole gradient. The
    mark makes `finalize_model_grads` average it; for the names of QK-norms it would sum otherwise.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int, group: ProcessGroup
    ) -> None:
        super().__init__(
            num_heads,
            hidden_size,
            eps=eps,
            group=group if group.size() > 1 else None,
            dtype=config.params_dtype,
            device=parameter_device(config),
        )
        self.weight.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]


class ResidualAdd(nn.Module):
    """Compute residual + multiplier · norm(x + bias); it replaces Megatron's bias-dropout-add.

    Args:
        config: Megatron's config. There is no dropout.
        normed: There is a norm behind attention and MLP (Gemma 2, OLMo-2), `post_layernorm`.
        multiplier: The factor of the summand (Granite).
    """

    def __init__(self, config: TransformerConfig, *, normed: bool, multiplier: float) -> None:
        super().__init__()
        self.post_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon) if normed else None
        self.multiplier = multiplier

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that Megatron calls; it has the same for any arguments."""
        return self._add

    def _add(self, x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: Any = None) -> Tensor:
        x, bias = x_with_bias
        x = x if bias is None else x + bias
        x = x if self.post_layernorm is None else self.post_layernorm(x)
        return residual + (x if self.multiplier == 1 else x * self.multiplier)
