"""The recurrences and the convolution over context-parallel ranks against one rank.

Outputs, every gradient, and the numbers that are sent.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from token_recurrence import boundaries, state_space_recurrence, token_recurrence
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention import ContextParallel, Layout, gather_sequence, split_sequence
from parallel_layers.attention.context_parallel.sequence_layout import layout_of
from parallel_layers.distributed import collectives
from parallel_layers.distributed.async_collectives import all_gather
from parallel_layers.distributed.parallel_dims import ParallelDims
from parallel_layers.linear.execution import Placement
from parallel_layers.linear_attention import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaConfig,
    Mamba2,
    Mamba2Config,
    context_parallel,
    fla,
    operators,
)
from parallel_layers.linear_attention.backends import why_not
from parallel_layers.linear_attention.context_parallel import (
    context_parallel_convolution,
    context_parallel_delta_rule,
    context_parallel_state_space,
)
from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.head_exchange import ulysses_delta_rule, ulysses_state_space
from parallel_layers.module.sharding import blocks_of
from parallel_layers.testing import RankPool

Form = Layout | Literal["heads"]
Operator = Callable[..., tuple[Tensor, None]]

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WINDOW = 2, 4, 6, 5, 5, 4
# 48 tokens, which are 12 for a rank or 6 for a slice of four ranks' zigzag.
LENGTHS = {
    "one": [48],
    "ends at borders": [12, 6, 6, 24],
    "around borders": [11, 1, 0, 0, 1, 10, 14, 11],
    "inside the window": [13, 1, 11, 22, 1],
    "short": [1, 0, 2, 0, 3] * 8,
    "long in the middle": [2, 44, 2],
}


def delta_inputs(per_channel: bool) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)]
    q, k, v = (torch.randn(48, *size, dtype=torch.float64) for size in sizes)
    # Mild decays, so that states are felt over all ranks.
    decay = -torch.rand(48, VALUE_HEADS, *[KEY_DIM] * per_channel, dtype=torch.float64) / 4
    return [q, k, v, decay, torch.rand(48, VALUE_HEADS, dtype=torch.float64), torch.randn_like(v)]


def layout_and_operator(form: Form, handed_over: Operator, exchanged: Operator) -> tuple[Layout, Operator]:
    return ("contiguous", exchanged) if form == "heads" else (form, partial(handed_over, layout=form))


def run_delta_rule(
    group: ProcessGroup, tensors: list[Tensor], lengths: list[int], form: Form, size: int = 4
) -> list[Tensor]:
    """The gathered output and gradients, of this rank's tokens, with chunks of `size` tokens."""
    layout, operator = layout_and_operator(form, context_parallel_delta_rule, ulysses_delta_rule)
    *leaves, seed = (split_sequence(x, group, layout=layout).clone() for x in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with patch.object(operators, "SIZE", size):
        bounds = boundaries(lengths).to(seed.device)
        out, _ = operator(*leaves, bounds, group=group, normalize=True)
        out.backward(seed)
    return [gather_sequence(x, group, layout=layout) for x in (out.detach(), *(leaf.grad for leaf in leaves))]


@cache
def delta_rule_of_one_rank(name: str, per_channel: bool) -> list[Tensor]:
    """The output and gradients of the recurrence token by token."""
    *inputs, seed = delta_inputs(per_channel)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, _ = token_recurrence(*leaves, boundaries(LENGTHS[name]), normalize=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]


# In every run each form has one kind of decay, and the first has both.
FORMS = [("contiguous", 3, False), ("contiguous", 3, True), ("zigzag", 4, False), ("heads", 3, True)]
FORMS += [("zigzag", 4, True), ("heads", 3, False)]
FORMS += [
    (form, world, per_channel) for form in ("contiguous", "heads") for world in (2, 4) for per_channel in (False, True)
]
FORMS += [("zigzag", 2, False), ("zigzag", 2, True)]


@pytest.mark.parametrize(
    ("form", "world", "per_channel"),
    [*FORMS[:4], *(pytest.param(*case, marks=pytest.mark.slow) for case in FORMS[4:])],
)
def test_the_recurrence_equals_one_rank(ranks: RankPool, form: Form, world: int, per_channel: bool) -> None:
    """Three ranks do not divide the four heads evenly."""
    tensors = delta_inputs(per_channel)
    for name, lengths in LENGTHS.items():
        expected = delta_rule_of_one_rank(name, per_channel)
        for results in ranks.run(run_delta_rule, tensors, lengths, form, world=world):
            for ours, truth in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


def run_state_space(group: ProcessGroup, tensors: list[Tensor], lengths: list[int], form: Form) -> list[Tensor]:
    """The gathered output and gradients; those of A and D are summed."""
    layout, operator = layout_and_operator(form, context_parallel_state_space, ulysses_state_space)
    *tokens, a, d, seed = tensors
    leaves = [split_sequence(x, group, layout=layout).clone().requires_grad_() for x in tokens]
    x, dt, b, c = leaves
    with patch.object(operators, "SIZE", 4):
        options: dict[str, Any] = {"D_V": d.requires_grad_(), "group": group}
        out, _ = operator(x, dt, a.requires_grad_(), b, c, boundaries(lengths), **options)
        out.backward(split_sequence(seed, group, layout=layout))
    gathered = [gather_sequence(t, group, layout=layout) for t in (out.detach(), *(leaf.grad for leaf in leaves))]
    return [*gathered, *(collectives.reduce_from_tensor_parallel(t.grad, group) for t in (a, d))]


@pytest.mark.parametrize(
    ("form", "world"),
    [
        pytest.param("contiguous", 2, marks=pytest.mark.slow),
        ("contiguous", 3),
        ("zigzag", 4),
        *(pytest.param("heads", world, marks=pytest.mark.slow) for world in (2, 4)),
        ("heads", 3),
    ],
)
def test_the_state_space_equals_one_rank(ranks: RankPool, form: Form, world: int) -> None:
    _, b, x, decay, dt, seed = delta_inputs(per_channel=False)
    tensors = [x, dt, b, torch.randn_like(b), decay[0], torch.randn_like(decay[0]), seed]
    for lengths in LENGTHS.values():
        leaves = [t.clone().requires_grad_() for t in tensors[:-1]]
        x, dt, b, c, a, d = leaves
        out, _ = state_space_recurrence(x, dt, a, b, c, boundaries(lengths), D_V=d)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, seed)]
        for results in ranks.run(run_state_space, tensors, lengths, form, world=world):
            for ours, truth in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


def run_convolution(group: ProcessGroup, tensors: list[Tensor], lengths: list[int], layout: Layout) -> list[Tensor]:
    x, weight, bias, seed = tensors
    leaf, local_seed = (split_sequence(t, group, layout=layout).clone() for t in (x, seed))
    leaves = [leaf.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    options = {"bias": bias, "activation": "silu", "group": group, "layout": layout}
    out, _ = context_parallel_convolution(leaf, weight, boundaries(lengths), **options)
    d_x, d_weight, d_bias = torch.autograd.grad(out, leaves, local_seed)
    gathered = [gather_sequence(t, group, layout=layout) for t in (out.detach(), d_x)]
    return [*gathered, *(collectives.reduce_from_tensor_parallel(t, group) for t in (d_weight, d_bias))]


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        ("contiguous", WINDOW),
        ("zigzag", 9),
        pytest.param("contiguous", 9, marks=pytest.mark.slow),
        pytest.param("zigzag", WINDOW, marks=pytest.mark.slow),
        ("contiguous", 1),
    ],
)
def test_the_convolution_equals_one_rank(ranks: RankPool, layout: Layout, window: int) -> None:
    """Also for a window that is longer than a slice of 6 tokens, and for one that reads no earlier token."""
    torch.manual_seed(0)
    wide: dict[str, Any] = {"dtype": torch.float64}
    tensors = [torch.randn(48, CHANNELS, **wide), torch.randn(CHANNELS, window, **wide), torch.randn(CHANNELS, **wide)]
    tensors.append(torch.randn_like(tensors[0]))
    for lengths in LENGTHS.values():
        leaves = [x.clone().requires_grad_() for x in tensors[:-1]]
        x, weight, bias = leaves
        out, _ = short_convolution(x, weight, boundaries(lengths), bias=bias, activation="silu")
        expected = [out.detach(), *torch.autograd.grad(out, leaves, tensors[-1])]
        for results in ranks.run(run_convolution, tensors, lengths, layout, world=4):
            for ours, truth in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, truth)


def run_both(group: ProcessGroup, packs: list[list[Tensor]], lengths: list[int], form: Form) -> list[list[Tensor]]:
    """The outputs and the gradients of tokens of the delta rule, Mamba-2 and the convolution, for each pack."""
    results = []
    for tensors in packs:
        q, k, v, _, beta, seed = tensors
        found = run_delta_rule(group, tensors, lengths, form)
        space = [v, beta, k, q, -torch.ones(VALUE_HEADS).double(), torch.ones(VALUE_HEADS).double(), seed]
        found += run_state_space(group, space, lengths, form)[:5]
        taps = torch.linspace(-1, 1, VALUE_DIM * WINDOW, dtype=torch.float64).view(VALUE_DIM, WINDOW)
        layout = "contiguous" if form == "heads" else form
        convolved = [v[:, 0], taps, torch.ones(VALUE_DIM).double(), seed[:, 0]]
        found += run_convolution(group, convolved, lengths, layout)[:2]
        results.append(found)
    return results


@pytest.mark.parametrize(("form", "world"), [("contiguous", 3), ("zigzag", 4), ("heads", 2)])
def test_a_sequence_does_not_reach_another(ranks: RankPool, form: Form, world: int) -> None:
    """Other numbers in one sequence change no bit of the other sequences, wherever the ranks' borders are."""
    plain = delta_inputs(per_channel=form == "zigzag")
    for lengths in LENGTHS.values():
        changed = lengths.index(max(lengths[1:] or lengths))
        kept = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) != changed
        others = [torch.where(kept.view(-1, *[1] * (x.dim() - 1)), x, x.roll(7, 0) * 0.5) for x in plain]
        for before, after in ranks.run(run_both, [plain, others], lengths, form, world=world):
            for x, y in zip(before, after, strict=True):
                assert torch.equal(x[kept], y[kept])
                assert not torch.equal(x, y)


@contextmanager
def numbers_gathered() -> Iterator[list[int]]:
    """Count the numbers that this rank sends in each all-gather of the recurrence."""
    counts: list[int] = []

    def count(x: Tensor, group: ProcessGroup) -> Tensor:
        counts.append(x.numel())
        return all_gather(x, group)

    with patch.object(context_parallel, "all_gather", count):
        yield counts


def numbers_sent(group: ProcessGroup, tokens: int, layout: Layout, delta: bool) -> list[int]:
    torch.manual_seed(group.rank())
    q, v = torch.randn(tokens, KEY_HEADS, KEY_DIM), torch.randn(tokens, VALUE_HEADS, VALUE_DIM)
    gate = torch.rand(tokens, VALUE_HEADS)
    with numbers_gathered() as counts:
        bounds = boundaries([tokens * group.size()])
        v.requires_grad_()
        if delta:
            out, _ = context_parallel_delta_rule(q, q, v, -gate, gate, bounds, group=group, layout=layout)
        else:
            out, _ = context_parallel_state_space(v, gate, -gate[0], q, q, bounds, group=group, layout=layout)
        out.sum().backward()
    return counts


@pytest.mark.parametrize("delta", [True, False])
def test_what_is_sent_does_not_depend_on_the_tokens(ranks: RankPool, delta: bool) -> None:
    """A map forward and a gradient backward for each slice, heads · d_k · (d_k + d_v) and heads · d_k · d_v numbers.

    The transition of a state space is one column.
    """
    columns = KEY_DIM if delta else 1
    expected = [VALUE_HEADS * KEY_DIM * (columns + VALUE_DIM), VALUE_HEADS * KEY_DIM * VALUE_DIM]
    for tokens in (8, 40):
        assert ranks.run(numbers_sent, tokens, "contiguous", delta, world=2) == [expected] * 2
        assert ranks.run(numbers_sent, tokens, "zigzag", delta, world=2) == [[2 * n for n in expected]] * 2


LAYERS: dict[str, tuple[Any, Any]] = {
    "delta rule": (
        GatedDeltaNet,
        GatedDeltaNetConfig(
            num_key_heads=KEY_HEADS, num_value_heads=VALUE_HEADS, key_head_dim=KEY_DIM, value_head_dim=VALUE_DIM
        ),
    ),
    "channel gates": (KimiDeltaAttention, KimiDeltaConfig(num_heads=VALUE_HEADS, head_dim=KEY_DIM)),
    "state space": (
        Mamba2,
        # Two ranks share the group.
        Mamba2Config(num_heads=VALUE_HEADS, head_dim=VALUE_DIM, num_groups=1, state_size=KEY_DIM),
    ),
}


def run_layer(
    group: ProcessGroup, kind: str, x: Tensor, seed: Tensor, lengths: list[int], form: ContextParallel
) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Any]]]:
    """On cp 2 and tp 2 with sequence parallelism; gradients are summed over the context, each with its place."""
    mesh = ParallelDims(cp=2, tp=2).build_mesh("cpu", ranks=torch.distributed.get_process_group_ranks(group))
    cp, tp, layout = mesh["cp"].get_group(), mesh["tp"].get_group(), layout_of(form)
    torch.manual_seed(5)
    build, config = LAYERS[kind]
    layer = build(
        8, config, placement=Placement(tp, sequence_parallel=True), context_group=cp, context_parallel=form,
        dtype=torch.float64,
    )  # fmt: skip
    leaf, local_seed = (split_sequence(t, cp, layout=layout).chunk(2)[tp.rank()].clone() for t in (x, seed))
    with numbers_gathered() as counts:
        out = layer(leaf.requires_grad_(), boundaries(lengths))
        out.backward(local_seed)
    assert len(counts) == (0 if form == "heads" else 2)  # maps of states
    gathered = (
        gather_sequence(collectives.gather_from_sequence_parallel(t, tp), cp, layout=layout)
        for t in (out.detach(), leaf.grad)
    )
    summed = {name: collectives.reduce_from_tensor_parallel(p.grad, cp) for name, p in layer.named_parameters()}
    owners = {name: name.rpartition(".") for name in summed}
    blocks = {name: list(blocks_of(layer.get_submodule(path), last)) for name, (path, _, last) in owners.items()}
    return *gathered, {name: (gradient, blocks[name]) for name, gradient in summed.items()}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("form", ["ulysses", "ring", "heads"])
def test_the_layer_equals_one_rank(ranks: RankPool, form: ContextParallel, kind: str) -> None:
    torch.manual_seed(0)
    x, seed = torch.randn(2, 48, 8, dtype=torch.float64)
    lengths = LENGTHS["around borders"]
    torch.manual_seed(5)
    layer = LAYERS[kind][0](8, LAYERS[kind][1], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    out = layer(leaf, boundaries(lengths))
    out.backward(seed)
    for ours, d_x, gradients in ranks.run(run_layer, kind, x, seed, lengths, form, world=4):
        torch.testing.assert_close(ours, out.detach())
        torch.testing.assert_close(d_x, leaf.grad)
        for name, (gradient, blocks) in gradients.items():
            for here, there in blocks:
                torch.testing.assert_close(gradient[here], layer.get_parameter(name).grad[there])


def run_mistaken(group: ProcessGroup, name: str, tokens: int, bounds: Tensor) -> None:
    x, options = torch.zeros(tokens, 1, 2), {"group": group, "layout": "zigzag"}
    if name == "delta rule":
        context_parallel_delta_rule(x, x, x, x[..., 0], x[..., 0], bounds, **options)
    elif name == "state space":
        context_parallel_state_space(x, x[..., 0], x[0, :, 0], x, x, bounds, **options)
    else:
        context_parallel_convolution(x[:, 0], torch.ones(2, 4), bounds, **options)


@pytest.mark.parametrize("name", ["delta rule", "state space", "convolution"])
def test_mistakes_are_refused(ranks: RankPool, name: str) -> None:
    with pytest.raises(ValueError, match="3 tokens of a rank do not divide into 2 slices; pad the pack"):
        ranks.run(run_mistaken, name, 3, boundaries([6]), world=2)
    with pytest.raises(ValueError, match=r"cu_seqlens \[0, 4\] must start at 0, .* end at the 8 tokens"):
        ranks.run(run_mistaken, name, 4, boundaries([4]), world=2)
    with pytest.raises(ValueError, match="cu_seqlens must be 1-D int32"):
        ranks.run(run_mistaken, name, 4, boundaries([8]).long(), world=2)


def test_a_pack_is_described_to_fla_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its boundaries are written again."""
    built: list[tuple[list[int], Any, str]] = []

    def build(cu_seqlens: Tensor, group: Any, *, layout: str) -> int:
        built.append((cu_seqlens.tolist(), group, layout))
        return len(built)

    monkeypatch.setitem(sys.modules, "fla.ops.cp", SimpleNamespace(build_cp_context=build))
    bounds, group = boundaries([2, 4]), object()
    assert [fla._context(bounds, group, "zigzag") for _ in range(2)] == [1, 1]
    assert [fla._context(bounds, group, layout) for layout in ("contiguous", "zigzag")] == [2, 1]
    bounds[1] = 3
    assert fla._context(bounds, group, "zigzag") == 3
    assert built == [([0, 2, 6], group, "zigzag"), ([0, 2, 6], group, "contiguous"), ([0, 3, 6], group, "zigzag")]


def run_on_gpus(group: ProcessGroup, tensors: list[Tensor], lengths: list[int], form: Form) -> list[Tensor]:
    return [x.cpu() for x in run_delta_rule(group, [x.cuda() for x in tensors], lengths, form, size=64)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", ["contiguous", "zigzag"])
def test_the_kernels_of_fla_over_two_gpus(nccl_ranks: RankPool, form: Form, per_channel: bool) -> None:
    """In bf16 against the recurrence token by token in fp64."""
    if reason := why_not("fla", "cuda", torch.bfloat16, 64, per_channel=per_channel, gradients=True):
        pytest.skip(f"fla: {reason}")
    torch.manual_seed(0)
    q, k, v, seed = (torch.randn(480, heads, 64).bfloat16() for heads in (2, 2, 4, 4))
    tensors = [q, k, v, -torch.rand(480, 4, *[64] * per_channel) / 4, torch.rand(480, 4).bfloat16(), seed]
    for lengths in LENGTHS.values():
        leaves = [x.cuda().double().requires_grad_() for x in tensors[:-1]]
        longer = [10 * length for length in lengths]
        out, _ = token_recurrence(*leaves, boundaries(longer).cuda(), normalize=True)
        truth = [out.detach(), *torch.autograd.grad(out, leaves, seed.cuda().double())]
        for results in nccl_ranks.run(run_on_gpus, tensors, longer, form, world=2):
            for ours, whole in zip(results, truth, strict=True):
                assert (ours - whole.cpu()).abs().max() <= 2e-2 * whole.abs().max()
