"""The steps of a decoder: one token for each of M states, in place.

The states of rows `first` ... `first + M - 1` are updated where they stand, without the host, so that a CUDA graph can
capture a step. Rows that are not live keep their states; their outputs are arbitrary.

Shape legend: N places of a cache, M tokens, C channels, W tokens of the window, K key heads, G groups, V value heads,
D key or state size, E value size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.kernels.recurrent_steps import supports_steps, update_states, update_windows


def gated_delta_step_(
    state_NVDE: Tensor,
    q_MKD: Tensor,
    k_MKD: Tensor,
    v_MVE: Tensor,
    log_decay: Tensor,
    beta_MV: Tensor,
    *,
    first: int = 0,
    scale: float | None = None,
    normalize: bool = False,
    live_M: Tensor | None = None,
) -> Tensor:
    """Compute `gated_delta_rule` for one token of each of M sequences, and update their states.

        S = diag(exp(g)) S,   S = S + β k (v - Sᵀ k)ᵀ,   o = scale · Sᵀ q

    Args:
        state_NVDE: The states `[N, V, D, E]`, fp32 (fp64 for fp64 input); rows of live tokens change.
        q_MKD, k_MKD: `[M, K, D]`; value head h reads head h // (V / K).
        v_MVE: `[M, V, E]`.
        log_decay: g <= 0, `[M, V]` (https://arxiv.org/abs/2412.06464, equation 10) or `[M, V, D]`
            (https://arxiv.org/abs/2510.26692, equation 1).
        beta_MV: β, `[M, V]`.
        first: The row of the first token's state; the others follow.
        scale: Factor of the outputs; None: 1/sqrt(D).
        normalize: Divide queries and keys by sqrt(Σ x² + 1e-6), in fp32.
        live_M: `[M]` bool, whether a row is live; None: all are.

    Returns:
        `[M, V, E]` in v's dtype.
    """
    rows = state_NVDE[first : first + len(v_MVE)]
    scale = k_MKD.shape[-1] ** -0.5 if scale is None else scale
    if supports_steps(rows, v_MVE):
        tensors = q_MKD, k_MKD, v_MVE, log_decay, beta_MV
        return update_states(rows, *tensors, live_M, delta=True, scale=scale, normalize=normalize)
    dtype, group = rows.dtype, v_MVE.shape[1] // k_MKD.shape[1]
    q, k = q_MKD.to(dtype), k_MKD.to(dtype)
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, 1)[..., None, :] for x in (q, k))
    decay = log_decay.to(dtype).exp()
    state = rows * (decay if decay.dim() == 3 else decay[..., None])[..., None]
    error = beta_MV.to(dtype)[..., None, None] * (v_MVE.to(dtype)[..., None, :] - k @ state)
    state = state + k.mT * error
    _keep(rows, state, live_M)
    return (scale * (q @ state))[..., 0, :].to(v_MVE.dtype)


def state_space_step_(
    state_NVDE: Tensor,
    x_MVE: Tensor,
    dt_MV: Tensor,
    A_V: Tensor,
    B_MGD: Tensor,
    C_MGD: Tensor,
    *,
    first: int = 0,
    D_V: Tensor | None = None,
    live_M: Tensor | None = None,
) -> Tensor:
    """Compute `state_space_dual` for one token of each of M sequences, and update their states.

        S = exp(dt A) S + dt B xᵀ,   o = Sᵀ C + D x

    Args:
        state_NVDE: The states `[N, V, D, E]`, fp32 (fp64 for fp64 input); rows of live tokens change.
        x_MVE: `[M, V, E]`.
        dt_MV: The steps, >= 0, `[M, V]`.
        A_V: A <= 0, `[V]`.
        B_MGD, C_MGD: `[M, G, D]`; head h reads group h // (V / G).
        first: The row of the first token's state; the others follow.
        D_V: The share of the input in the output, `[V]`; None: zero.
        live_M: `[M]` bool, whether a row is live; None: all are.

    Returns:
        `[M, V, E]` in x's dtype.
    """
    rows = state_NVDE[first : first + len(x_MVE)]
    if supports_steps(rows, x_MVE):
        tensors = C_MGD, B_MGD, x_MVE, dt_MV, dt_MV
        return update_states(rows, *tensors, live_M, delta=False, rates=A_V, skip=D_V)
    dtype, group = rows.dtype, x_MVE.shape[1] // B_MGD.shape[1]
    x, steps = x_MVE.to(dtype)[..., None, :], dt_MV.to(dtype)[..., None, None]
    b, c = (part.to(dtype).repeat_interleave(group, 1)[..., None, :] for part in (B_MGD, C_MGD))
    state = rows * (steps * A_V.to(dtype)[:, None, None]).exp() + b.mT * (steps * x)
    _keep(rows, state, live_M)
    out = c @ state
    if D_V is not None:
        out = out + D_V.to(dtype)[:, None, None] * x
    return out[..., 0, :].to(x_MVE.dtype)


def convolution_step_(
    state_NWC: Tensor,
    x_MC: Tensor,
    weight_CW: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    first: int = 0,
    live_M: Tensor | None = None,
) -> Tensor:
    """Compute `short_convolution` for one token of each of M sequences, and update their states.

    Args:
        state_NWC: The last W - 1 inputs of each sequence in order, `[N, W - 1, C]`; rows of live tokens change.
        x_MC: `[M, C]`.
        weight_CW: `[C, W]`, any dtype.
        bias: `[C]`.
        activation: "silu", or None for none.
        first: The row of the first token's state; the others follow.
        live_M: `[M]` bool, whether a row is live; None: all are.

    Returns:
        `[M, C]` in x's dtype.
    """
    rows = state_NWC[first : first + len(x_MC)]
    if supports_steps(rows, x_MC):
        return update_windows(rows, x_MC, weight_CW, bias, live_M, activation == "silu")
    window = torch.cat([rows, x_MC[:, None].to(rows.dtype)], 1)
    taps = weight_CW.to(torch.promote_types(x_MC.dtype, torch.float32))
    out = (window.to(taps.dtype) * taps.T).sum(1)
    if bias is not None:
        out = out + bias
    _keep(rows, window[:, 1:], live_M)
    return (F.silu(out) if activation == "silu" else out).to(x_MC.dtype)


def _keep(rows: Tensor, state: Tensor, live: Tensor | None) -> None:
    """Write the new states of live rows."""
    rows.copy_(state if live is None else torch.where(live.view(-1, *(1,) * (rows.dim() - 1)), state, rows))
