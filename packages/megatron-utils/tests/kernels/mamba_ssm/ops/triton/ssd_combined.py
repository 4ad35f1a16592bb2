"""Mamba-2 of `mamba-ssm` token by token in plain torch (arXiv:2405.21060), for tests on a CPU."""

import torch
from torch import Tensor, nn


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Return the gated output `[1, T, N * P]` of the projection `[1, T, 2 N P + 2 G S + N]`, sequence by sequence."""
    assert activation == "silu"
    assert not norm_before_gate
    assert headdim is not None
    heads = len(A)
    inner, tokens = heads * headdim, zxbcdt.shape[1]
    states = (zxbcdt.shape[2] - 2 * inner - heads) // (2 * ngroups)
    z, x_b_c, dt = zxbcdt[0].split([inner, inner + 2 * ngroups * states, heads], -1)
    dt = nn.functional.softplus(dt + dt_bias)
    numbers = torch.zeros(tokens, dtype=torch.int32) if seq_idx is None else seq_idx[0]
    window = conv1d_weight.shape[1]
    outputs, begin, state = [], 0, zxbcdt.new_zeros(heads, headdim, states)
    for t in range(tokens):
        if t > 0 and numbers[t] != numbers[t - 1]:
            begin, state = t, torch.zeros_like(state)
        inputs = x_b_c[max(begin, t - window + 1) : t + 1]
        convolved = (inputs * conv1d_weight.T[window - len(inputs) :]).sum(0) + conv1d_bias
        x, b, c = nn.functional.silu(convolved).split([inner, ngroups * states, ngroups * states])
        x, b, c = x.view(heads, headdim), b.view(ngroups, states), c.view(ngroups, states)
        b, c = (group.repeat_interleave(heads // ngroups, 0) for group in (b, c))
        change = torch.einsum("np,ns->nps", x * dt[t, :, None], b)
        state = state * (dt[t] * A).exp()[:, None, None] + change
        outputs.append((torch.einsum("nps,ns->np", state, c) + x * D[:, None]).flatten())
    return (torch.stack(outputs) * nn.functional.silu(z))[None]


def mamba_chunk_scan_combined() -> None:
    """Megatron-Core imports this with the other; it serves generation."""
    raise NotImplementedError
