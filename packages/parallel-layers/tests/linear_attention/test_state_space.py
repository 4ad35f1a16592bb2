"""State-space duality in chunks against the recurrence token by token in fp64: outputs, states, every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from token_recurrence import BORDERS, CHUNK, boundaries, state_space_recurrence
from torch import Tensor

from parallel_layers.linear_attention import operators
from parallel_layers.linear_attention.state_space import state_space_dual

GROUPS, HEADS, STATE_DIM, HEAD_DIM = 2, 6, 5, 4

Arguments = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SIZE", CHUNK)


def arguments_of(lengths: list[int], *, initial: bool = True, seed: int = 0) -> Arguments:
    """fp64 tensors; factors of the states from almost 1 to e^-20, and steps of zero."""
    torch.manual_seed(seed)
    tokens, wide = sum(lengths), {"dtype": torch.float64}
    arguments = {
        "x_TVE": torch.randn(tokens, HEADS, HEAD_DIM, **wide),
        "dt_TV": torch.randn(tokens, HEADS, **wide).mul(1.5).sub(1).exp() * (torch.rand(tokens, HEADS) > 0.1),
        "A_V": -torch.linspace(0.01, 2, HEADS, **wide),
        "B_TGD": torch.randn(tokens, GROUPS, STATE_DIM, **wide),
        "C_TGD": torch.randn(tokens, GROUPS, STATE_DIM, **wide),
        "D_V": torch.randn(HEADS, **wide),
    }
    if initial:
        arguments["initial_state"] = torch.randn(len(lengths), HEADS, STATE_DIM, HEAD_DIM, **wide)
    return arguments


def in_chunks(*arguments: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, state = state_space_dual(*arguments, **options, output_state=True)
    assert state is not None
    return out, state


def results_of(
    function: Callable[..., tuple[Tensor, Tensor]],
    arguments: Arguments,
    lengths: list[int],
    dtype: torch.dtype = torch.float64,
) -> Arguments:
    """The outputs, the last states, and the gradients of all arguments for gradients of both."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in arguments.items()}
    *tensors, D_V = (x for name, x in leaves.items() if name != "initial_state")
    results = function(*tensors, boundaries(lengths), D_V=D_V, initial_state=leaves.get("initial_state"))
    torch.manual_seed(7)
    loss = sum((x * torch.randn(x.shape).to(dtype)).sum() for x in results)
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"out": results[0].detach(), "state": results[1].detach(), **dict(zip(leaves, gradients, strict=True))}


def compare(lengths: list[int], *, initial: bool = True, dtype: torch.dtype = torch.float64, atol: float) -> None:
    """Every number within `atol` of the tensor's largest, or of 1."""
    arguments = arguments_of(lengths, initial=initial)
    ours, truth = (
        results_of(in_chunks, arguments, lengths, dtype),
        results_of(state_space_recurrence, arguments, lengths),
    )
    for name, expected in truth.items():
        scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
        torch.testing.assert_close(
            ours[name].double() / scale, expected / scale, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@example(lengths=[0], initial=False)
@example(lengths=[0, 0, 3, 0], initial=True)
@example(lengths=BORDERS, initial=True)
@given(lengths=st.lists(st.sampled_from(BORDERS), min_size=1, max_size=4), initial=st.booleans())
@settings(max_examples=15)
def test_equals_the_recurrence(lengths: list[int], initial: bool) -> None:
    compare(lengths, initial=initial, atol=1e-12)


def test_fp32_is_close_to_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SIZE", 64)
    compare([70, 3, 64], dtype=torch.float32, atol=2e-6)


@given(lengths=st.lists(st.sampled_from(BORDERS), min_size=2, max_size=4), data=st.data())
@settings(max_examples=15)
def test_a_sequence_does_not_reach_another(lengths: list[int], data: st.DataObject) -> None:
    """Other numbers in one sequence change no bit of the others' outputs, states and gradients."""
    changed = data.draw(st.integers(0, len(lengths) - 1))
    arguments, others = arguments_of(lengths), arguments_of(lengths, seed=1)
    sequence, numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.arange(len(lengths))
    owners = {"out": sequence, "x_TVE": sequence, "dt_TV": sequence, "B_TGD": sequence, "C_TGD": sequence}
    owners |= {"state": numbers, "initial_state": numbers}
    mixed = {
        name: torch.where((owners[name] == changed).view(-1, *[1] * (x.dim() - 1)), others[name], x)
        if name in owners
        else x
        for name, x in arguments.items()
    }
    plain, disturbed = (results_of(in_chunks, x, lengths, torch.float32) for x in (arguments, mixed))
    for name, owner in owners.items():
        assert torch.equal(plain[name][owner != changed], disturbed[name][owner != changed])


def test_a_state_continues_a_sequence() -> None:
    """Two sequences in pieces, with the states handed over, as in one piece."""
    lengths, cuts = [30, 9], [[13, 0], [0, 8], [17, 1]]
    arguments = arguments_of(lengths)
    expected = results_of(in_chunks, arguments, lengths)
    x, dt, a, b, c, d, state = arguments.values()
    outs: list[list[Tensor]] = [[], []]
    places = [0, lengths[0]]
    for cut in cuts:
        rows = torch.cat([torch.arange(start, start + n) for start, n in zip(places, cut, strict=True)])
        tokens = x[rows], dt[rows], a, b[rows], c[rows]
        out, state = in_chunks(*tokens, boundaries(cut), D_V=d, initial_state=state)
        for n, piece in enumerate(out.split(cut)):
            outs[n].append(piece)
            places[n] += len(piece)
    torch.testing.assert_close(torch.cat([torch.cat(pieces) for pieces in outs]), expected["out"])
    torch.testing.assert_close(state, expected["state"])


def test_the_strongest_decay_forgets() -> None:
    """exp(-1000) is 0: each output is of its own token. Sums of such decays overflow no exponential."""
    x, _, _, b, c = list(arguments_of([20], initial=False).values())[:5]
    dt = torch.ones(20, HEADS, dtype=torch.float64)
    out, _ = state_space_dual(x, dt, torch.full_like(dt[0], -1000.0), b, c, boundaries([20]))
    torch.testing.assert_close(out, (b * c).sum(-1).repeat_interleave(HEADS // GROUPS, dim=1)[..., None] * x)


@pytest.mark.parametrize("decay", [-0.01, -1, -8])
def test_the_gradient_of_a_step_is_exact_in_fp32(monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    """Where a token remembers e^-8, the decay's gradient is small beside the products of each token with itself."""
    monkeypatch.setattr(operators, "SIZE", 64)
    arguments = {name: x.float().double() for name, x in arguments_of([40], initial=False).items()}
    arguments |= {"dt_TV": torch.ones(40, HEADS).double(), "A_V": torch.full((HEADS,), decay).double()}
    ours = results_of(in_chunks, arguments, [40], torch.float32)
    truth = results_of(state_space_recurrence, arguments, [40])
    for name in ("dt_TV", "A_V"):
        assert (ours[name] - truth[name]).abs().max() < 2e-6 * truth[name].abs().max()


def test_heads_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch is computed some groups at a time, with the same numbers."""
    arguments = arguments_of([9, 20])
    whole = results_of(in_chunks, arguments, [9, 20])
    monkeypatch.setattr(operators, "MOST_ROWS", 1)
    for name, x in results_of(in_chunks, arguments, [9, 20]).items():
        torch.testing.assert_close(x, whole[name])


def test_only_the_arguments_are_saved() -> None:
    leaves = [x.float().requires_grad_() for x in arguments_of([40], initial=False).values()][:5]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        state_space_dual(*leaves, boundaries([40]))
    assert {tuple(x.shape) for x in saved} == {*(tuple(x.shape) for x in leaves), (2,)}
    assert len({x.data_ptr() for x in saved}) == len(leaves) + 2  # `dt A` and the boundaries


def test_bf16_has_the_error_of_its_arguments() -> None:
    """Also under autocast, which changes nothing."""
    narrow = {"x_TVE", "B_TGD", "C_TGD"}
    arguments = {
        name: x.bfloat16() if name in narrow else x.float() for name, x in arguments_of([50], initial=False).items()
    }
    *tensors, D_V = arguments.values()
    truth, _ = state_space_recurrence(*(x.double() for x in tensors), boundaries([50]), D_V=D_V.double())
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = state_space_dual(*tensors, boundaries([50]), D_V=D_V)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), truth, rtol=2**-8, atol=1e-5)


def test_no_boundary_is_read_on_the_host() -> None:
    """A tensor on the meta device has no values to read."""
    with torch.device("meta"):
        x, dt, b = torch.empty(9, 4, 3), torch.empty(9, 4), torch.empty(9, 2, 5)
        out, state = state_space_dual(x, dt, dt[0], b, b, torch.empty(3, dtype=torch.int32), output_state=True)
    assert state is not None
    assert (out.shape, state.shape) == ((9, 4, 3), (2, 4, 5, 3))


WRONG = {
    "shapes": (
        {"B_TGD": torch.zeros(3, 2, 4)},
        r"x \[T, V, E\] and B and C \[T, G, D\], got x \(3, 6, 4\), B",
    ),
    "heads": ({"x_TVE": torch.zeros(3, 5, 4)}, "5 heads cannot share 2 groups evenly"),
    "dtypes": ({"x_TVE": torch.zeros(3, 6, 4).half()}, "x, B, C must have one dtype, got torch.float16"),
    "steps": ({"dt_TV": torch.zeros(3)}, r"dt \(3,\) must be \[T, V\] = \(3, 6\)"),
    "skip": ({"D_V": torch.zeros(4)}, r"D \(4,\) \[V\] = \(6,\)"),
    "rounded steps": ({"dt_TV": torch.zeros(3, 6).half()}, "dt has torch.float16 and A torch.float32; compute both in"),
    "state": ({"initial_state": torch.zeros(1, 6, 4, 4)}, r"must be \[N, V, D, E\] = \(1, 6, 5, 4\) torch.float32"),
    "backend": (
        {"backend": "fla"},
        "'fla' cannot do this case: it computes the gated delta rule, not Mamba-2; use 'auto'",
    ),
    "boundaries": ({"cu_seqlens": boundaries([4])}, r"cu_seqlens \[0, 4\] must start at 0, .* end at the 3 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    arguments = {key: x.float() for key, x in arguments_of([3], initial=False).items()}
    with pytest.raises(ValueError, match=message):
        state_space_dual(**{"cu_seqlens": boundaries([3]), **arguments, **changes})
