"""Linears in FP8: with a stand-in that computes the same mathematics, outputs and gradients are the plain layers'."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import ColumnParallelLinear, DecoderConfig, DecoderLayer, RotaryEmbedding, RowParallelLinear
from parallel_layers.linear import with_execution
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.float8 import round_again_, why_not_float8, with_float8
from parallel_layers.linear.low_rank import LowRank
from parallel_layers.linear_attention import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaConfig,
    Mamba2,
    Mamba2Config,
)
from parallel_layers.model.lora import add_lora_
from parallel_layers.model.options import LoraOptions
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(
    hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64, attention_bias=True,
    output_bias=True,
)  # fmt: skip
TOKENS = 10


class TransformerEngine:
    """Stands for the package: the names that are used of it, and what was asked."""

    def __init__(self, reason: str = "") -> None:
        self.recipes: list[str] = []
        self.products: list[tuple[int, ...]] = []
        self.recipe: Any = None
        engine = self

        class Linear(nn.Module):
            def __init__(
                self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: str
            ) -> None:
                super().__init__()
                assert (bias, device) == (False, "meta")
                shape = out_features, in_features
                self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))

            def forward(self, x: Tensor) -> Tensor:
                assert engine.recipe is not None
                assert all(size % 16 == 0 for size in (*x.shape, *self.weight.shape))
                engine.products.append(tuple(x.shape))
                return x @ self.weight.T

        @contextmanager
        def autocast(*, enabled: bool, recipe: Any) -> Iterator[None]:
            assert enabled
            engine.recipe = recipe
            yield
            engine.recipe = None

        def recipe_named(name: str) -> Any:
            return lambda: engine.recipes.append(name) or name

        names = ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
        self.pytorch = SimpleNamespace(
            Linear=Linear,
            autocast=autocast,
            is_fp8_available=lambda return_reason: (not reason, reason),
            is_mxfp8_available=lambda return_reason: (False, "needs Blackwell"),
        )
        self.recipe_module = SimpleNamespace(**{name: recipe_named(name) for name in names})

    @contextmanager
    def installed(self) -> Iterator["TransformerEngine"]:
        package, common, pytorch = (ModuleType(f"transformer_engine{part}") for part in ("", ".common", ".pytorch"))
        package.__spec__ = ModuleSpec("transformer_engine", None)
        vars(common).update(recipe=self.recipe_module)
        vars(pytorch).update(vars(self.pytorch))
        vars(package).update(common=common, pytorch=pytorch)
        with pytest.MonkeyPatch.context() as patch:
            for module in (package, common, pytorch):
                patch.setitem(sys.modules, module.__name__, module)
            yield self


def new_layer(group: ProcessGroup | None, sequence_parallel: bool) -> DecoderLayer:
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, placement=Placement(group, sequence_parallel))
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer


def run(layer: nn.Module, parameters: nn.Module, x: Tensor, seed: Tensor) -> list[Tensor]:
    """Output, and the gradients of x and of every parameter."""
    rotary = RotaryEmbedding(16)(torch.arange(TOKENS))
    leaf = x.clone().requires_grad_()
    out = layer(leaf, rotary, torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS)
    return [out.detach(), *torch.autograd.grad(out, [leaf, *parameters.parameters()], seed)]


def _run_both(group: ProcessGroup | None, sequence_parallel: bool, x: Tensor, seed: Tensor) -> Any:
    layer = new_layer(group, sequence_parallel)
    if group is not None and sequence_parallel:
        x, seed = (part.chunk(group.size())[group.rank()] for part in (x, seed))
    with TransformerEngine().installed() as engine:
        view = with_float8(layer)
        names = [name for name, module in view.named_modules() if getattr(module, "float8", False)]
        ours = run(view, layer, x, seed)
    return ours, run(layer, layer, x, seed), names, engine.products


@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_equals_the_plain_layer(ranks: RankPool, world: int, sequence_parallel: bool) -> None:
    """All four linears, with 10 tokens that are padded to 16."""
    arguments = sequence_parallel, torch.randn(TOKENS, 32), torch.randn(TOKENS, 32)
    results = [_run_both(None, *arguments)] if world == 1 else ranks.run(_run_both, *arguments, world=world)
    for ours, theirs, names, products in results:
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
        assert names == ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
        assert [shape[0] for shape in products] == [16] * 4


RECURRENT: list[tuple[Any, Any, list[str]]] = [
    (
        GatedDeltaNet,
        GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
        ["in_proj_qkvz", "out_proj"],
    ),
    (KimiDeltaAttention, KimiDeltaConfig(num_heads=2, head_dim=16), ["in_proj_qkv", "g_b_proj", "out_proj"]),
    (Mamba2, Mamba2Config(num_heads=16, head_dim=2, num_groups=2, state_size=8), ["in_proj", "out_proj"]),
]


@pytest.mark.parametrize(("build", "config", "chosen"), RECURRENT)
def test_recurrent_layers_equal_the_plain_layers(build: Any, config: Any, chosen: list[str]) -> None:
    """All projections but those that decide decays alone, of gated delta networks and Kimi's delta attention."""
    torch.manual_seed(0)
    layer, x = build(32, config), torch.randn(TOKENS, 32, requires_grad=True)
    bounds, seed, results = torch.tensor([0, 3, TOKENS], dtype=torch.int32), torch.randn(TOKENS, 32), []
    with TransformerEngine().installed() as engine:
        view = with_float8(layer)
        for module in (view, layer):
            out = module(x, bounds)
            results.append((out, *torch.autograd.grad(out, [x, *layer.parameters()], seed)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert [name for name, module in view.named_modules() if getattr(module, "float8", False)] == chosen
    assert [shape[0] for shape in engine.products] == [16] * len(chosen)


def test_weights_rounded_again_keep_no_copies() -> None:
    """The switch of Transformer Engine's linears, and of those of this model alone."""
    with TransformerEngine().installed():
        layer, other = with_float8(new_layer(None, False)), with_float8(new_layer(None, False))
    round_again_(layer)
    for model, switched in ((layer, True), (other, False)):
        products = [module.execution.product for module in model.modules() if getattr(module, "float8", False)]
        assert [vars(product.linear).get("_is_fsdp2", False) for product in products] == [switched] * 4


@pytest.mark.parametrize("adapters_first", [True, False])
def test_a_base_in_fp8_takes_adapters(adapters_first: bool) -> None:
    x, seed = torch.randn(TOKENS, 32).double(), torch.randn(TOKENS, 32).double()
    found = []
    for fp8 in (False, True):
        layer: nn.Module = new_layer(None, False).double()
        with TransformerEngine().installed():
            layer = with_float8(layer) if fp8 and not adapters_first else layer
            add_lora_(layer, LoraOptions(rank=2))
            layer = with_float8(layer) if fp8 and adapters_first else layer
            torch.manual_seed(1)
            for module in layer.modules():
                if isinstance(module, LowRank):
                    nn.init.normal_(module.B, std=0.1)
            adapters = nn.ParameterList(parameter for parameter in layer.parameters() if parameter.requires_grad)
            found.append(run(layer, adapters, x, seed))
    assert len(found[0]) == 2 + 2 * 4
    torch.testing.assert_close(found[1], found[0])


def _run_options(group: ProcessGroup) -> None:
    place: dict[str, Any] = {"placement": Placement(group), "bias": True}
    divided: dict[str, Any] = {"placement": Placement(group, sequence_parallel=True), "bias": True}
    layers = [
        ColumnParallelLinear(32, 32, reduce_gradient=False, **place),
        RowParallelLinear(32, 32, **place),
        RowParallelLinear(32, 32, **divided),
    ]
    with TransformerEngine().installed():
        for layer in layers:
            nn.init.normal_(layer.bias)
            size = layer.weight.shape[1]
            results = []
            for module in (with_float8(layer), layer):
                x = torch.arange(6.0 * size).view(2, 3, size).div(99).requires_grad_()
                y = module(x)
                results.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))))
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(with_float8(layer)(x[:0]), layer(x[:0]))


def test_options(ranks: RankPool) -> None:
    ranks.run(_run_options, world=2)


def test_which_linears() -> None:
    model = nn.ModuleDict(
        {
            "able": ColumnParallelLinear(32, 32),
            "left_out": ColumnParallelLinear(32, 32),
            "odd": ColumnParallelLinear(32, 40),
        }
    )
    with TransformerEngine().installed():
        view = with_float8(model, where=lambda name, module: name != "left_out")
        assert {name: module.float8 for name, module in view.items()} == {name: name == "able" for name in model}
        assert [name for name, _ in view.named_parameters()] == [name for name, _ in model.named_parameters()]
        again = with_execution(view, overlap="collectives")["able"].execution
        assert again.product is view["able"].execution.product
        with pytest.raises(
            ValueError, match="no linear or experts of the model can be in FP8: recipe='current' needs multiples of"
        ):
            with_float8(model["odd"])


def test_recipes() -> None:
    layer = ColumnParallelLinear(32, 32)
    with TransformerEngine().installed() as engine:
        with_float8(layer)
        assert engine.recipes == ["Float8CurrentScaling"]
        with pytest.raises(ValueError, match="recipe='mxfp8' cannot be used: needs Blackwell"):
            with_float8(layer, "mxfp8")
    with (
        TransformerEngine("compute capability 8.9 or higher required").installed(),
        pytest.raises(ValueError, match=r"recipe='current' cannot be used: compute capability 8\.9"),
    ):
        with_float8(layer)
    with pytest.raises(ValueError, match="recipe='delayed' is unknown; use one of current, block, mxfp8"):
        with_float8(layer, "delayed")


def test_absent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_layers.linear.float8.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the transformer-engine package \(extra parallel-layers\[te\]\)"):
        with_float8(ColumnParallelLinear(32, 32))


def test_one_that_does_not_load_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_layers.linear.float8.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(
        ValueError, match=r"the transformer-engine package does not load: ModuleNotFoundError: import of"
    ):
        with_float8(ColumnParallelLinear(32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_transformer_engine_itself(recipe: str) -> None:
    """Outputs and gradients within e4m3's 3 binary places (e5m2's 2 for gradients) of bf16's, in the mean square."""
    if (reason := why_not_float8(recipe)) is not None:
        assert "does not load" not in reason
        pytest.skip(reason)
    torch.manual_seed(0)
    layer = ColumnParallelLinear(512, 256, bias=True, dtype=torch.bfloat16, device="cuda")
    view = with_float8(layer, recipe)
    x, seed = (torch.randn(100, size, device="cuda").bfloat16() for size in (512, 256))
    again = with_float8(layer, recipe)
    round_again_(again)
    results = []
    for module in (view, layer, again):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        results.append((out, *torch.autograd.grad(out, (leaf, layer.weight, layer.bias), seed)))
    assert all(map(torch.equal, results.pop(), results[0]))
    for i, (ours, theirs) in enumerate(zip(*results, strict=True)):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < (0.05 if i == 0 else 0.1)
