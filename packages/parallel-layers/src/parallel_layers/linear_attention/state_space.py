"""`state_space_dual`: the recurrence of Mamba-2 over packed sequences.

Shape legend: T tokens, N sequences, G groups, V heads, D state size, E head size.
"""

from torch import Tensor

from parallel_layers.data.boundaries import check_boundaries
from parallel_layers.linear_attention.backends import MAMBA2, choose_backend
from parallel_layers.linear_attention.operators import chunked_gated_delta_rule
from parallel_layers.module.autocast import autocast_off, wide


def state_space_dual(
    x_TVE: Tensor,
    dt_TV: Tensor,
    A_V: Tensor,
    B_TGD: Tensor,
    C_TGD: Tensor,
    cu_seqlens: Tensor,
    *,
    D_V: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute the state-space model of Mamba-2 inside each sequence of a packed batch.

    Each head has a state S `[D, E]`, before the first token the initial state or zero:

        S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ,     o_t = S_tᵀ C_t + D x_t

    in the chunked form of state-space duality (https://arxiv.org/abs/2405.21060). Head h reads B and C of group
    h // (V / G). Sequences can have length zero. No communication, and no read of `cu_seqlens` on the host of a GPU.
    Only arguments and `dt A` are saved: the backward repeats the forward.

    "chunked" computes in fp32 (fp64 for fp64 input). "triton" multiplies matrices in x's dtype, with sums in fp32; the
    states between chunks have x's dtype, too.

    Args:
        x_TVE: `[T, V, E]`.
        dt_TV: The steps, >= 0, `[T, V]`, fp32 (fp64 for fp64 input).
        A_V: A <= 0, `[V]`, fp32 (fp64 for fp64 input).
        B_TGD: `[T, G, D]`, G divides V.
        C_TGD: `[T, G, D]`.
        cu_seqlens: `[N+1]` int32 boundaries of the sequences, on the tensors' device; padding is a sequence, too.
        D_V: The share of the input in the output, `[V]`, any dtype; None: zero.
        initial_state: `[N, V, D, E]` fp32 (fp64 for fp64 input); None: zero.
        output_state: Return the states behind the last tokens.
        backend: See `gated_delta_rule`.

    Returns:
        The outputs `[T, V, E]` in x's dtype, and the states `[N, V, D, E]` with `output_state`, else None.

    Raises:
        ValueError: Shapes or dtypes disagree, or the backend is unknown, not installed or does not support the call.
    """
    check_boundaries(cu_seqlens, len(x_TVE), least=2)
    check_state_space(x_TVE, dt_TV, A_V, B_TGD, C_TGD, D_V, initial_state, len(cu_seqlens) - 1)
    with autocast_off(x_TVE):
        tensors = C_TGD, B_TGD, x_TVE, dt_TV * A_V, dt_TV, D_V, initial_state, cu_seqlens
    options = {"scale": 1.0, "normalize": False, "output_state": output_state, "slices": 0}
    out, state = chunked_gated_delta_rule(*tensors, **options, form=form_of(x_TVE, B_TGD, backend))
    return out, state if output_state else None


def form_of(x_TVE: Tensor, B_TGD: Tensor, backend: str = "auto") -> str:
    """Return the form of `operators.FORMS` that the backend of a call has; see `state_space_dual`."""
    largest = max(x_TVE.shape[-1], B_TGD.shape[-1])
    name = choose_backend(backend, x_TVE.device.type, x_TVE.dtype, largest, recurrence=MAMBA2)
    return {"chunked": "state_space"}.get(name, name)


def check_state_space(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, initial_state: Tensor | None,
    num_sequences: int,
) -> None:  # fmt: skip
    """Raise ValueError if shapes or dtypes of the arguments of `state_space_dual` disagree."""
    shapes = f"x {tuple(x.shape)}, B {tuple(b.shape)}, C {tuple(c.shape)}"
    if x.dim() != 3 or b.dim() != 3 or b.shape != c.shape or len(b) != len(x):
        raise ValueError(f"state_space_dual takes x [T, V, E] and B and C [T, G, D], got {shapes}")
    heads, groups, dtype = x.shape[1], b.shape[1], wide(x.dtype)
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups evenly ({shapes})")
    if not x.dtype == b.dtype == c.dtype:
        raise ValueError(f"x, B, C must have one dtype, got {x.dtype}, {b.dtype}, {c.dtype}")
    if dt.shape != x.shape[:2] or a.shape != (heads,) or (d is not None and d.shape != (heads,)):
        raise ValueError(
            f"dt {tuple(dt.shape)} must be [T, V] = {tuple(x.shape[:2])}, and A {tuple(a.shape)} and D "
            f"{None if d is None else tuple(d.shape)} [V] = {(heads,)}"
        )
    if not dt.dtype == a.dtype == dtype:
        raise ValueError(f"dt has {dt.dtype} and A {a.dtype}; compute both in {dtype}, because sums of dt A decide")
    states = (num_sequences, heads, b.shape[2], x.shape[2])
    if initial_state is not None and (initial_state.shape != states or initial_state.dtype != dtype):
        raise ValueError(
            f"initial_state {tuple(initial_state.shape)} {initial_state.dtype} must be [N, V, D, E] = {states} {dtype}"
        )
