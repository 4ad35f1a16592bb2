"""`gated_delta_rule`: the recurrence of gated delta networks and of Kimi's delta attention over packed sequences.

Shape legend: T tokens, N sequences, K key heads, V value heads, D key size, E value size.
"""

import torch
from torch import Tensor

from parallel_layers.data.boundaries import check_boundaries
from parallel_layers.linear_attention.backends import choose_backend
from parallel_layers.linear_attention.fla import fla_gated_delta_rule
from parallel_layers.linear_attention.operators import chunked_gated_delta_rule
from parallel_layers.module.autocast import autocast_off, wide


def gated_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    log_decay: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    output_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule inside each sequence of a packed batch.

    Each value head has a state S `[D, E]`, before the first token the initial state or zero:

        S_t = (I - β_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ,     o_t = scale · S_tᵀ q_t

    with one g per head (gated delta networks, https://arxiv.org/abs/2412.06464) or one per channel of the key (Kimi's
    delta attention, https://arxiv.org/abs/2510.26692). Value head h reads query and key head h // (V / K). Sequences
    can have length zero. No communication, and no read of `cu_seqlens` on the host of a GPU, except by "fla" with one g
    per channel.

    "chunked" computes in fp32 (fp64 for fp64 input) and saves only its arguments: the backward repeats the forward.

    Args:
        q_TKD: `[T, K, D]`.
        k_TKD: `[T, K, D]`.
        v_TVE: `[T, V, E]`, K divides V.
        log_decay: g <= 0, `[T, V]` or `[T, V, D]`, fp32 (fp64 for fp64 input).
        beta_TV: β, `[T, V]`.
        cu_seqlens: `[N+1]` int32 boundaries of the sequences, on the tensors' device; padding is a sequence, too.
        scale: Factor of the outputs; None: 1/sqrt(D).
        normalize: Divide queries and keys by sqrt(Σ x² + 1e-6), in fp32.
        initial_state: `[N, V, D, E]` fp32 (fp64 for fp64 input); None: zero.
        output_state: Return the states behind the last tokens.
        backend: A name of `available_backends()`, or "auto": the first that supports the call, with its backward where
            an argument needs a gradient.

    Returns:
        The outputs `[T, V, E]` in v's dtype, and the states `[N, V, D, E]` with `output_state`, else None.

    Raises:
        ValueError: Shapes or dtypes disagree, or the backend is unknown, not installed or does not support the call.
    """
    check_arguments(q_TKD, k_TKD, v_TVE, log_decay, beta_TV, initial_state, len(cu_seqlens) - 1)
    check_boundaries(cu_seqlens, len(v_TVE), least=2)
    tensors = (q_TKD, k_TKD, v_TVE, log_decay, beta_TV)
    name = backend_of(backend, *tensors, initial_state)
    scale = k_TKD.shape[-1] ** -0.5 if scale is None else scale
    arguments = (initial_state, cu_seqlens, scale, normalize, output_state)
    if name == "fla" and len(v_TVE):
        with autocast_off(v_TVE):
            return fla_gated_delta_rule(*tensors, *arguments)
    out, state = chunked_gated_delta_rule(*tensors, None, *arguments, slices=0, form="delta")
    return out, state if output_state else None


def backend_of(
    name: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None
) -> str:
    """Return the backend of a call; see `choose_backend`."""
    tensors = (q, k, v, log_decay, beta, initial_state)
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    head_dim, per_channel = max(k.shape[-1], v.shape[-1]), log_decay.dim() == 3
    return choose_backend(name, v.device.type, v.dtype, head_dim, per_channel=per_channel, gradients=gradients)


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None, num_sequences: int
) -> None:
    """Raise ValueError if shapes or dtypes of the arguments of `gated_delta_rule` disagree."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or v.dim() != 3 or q.shape != k.shape or len(v) != len(k):
        raise ValueError(f"gated_delta_rule takes q and k [T, K, D] and v [T, V, E], got {shapes}")
    if k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        raise ValueError(f"{v.shape[1]} value heads cannot share {k.shape[1]} key heads evenly ({shapes})")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    per_head, per_channel = tuple(v.shape[:2]), (*v.shape[:2], k.shape[2])
    if beta.shape != per_head or log_decay.shape not in (per_head, per_channel):
        raise ValueError(
            f"beta {tuple(beta.shape)} must be [T, V] = {per_head}, and log_decay {tuple(log_decay.shape)} the same or "
            f"[T, V, D] = {per_channel}"
        )
    dtype, states = wide(v.dtype), (num_sequences, v.shape[1], k.shape[2], v.shape[2])
    if log_decay.dtype != dtype:
        raise ValueError(f"log_decay has {log_decay.dtype}; compute it in {dtype}, because its sums decide")
    if initial_state is not None and (initial_state.shape != states or initial_state.dtype != dtype):
        raise ValueError(
            f"initial_state {tuple(initial_state.shape)} {initial_state.dtype} must be [N, V, D, E] = {states} {dtype}"
        )
