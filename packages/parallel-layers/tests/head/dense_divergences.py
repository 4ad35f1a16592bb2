"""Divergences of materialised distributions, the truth of the tests of distillation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_layers.head.divergence import DIVERGENCES

KINDS = {name: {"mixture": 0.3} if make(0.3).mixes else {} for name, make in DIVERGENCES.items()}


def materialised_log_probs(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Tensor:
    logits = logit_scale * (hidden @ weight.T)
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    return (logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)).log_softmax(-1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def dense_divergence(log_p: Tensor, log_q: Tensor, name: str, mixture: float = 0.5) -> Tensor:
    """The definitions of the papers, term by term."""

    def mixed(share: float) -> Tensor:
        return (share * log_p.exp() + (1 - share) * log_q.exp()).log()

    return {
        "forward_kl": lambda: kl(log_p, log_q),
        "reverse_kl": lambda: kl(log_q, log_p),
        "jensen_shannon": lambda: mixture * kl(log_p, mixed(mixture)) + (1 - mixture) * kl(log_q, mixed(mixture)),
        "skewed_forward_kl": lambda: kl(log_p, mixed(mixture)),
        "skewed_reverse_kl": lambda: kl(log_q, mixed(1 - mixture)),
    }[name]()


def problem(
    num_tokens: int, vocab_size: int, hidden_size: int = 6, teacher_size: int = 9, *, seed: int = 0, **dtypes: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and head of the student and of the teacher, and upstream gradients."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((num_tokens, hidden_size), (vocab_size, hidden_size), (num_tokens, teacher_size))
    ]
    teacher_weight = torch.randn(vocab_size, teacher_size, generator=generator, dtype=torch.float64)
    upstream = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    return tuple(x.to(dtypes.get("dtype", torch.float64)) for x in (*tensors, teacher_weight, upstream))


def results(
    function: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, upstream: Tensor
) -> list[Tensor]:
    """The divergence and the gradients of the student's hidden states and head."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    divergence = function(hidden, weight)
    return [divergence.detach(), *torch.autograd.grad(divergence, (hidden, weight), upstream.to(divergence.dtype))]


def assert_same(actual: list[Tensor], expected: list[Tensor], relative: float = 1e-12) -> None:
    """Each element within `relative` of the largest of its tensor (at least 1)."""
    for value, truth in zip(actual, expected, strict=True):
        scale = max(1.0, truth.abs().max().item()) if truth.numel() else 1.0
        torch.testing.assert_close(value.double(), truth.double(), rtol=0.0, atol=relative * scale)
