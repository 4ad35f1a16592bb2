"""The gated delta rule of `fla-core` token by token in plain torch (arXiv:2412.06464), for tests on a CPU."""

import itertools

import torch
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **_: object
) -> tuple[Tensor, None]:
    """Return the output of each sequence of q, k `[1, T, N, K]`, v `[1, T, N, V]`, log decay and beta `[1, T, N]`."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for begin, end in itertools.pairwise(bounds):
        state = q.new_zeros(q.shape[2], q.shape[3], v.shape[3])
        for t in range(begin, end):
            state = state * g[0, t].exp()[:, None, None]
            change = beta[0, t, :, None] * (v[0, t] - torch.einsum("nkv,nk->nv", state, k[0, t]))
            state = state + torch.einsum("nk,nv->nkv", k[0, t], change)
            outputs.append(torch.einsum("nkv,nk->nv", state, q[0, t]) * q.shape[3] ** -0.5)
    return torch.stack(outputs)[None], None
