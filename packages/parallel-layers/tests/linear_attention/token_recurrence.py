"""The gated delta rule token by token and sequence by sequence in fp64: what the other forms are compared with."""

from itertools import pairwise

import torch
from torch import Tensor

from parallel_layers.linear_attention.recurrent import gated_delta_step


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def token_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` with `output_state`, for fp64 tensors."""
    group = v.shape[1] // k.shape[1]
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    outs, states = [v[:0]], []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]) if initial_state is None else initial_state[n]
        state = state[None]
        for t in range(start, stop):
            token = slice(t, t + 1)
            out, state = gated_delta_step(state, *(x[token] for x in (q, k, v, log_decay, beta)))
            outs.append(out)
        states.append(state)
    return torch.cat(outs), torch.cat(states)
