"""Activations with learned parameters or with constants from a config."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.module.autocast import wide
from parallel_layers.module.parallel_module import ParallelModule

_INITIAL = 0.8


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The gated activation of gpt-oss (https://arxiv.org/abs/2508.10925): SwiGLU with clamped inputs and up + 1.

        f(gate, up) = g · sigmoid(alpha · g) · (u + 1),   g = min(gate, limit),   u = min(max(up, -limit), limit)

    Attributes:
        alpha: Gain of the sigmoid (`swiglu_alpha`).
        limit: Bound of the inputs (`swiglu_limit`); clamped inputs have a gradient of zero.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of two tensors of equal shape, in the same shape and dtype."""
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)


class XIELU(ParallelModule):
    """The expanded integral of the exponential linear unit (https://arxiv.org/abs/2411.13010), Apertus' activation.

        f(x) = a_p x² + βx  for x > 0,   a_n (e^min(x, ε) - 1 - x) + βx  otherwise,
        a_p = softplus(alpha_p),   a_n = β + softplus(alpha_n)

    Replicated parameters: `alpha_p [1]` and `alpha_n [1]`. Buffers: the constants `beta` (β) and `eps` (ε), which
    Hugging Face's checkpoints contain. Communication: in the backward one all-reduce of each parameter's gradient.

    Args:
        group: Group over which the channels are sharded; None: the channels are whole.
        dtype: dtype of the parameters and constants.
        device: Device of the parameters and constants.
    """

    beta: Tensor
    eps: Tensor

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.alpha_p = nn.Parameter(torch.empty(1, dtype=dtype, device=device))
        self.alpha_n = nn.Parameter(torch.empty(1, dtype=dtype, device=device))
        self.register_buffer("beta", torch.empty((), dtype=dtype, device=device))
        self.register_buffer("eps", torch.empty((), dtype=dtype, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the constants, and the parameters to a_p = a_n = 0.8."""
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)
        self.alpha_p.fill_(math.log(math.expm1(_INITIAL)))
        self.alpha_n.fill_(math.log(math.expm1(_INITIAL - 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation, `[T, I/n]` -> `[T, I/n]`, in x's dtype."""
        alpha_p, alpha_n = (copy_to_tensor_parallel(alpha, self.group) for alpha in (self.alpha_p, self.alpha_n))
        beta = self.beta.to(x.dtype)
        a_p = F.softplus(_widened(alpha_p)).to(x.dtype)
        a_n = (_widened(self.beta) + F.softplus(_widened(alpha_n))).to(x.dtype)
        negative = (torch.expm1(torch.minimum(x, self.eps.to(x.dtype))) - x) * a_n
        return torch.where(x > 0, a_p * x * x, negative) + beta * x


def _widened(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))
