"""The recurrences token by token and sequence by sequence in fp64: what the other forms are compared with."""

from itertools import pairwise

import torch
from torch import Tensor

# A small chunk: every border in few tokens.
CHUNK = 8  # and 4 or 2 where sequences are shorter
BORDERS = [0, 1, 2, 3, 4, *(CHUNK * n + around for n in (1, 2, 3) for around in (-1, 0, 1))]


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
        for t in range(start, stop):
            decay = log_decay[t].exp()
            state = state * decay.view(*decay.shape, *(1,) * (3 - decay.dim()))
            error = beta[t, :, None] * (v[t] - torch.einsum("vde,vd->ve", state, k[t]))
            state = state + torch.einsum("vd,ve->vde", k[t], error)
            outs.append(torch.einsum("vde,vd->ve", state, q[t])[None])
        states.append(state)
    return torch.cat(outs), torch.stack(states)


def state_space_recurrence(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    cu_seqlens: Tensor,
    *,
    D_V: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`state_space_dual` with `output_state`, for fp64 tensors."""
    group = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(group, dim=1) for part in (b, c))
    outs, states = [x[:0]], []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        state = x.new_zeros(x.shape[1], b.shape[2], x.shape[2]) if initial_state is None else initial_state[n]
        for t in range(start, stop):
            state = (dt[t] * a).exp()[:, None, None] * state
            state = state + torch.einsum("v,vd,ve->vde", dt[t], b[t], x[t])
            outs.append((torch.einsum("vd,vde->ve", c[t], state) + D_V[:, None] * x[t])[None])
        states.append(state)
    return torch.cat(outs), torch.stack(states)
