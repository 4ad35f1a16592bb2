"""ParallelMLP against plain torch: gated and plain, every activation, with biases, sharded."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.linear.execution import Placement
from parallel_layers.mlp.activations import XIELU, ClampedSwiGLU
from parallel_layers.mlp.layer import ACTIVATIONS, ParallelMLP, gated
from parallel_layers.testing import RankPool

HIDDEN, INTERMEDIATE, TOKENS = 12, 16, 8
FUNCTIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def draw(is_gated: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {
        "gate.weight": torch.randn(INTERMEDIATE, HIDDEN),
        "gate.bias": torch.randn(INTERMEDIATE),
        "up.weight": torch.randn(INTERMEDIATE, HIDDEN),
        "up.bias": torch.randn(INTERMEDIATE),
        "down.weight": torch.randn(HIDDEN, INTERMEDIATE),
        "down.bias": torch.randn(HIDDEN),
    }
    return {name: t for name, t in tensors.items() if is_gated or not name.startswith("gate")}


def shard(full: dict[str, Tensor], is_gated: bool, rank: int, size: int) -> dict[str, Tensor]:
    """Weights or gradients of this rank, under our names."""
    local = {"down_proj.weight": full["down.weight"].chunk(size, 1)[rank], "down_proj.bias": full["down.bias"]}
    for kind in ("weight", "bias"):
        if is_gated:
            parts = [full[f"{name}.{kind}"].chunk(size)[rank] for name in ("gate", "up")]
            local[f"gate_up_proj.{kind}"] = torch.cat(parts)
        else:
            local[f"up_proj.{kind}"] = full[f"up.{kind}"].chunk(size)[rank]
    return local


def run_ours(
    group: ProcessGroup | None, x: Tensor, seed: Tensor, activation: str, is_gated: bool, sequence_parallel: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    mlp = ParallelMLP(
        HIDDEN, INTERMEDIATE, activation=activation, gated=is_gated, bias=True,
        placement=Placement(group, sequence_parallel),
    )  # fmt: skip
    mlp.load_state_dict(shard(draw(is_gated), is_gated, rank, size))
    if sequence_parallel:
        x, seed = x.chunk(size)[rank], seed.chunk(size)[rank]
    leaf = x.clone().requires_grad_()
    out = mlp(leaf)
    out.backward(seed)
    return out.detach(), leaf.grad, {name: p.grad for name, p in mlp.named_parameters()}


def run_reference(x: Tensor, seed: Tensor, activation: str, is_gated: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    full = {name: t.requires_grad_() for name, t in draw(is_gated).items()}
    leaf = x.clone().requires_grad_()
    hidden = F.linear(leaf, full["up.weight"], full["up.bias"])
    if is_gated:
        hidden = FUNCTIONS[activation](F.linear(leaf, full["gate.weight"], full["gate.bias"])) * hidden
    else:
        hidden = FUNCTIONS[activation](hidden)
    out = F.linear(hidden, full["down.weight"], full["down.bias"])
    out.backward(seed)
    return out.detach(), leaf.grad, {name: t.grad for name, t in full.items()}


def check(results: list[tuple], activation: str, is_gated: bool, sequence_parallel: bool, data: Tensor) -> None:
    out, d_x, d_weights = run_reference(*data, activation, is_gated)
    for i, expected in enumerate((out, d_x)):
        parts = [result[i] for result in results]
        for ours in [torch.cat(parts)] if sequence_parallel else parts:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
    for rank, result in enumerate(results):
        for name, expected in shard(d_weights, is_gated, rank, len(results)).items():
            torch.testing.assert_close(result[2][name], expected, rtol=1e-5, atol=1e-4)


def test_every_activation_is_known() -> None:
    assert FUNCTIONS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_equals_plain_torch(activation: str, is_gated: bool) -> None:
    data = torch.randn(2, TOKENS, HIDDEN)
    check([run_ours(None, *data, activation, is_gated, False)], activation, is_gated, False, data)


@pytest.mark.parametrize(
    ("tp", "activation", "is_gated", "sequence_parallel"),
    [(2, "silu", True, False), (4, "gelu", True, True), (2, "relu2", False, True), (4, "relu2", False, False)],
)
def test_sharded(ranks: RankPool, tp: int, activation: str, is_gated: bool, sequence_parallel: bool) -> None:
    data = torch.randn(2, TOKENS, HIDDEN)
    results = ranks.run(run_ours, *data, activation, is_gated, sequence_parallel, world=tp)
    check(results, activation, is_gated, sequence_parallel, data)


@pytest.mark.parametrize("is_gated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(is_gated: bool) -> None:
    mlp = ParallelMLP(HIDDEN, INTERMEDIATE, gated=is_gated)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        x, seed = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randn(tokens, HIDDEN)
        leaves, outs = [x, *mlp.parameters()], (compiled(x), mlp(x))
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out, leaves, seed) for out in outs))


def test_clamped_swiglu_by_its_formula() -> None:
    """On both sides of every bound, with the gradients' zeros beyond them."""
    gate_up = (torch.randn(50, 2 * INTERMEDIATE, dtype=torch.float64) * 9).requires_grad_()
    gate, up = gate_up.chunk(2, dim=1)
    g, u = torch.minimum(gate, torch.tensor(7.0)), up.clip(-7, 7)
    expected = g / (1 + torch.exp(-1.702 * g)) * (u + 1)
    ours = gated(ClampedSwiGLU(), gate_up)
    torch.testing.assert_close(ours, expected)
    (gradient,), (wanted,) = (torch.autograd.grad(y.square().sum(), gate_up) for y in (ours, expected))
    torch.testing.assert_close(gradient, wanted)
    beyond = torch.cat((gate > 7, up.abs() > 7), dim=1)
    assert 100 < beyond.sum() < beyond.numel()
    assert not gradient[beyond].any()


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """https://arxiv.org/abs/2411.13010, equations 6 to 8, with beta = 0.5 and the bound of transformers."""
    below = (torch.expm1(x.clamp(max=-1e-6)) - x) * (0.5 + F.softplus(alpha_n))
    return torch.where(x > 0, F.softplus(alpha_p) * x**2, below) + 0.5 * x


def run_xielu(group: ProcessGroup | None, data: Tensor, sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    mlp = ParallelMLP(
        HIDDEN, INTERMEDIATE, activation="xielu", gated=False, bias=True,
        placement=Placement(group, sequence_parallel),
    )  # fmt: skip
    mlp.load_state_dict(shard(draw(False), False, rank, size), strict=False)
    x, seed = data.chunk(size, 1)[rank] if sequence_parallel else data
    out = mlp(x)
    out.backward(seed)
    return out.detach(), {name: p.grad for name, p in mlp.named_parameters()}


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_xielu(ranks: RankPool, tp: int, sequence_parallel: bool) -> None:
    data = torch.randn(2, TOKENS, HIDDEN)
    full = {name: t.requires_grad_() for name, t in draw(False).items()}
    alphas = [torch.tensor([math.log(math.expm1(a))], requires_grad=True) for a in (0.8, 0.3)]
    inner = xielu(F.linear(data[0], full["up.weight"], full["up.bias"]), *alphas)
    expected = F.linear(inner, full["down.weight"], full["down.bias"])
    expected.backward(data[1])
    results = ranks.run(run_xielu, data, sequence_parallel, world=tp)
    parts = [out for out, _ in results]
    for ours in [torch.cat(parts)] if sequence_parallel else parts:
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-4)
    for rank, (_, gradients) in enumerate(results):
        wanted = shard({name: t.grad for name, t in full.items()}, False, rank, tp)
        wanted |= {f"act_fn.alpha_{which}": alpha.grad for which, alpha in zip("pn", alphas, strict=True)}
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-4 * float(wanted[name].abs().max()))


def test_xielu_in_fp64() -> None:
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    activation = XIELU(dtype=torch.float64)
    expected = xielu(x, activation.alpha_p, activation.alpha_n)
    torch.testing.assert_close(activation(x), expected, rtol=1e-14, atol=1e-14)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"activation='xielu' is unknown; known: gelu, .* and xielu without a gate"):
        ParallelMLP(HIDDEN, INTERMEDIATE, activation="xielu")
    with pytest.raises(ValueError, match=r"activation='mish' is unknown; known: gelu, gelu_pytorch_tanh"):
        ParallelMLP(HIDDEN, INTERMEDIATE, activation="mish")
    with pytest.raises(ValueError, match=r"activation=ClampedSwiGLU\(alpha=1.702, limit=7.0\) is unknown; known: gelu"):
        ParallelMLP(HIDDEN, INTERMEDIATE, activation=ClampedSwiGLU(), gated=False)
    with pytest.raises(ValueError, match=r"activation='mish' is unknown"):
        gated("mish", torch.zeros(2, 4))
