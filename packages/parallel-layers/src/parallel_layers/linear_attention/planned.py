"""The tensors that fla-core 0.6.0 allocates, made on the meta device by a plan of memory; nothing is computed.

The saved tensors, and those alive at the end of a backward, are those of `chunk_gated_delta_rule`, `chunk_kda` and
`causal_conv1d`, with chunks of `SIZE` tokens. See `kernels.runtime.planned_for`.

Shape legend: T tokens, K key heads, V value heads, D key size, E value size, M chunks.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_layers.linear_attention.operators import SIZE


class PlannedDeltaRule(torch.autograd.Function):
    """The gated delta rule, with gates per head or per channel."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, num_sequences: int,
        normalize: bool, output_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Allocate the outputs, and save normed queries and keys, sums of decays and the products inside chunks."""
        if normalize:
            q, k = torch.empty_like(q), torch.empty_like(k)
        per_channel = log_decay.dim() == 3
        products = [v.new_empty(*v.shape[:2], SIZE) for _ in range(1 + per_channel)]
        ctx.save_for_backward(q, k, v, torch.empty_like(log_decay), beta, *products)
        _ = _allocate(k, v, keys=1, values=2, states=1)
        shape = (num_sequences, v.shape[1], k.shape[2], v.shape[2])
        return torch.empty_like(v), v.new_empty(shape, dtype=torch.float32) if output_state else None

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        """Allocate what the forward left behind, its gradients, and those of the arguments."""
        q, k, v, log_decay, beta, *products = ctx.saved_tensors
        alive = _allocate(k, v, keys=5, values=4, states=2)
        if len(products) > 1:  # gates per channel: gradients of queries, keys and decays in fp32, two of each
            alive += [*_allocate(k, v, keys=2, values=0, states=0), *(torch.empty_like(log_decay) for _ in range(6))]
        gradients = (torch.empty_like(x) for x in (q, k, v, log_decay, beta))
        return *gradients, None, None, None


def _allocate(k: Tensor, v: Tensor, *, keys: int, values: int, states: int) -> list[Tensor]:
    """Return tensors of keys `[T, V, D]`, of values `[T, V, E]` and of states `[M, V, D, E]`, so many of each."""
    tokens, heads, size = v.shape
    shapes = (
        (keys, (tokens, heads, k.shape[2])),
        (values, (tokens, heads, size)),
        (states, (-(-tokens // SIZE), heads, k.shape[2], size)),
    )
    return [v.new_empty(shape) for count, shape in shapes for _ in range(count)]


class PlannedConvolution(torch.autograd.Function):
    """The short convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activated: bool) -> Tensor:
        """Allocate the output, and save the arguments."""
        ctx.save_for_backward(x, weight, bias)
        ctx.activated = activated
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate the sums before the activation, the gradient of x, and those of the weights by chunk."""
        x, weight, bias = ctx.saved_tensors
        sums = x.new_empty(x.shape) if ctx.activated else None
        d_x, chunks = torch.empty_like(x), -(-len(x) // SIZE)
        d_weight, d_bias = (
            None if w is None else w.new_empty(chunks, *w.shape, dtype=torch.float32).sum(0).to(w.dtype)
            for w in (weight, bias)
        )
        del sums
        return d_x, d_weight, d_bias, None
