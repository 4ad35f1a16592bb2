"""The gated delta rule in chunks against the recurrence token by token in fp64: outputs, states, every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from token_recurrence import BORDERS, CHUNK, boundaries, token_recurrence
from torch import Tensor

from parallel_layers.linear_attention import available_backends, operators
from parallel_layers.linear_attention.chunks import Chunks
from parallel_layers.linear_attention.delta_rule import gated_delta_rule

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5

Arguments = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SIZE", CHUNK)


def arguments_of(lengths: list[int], *, per_channel: bool, initial: bool = True, seed: int = 0) -> Arguments:
    """fp64 tensors of both gates; decays from almost 1 to e^-20, betas from 0 to 2."""
    torch.manual_seed(seed)
    tokens, wide = sum(lengths), {"dtype": torch.float64}
    decay = (
        torch.randn(tokens, VALUE_HEADS, KEY_DIM, **wide) if per_channel else torch.randn(tokens, VALUE_HEADS, **wide)
    )
    arguments = {
        "q_TKD": torch.randn(tokens, KEY_HEADS, KEY_DIM, **wide),
        "k_TKD": torch.randn(tokens, KEY_HEADS, KEY_DIM, **wide),
        "v_TVE": torch.randn(tokens, VALUE_HEADS, VALUE_DIM, **wide),
        "log_decay": -decay.mul(2).exp(),
        "beta_TV": torch.rand(tokens, VALUE_HEADS, **wide) * 2,
    }
    if initial:
        arguments["initial_state"] = torch.randn(len(lengths), VALUE_HEADS, KEY_DIM, VALUE_DIM, **wide)
    return arguments


def results_of(
    function: Callable[..., tuple[Tensor, Tensor]], arguments: Arguments, lengths: list[int], dtype: torch.dtype
) -> list[Tensor]:
    """The outputs, the last states, and the gradients of all arguments for gradients of both."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in arguments.items()}
    initial_state = leaves.get("initial_state")
    tokens = [x for name, x in leaves.items() if name != "initial_state"]
    out, state = function(*tokens, boundaries(lengths), normalize=True, initial_state=initial_state)
    torch.manual_seed(7)
    seeds = [torch.randn(x.shape, dtype=torch.float64).to(dtype) for x in (out, state)]
    connected = [(x, seed) for x, seed in zip((out, state), seeds, strict=True) if x.requires_grad]
    gradients = torch.autograd.grad(
        [x for x, _ in connected], list(leaves.values()), [seed for _, seed in connected], materialize_grads=True
    )
    return [out.detach(), state.detach(), *gradients]


def in_chunks(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, state = gated_delta_rule(*arguments, **options, output_state=True, backend="chunked")
    assert state is not None
    return out, state


def compare(lengths: list[int], *, per_channel: bool, initial: bool, dtype: torch.dtype, atol: float) -> None:
    """Every number within `atol` of the tensor's largest, or of 1."""
    arguments = arguments_of(lengths, per_channel=per_channel, initial=initial)
    ours = results_of(in_chunks, arguments, lengths, dtype)
    truth = results_of(token_recurrence, arguments, lengths, torch.float64)
    for x, expected in zip(ours, truth, strict=True):
        assert x.shape == expected.shape
        scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
        torch.testing.assert_close(x.double() / scale, expected / scale, rtol=0, atol=atol)


@pytest.mark.parametrize("per_channel", [False, True])
@example(lengths=[0], initial=False)
@example(lengths=[0, 0, 3, 0], initial=True)
@example(lengths=BORDERS, initial=True)
@given(lengths=st.lists(st.sampled_from(BORDERS), min_size=1, max_size=4), initial=st.booleans())
@settings(max_examples=15)
def test_equals_the_recurrence(per_channel: bool, lengths: list[int], initial: bool) -> None:
    compare(lengths, per_channel=per_channel, initial=initial, dtype=torch.float64, atol=1e-12)


@pytest.mark.parametrize("per_channel", [False, True])
def test_fp32_is_close_to_fp64(monkeypatch: pytest.MonkeyPatch, per_channel: bool) -> None:
    monkeypatch.setattr(operators, "SIZE", 64)
    compare([70, 3, 64], per_channel=per_channel, initial=True, dtype=torch.float32, atol=2e-6)


@pytest.mark.parametrize("per_channel", [False, True])
@given(lengths=st.lists(st.sampled_from(BORDERS), min_size=2, max_size=4), data=st.data())
@settings(max_examples=15)
def test_a_sequence_does_not_reach_another(per_channel: bool, lengths: list[int], data: st.DataObject) -> None:
    """Other numbers in one sequence change no bit of the others' outputs, states and gradients."""
    changed = data.draw(st.integers(0, len(lengths) - 1))
    arguments = arguments_of(lengths, per_channel=per_channel)
    others = arguments_of(lengths, per_channel=per_channel, seed=1)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mixed = {}
    for name, x in arguments.items():
        owner = torch.arange(len(lengths)) if name == "initial_state" else sequence
        mixed[name] = torch.where((owner == changed).view(-1, *[1] * (x.dim() - 1)), others[name], x)
    plain, disturbed = (results_of(in_chunks, x, lengths, torch.float32) for x in (arguments, mixed))
    for x, y in zip(plain, disturbed, strict=True):
        owner = torch.arange(len(lengths)) if x.dim() == 4 else sequence
        assert torch.equal(x[owner != changed], y[owner != changed])


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_state_continues_a_sequence(per_channel: bool) -> None:
    """In pieces of any length, with the states handed over, as in one piece."""
    lengths, cuts = [30, 9], [[13, 0], [0, 8], [1, 1], [16, 0]]
    arguments = arguments_of(lengths, per_channel=per_channel)
    state = arguments.pop("initial_state")
    sequences = {name: x.split(lengths) for name, x in arguments.items()}
    expected, last = in_chunks(*arguments.values(), boundaries(lengths), initial_state=state)
    outs: list[list[Tensor]] = [[], []]
    places = [0, 0]
    for cut in cuts:
        piece = [
            torch.cat([x[start : start + n] for x, start, n in zip(parts, places, cut, strict=True)])
            for parts in sequences.values()
        ]
        out, state = in_chunks(*piece, boundaries(cut), initial_state=state)
        for n, part in enumerate(out.split(cut)):
            outs[n].append(part)
            places[n] += len(part)
    torch.testing.assert_close(torch.cat([torch.cat(parts) for parts in outs]), expected)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_strongest_decay_forgets(per_channel: bool) -> None:
    """exp(-1000) is 0: each token writes into an empty state. Sums of such decays overflow no exponential."""
    arguments = arguments_of([20], per_channel=per_channel, initial=False)
    q, k, v, decay, beta = (x.float() for x in arguments.values())
    out, _ = gated_delta_rule(q, k, v, torch.full_like(decay, -1000.0), beta, boundaries([20]), scale=1.0)
    weights = (q * k).sum(-1).repeat_interleave(2, dim=1) * beta
    torch.testing.assert_close(out, weights[..., None] * v)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("decay", [-0.01, -1, -8])
def test_the_gradient_of_a_decay_is_exact_in_fp32(
    monkeypatch: pytest.MonkeyPatch, decay: float, per_channel: bool
) -> None:
    """Where a token remembers e^-8, the decay's gradient is small beside the products of each token with itself."""
    monkeypatch.setattr(operators, "SIZE", 64)
    arguments = arguments_of([40], per_channel=per_channel, initial=False)
    arguments["log_decay"] = torch.full_like(arguments["log_decay"], decay)
    gradients = []
    for function, dtype in ((in_chunks, torch.float32), (token_recurrence, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in arguments.values()]
        out, _ = function(*leaves, boundaries([40]), normalize=True)
        gradients.append(torch.autograd.grad(out.double().sin().sum(), leaves)[3])
    assert (gradients[0] - gradients[1]).abs().max() < 2e-6 * gradients[1].abs().max()


def test_heads_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch is computed some key heads at a time, with the same numbers."""
    arguments = arguments_of([9, 20], per_channel=False)
    whole = results_of(in_chunks, arguments, [9, 20], torch.float64)
    monkeypatch.setattr(operators, "MOST_ROWS", 1)
    for x, expected in zip(results_of(in_chunks, arguments, [9, 20], torch.float64), whole, strict=True):
        torch.testing.assert_close(x, expected)


def test_only_the_arguments_are_saved() -> None:
    arguments = arguments_of([40], per_channel=False, initial=False)
    leaves = [x.float().requires_grad_() for x in arguments.values()]
    saved: list[Tensor] = []
    bounds = boundaries([40])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gated_delta_rule(*leaves, bounds, normalize=True)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (*leaves, bounds)}


def test_bf16_has_the_error_of_its_arguments() -> None:
    arguments = {name: x.bfloat16() for name, x in arguments_of([50], per_channel=False, initial=False).items()}
    q, k, v, decay, beta = arguments.values()
    out, _ = gated_delta_rule(q, k, v, decay.float(), beta, boundaries([50]), normalize=True)
    truth, _ = token_recurrence(*(x.double() for x in arguments.values()), boundaries([50]), normalize=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, truth.bfloat16(), rtol=2**-7, atol=1e-6)


def test_autocast_changes_nothing() -> None:
    arguments = [x.float() for x in arguments_of([20], per_channel=False, initial=False).values()]
    expected, _ = gated_delta_rule(*arguments, boundaries([20]))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = gated_delta_rule(*arguments, boundaries([20]))
    assert torch.equal(out, expected)


@given(lengths=st.lists(st.sampled_from(BORDERS), min_size=1, max_size=6))
@settings(max_examples=30)
def test_chunks_hold_every_token_once(lengths: list[int]) -> None:
    """Tokens come back in order; no chunk has two sequences."""
    tokens = sum(lengths)
    chunks = Chunks.of(boundaries(lengths), tokens, CHUNK)
    x = torch.arange(1, tokens + 1)[:, None]
    cut = chunks.cut(x)
    assert torch.equal(chunks.join(cut), x)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for row, owner in zip(cut.squeeze(-1).tolist(), chunks.sequences.tolist(), strict=True):
        assert all(sequence[t - 1] == owner for t in row if t)


def test_no_boundary_is_read_on_the_host() -> None:
    """A tensor on the meta device has no values to read."""
    with torch.device("meta"):
        q, v, beta = torch.empty(9, 2, 4), torch.empty(9, 4, 4), torch.empty(9, 4)
        out, state = gated_delta_rule(
            q, q, v, beta, beta, torch.empty(3, dtype=torch.int32), output_state=True, backend="chunked"
        )
    assert state is not None
    assert (out.shape, state.shape) == ((9, 4, 4), (2, 4, 4, 4))


WRONG = {
    "queries": ({"q_TKD": torch.zeros(3, 2, 5)}, r"q and k \[T, K, D\] and v \[T, V, E\], got q \(3, 2, 5\), k"),
    "heads": ({"v_TVE": torch.zeros(3, 3, 5)}, "3 value heads cannot share 2 key heads evenly"),
    "dtypes": ({"v_TVE": torch.zeros(3, 4, 5).half()}, "q, k, v must have one dtype, got torch.float32"),
    "beta": ({"beta_TV": torch.zeros(3)}, r"beta \(3,\) must be \[T, V\] = \(3, 4\)"),
    "decay": ({"log_decay": torch.zeros(3, 4, 5)}, r"log_decay \(3, 4, 5\) the same or \[T, V, D\] = \(3, 4, 6\)"),
    "rounded decay": (
        {"log_decay": torch.zeros(3, 4).half()},
        "log_decay has torch.float16; compute it in torch.float32",
    ),
    "state": ({"initial_state": torch.zeros(1, 4, 5, 5)}, r"must be \[N, V, D, E\] = \(1, 4, 6, 5\) torch.float32"),
    "boundaries": ({"cu_seqlens": torch.tensor([0, 3])}, r"use cu_seqlens.int\(\)"),
    "no sequence": (
        {"cu_seqlens": boundaries([])},
        "1 entries; give at least 2, for a segment of length 0",
    ),
    "a longer pack": (
        {"cu_seqlens": boundaries([4])},
        r"cu_seqlens \[0, 4\] must start at 0, .* end at the 3 tokens",
    ),
    "backend": ({"backend": "flash"}, "backend='flash' is unknown; use 'auto' or one of fla, triton, chunked"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    arguments: dict[str, Any] = {
        key: x.float() for key, x in arguments_of([3], per_channel=False, initial=False).items()
    }
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{"cu_seqlens": boundaries([3]), **arguments, **changes})


def test_a_cpu_has_the_chunked_form() -> None:
    assert available_backends()[-1] == "chunked"
