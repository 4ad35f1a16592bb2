"""Adapters on every layer and grid give what the weights W + scaling B A give, and autograd their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    Execution,
    ParallelDims,
    RotaryEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from parallel_layers.attention.config import LatentConfig
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.layers import ColumnParallelLinear, RowParallelLinear
from parallel_layers.linear.low_rank import LowRank, without_adapters
from parallel_layers.memory.random_states import RngStates
from parallel_layers.model.lora import add_lora_
from parallel_layers.model.options import LoraOptions
from parallel_layers.module.sharding import blocks_of, full_shape, load_full_
from parallel_layers.moe import MoEConfig
from parallel_layers.testing import RankPool

LENGTHS, VOCABULARY = [5, 3], 30
SIZES: dict[str, Any] = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 16}
LATENT = LatentConfig(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=4)
MOE = MoEConfig(num_experts=4, top_k=2, intermediate_size=8, shared_intermediate_size=8)
CONFIGS = {
    "dense": DecoderConfig(**SIZES, attention_bias=True, qk_norm="head"),
    "experts": DecoderConfig(**SIZES, moe=MOE),
    "shared": DecoderConfig(**SIZES, moe=MOE),
    "latent": DecoderConfig(**SIZES | {"num_kv_heads": 4}, latent=LATENT),
}
EVERYTHING = ("all-linear", "embedding", "head", "experts.gate_up_proj", "experts.down_proj")
OPTIONS = LoraOptions(rank=3, alpha=4.5, targets=".*", seed=5)
OPTIONS_OF = {"shared": replace(OPTIONS, shared_experts=True)}


class Model(nn.Module):
    def __init__(self, kind: str, group: ProcessGroup | None = None, sequence_parallel: bool = False, **more: Any):
        super().__init__()
        shards = {"group": group, "sequence_parallel": sequence_parallel}
        self.embedding = VocabParallelEmbedding(VOCABULARY, 16, **shards)
        self.layer = DecoderLayer(CONFIGS[kind], placement=Placement(**shards), **more)
        self.head = VocabParallelHead(16, VOCABULARY, **shards)
        self.rotary = RotaryEmbedding(2 if kind == "latent" else 8)

    def forward(self, ids: Tensor) -> Tensor:
        edges = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
        tables = self.rotary(torch.cat([torch.arange(length) for length in LENGTHS]))
        states = self.layer(self.embedding(ids), tables, edges, max(LENGTHS))
        return self.head(states, ids.roll(-1)).log_probs


def filled(kind: str) -> tuple[Model, dict[str, Tensor]]:
    """The undivided model with adapters, and all of its tensors."""
    torch.manual_seed(3)
    model = Model(kind).double()
    add_lora_(model, OPTIONS_OF.get(kind, OPTIONS))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for lora in (module for module in model.modules() if isinstance(module, LowRank)):
            for factor in (lora.A, lora.B):
                factor.normal_(0, 0.3, generator=generator)
    return model, {name: tensor.detach() for name, tensor in model.named_parameters()}


def merged(full: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The weights W + scaling B A, written out."""
    weights = {name: tensor for name, tensor in full.items() if "lora" not in name}
    for name in [name for name in full if name.endswith("lora.A")]:
        A, B = full[name], full[name.removesuffix("A") + "B"]
        path, r = name.removesuffix(".A"), OPTIONS.rank
        if ".experts." in name:
            path = path.removesuffix("_lora")
            delta = torch.einsum("ore,eri->eoi", B.expand(-1, -1, 4), A.view(-1, r, A.shape[1]).expand(4, -1, -1))
        elif path == "embedding.lora":
            path, delta = "embedding.weight", (B @ A).T
        else:
            path = path.removesuffix("lora") + "weight"
            sizes = [len(B) * r // len(A)] * (len(A) // r)
            if "qkv_proj" in path:
                sizes = [32, 16, 16]
            delta = torch.cat([b @ a for b, a in zip(B.split(sizes), A.split(r), strict=True)])
        weights[path] = weights[path] + OPTIONS.scaling * delta
    return weights


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs = model(torch.arange(sum(LENGTHS)) * 3)
    (log_probs * torch.arange(1.0, 1 + len(log_probs))).sum().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_rank(group: ProcessGroup, kind: str, full: dict[str, Tensor], ep: int = 1) -> list[Any]:
    """This rank's log-probs, gradients and their places; without and with sequence parallelism."""
    found = []
    for sequence_parallel in (False, True):
        # What is asked of the overlap changes no number: layers with adapters communicate one after the other.
        more: dict[str, Any] = {"execution": Execution(overlap="collectives" if sequence_parallel else "auto")}
        more |= {"expert_group": group, "expert_tensor_parallel": False} if ep > 1 else {}
        model = Model(kind, group, sequence_parallel, **more).double()
        add_lora_(model, OPTIONS_OF.get(kind, OPTIONS))
        load_full_(model, full)
        log_probs, gradients = run(model)
        places = {}
        for path, owner in model.named_modules():
            for name in ("A", "B") if isinstance(owner, LowRank) else ():
                places[f"{path}.{name}"] = (full_shape(owner, name), list(blocks_of(owner, name)))
        found.append((log_probs, gradients, places))
    return found


# The sizes of the groups of tensor and of expert parallelism; at tp 4 a key-value head is on two ranks.
GRIDS = [
    pytest.param(kind, size, ep, marks=pytest.mark.slow if size == 4 and kind != "dense" else ())
    for kind in CONFIGS
    for size, ep in ((2, 1), (4, 1), (2, 2))
    if ep == 1 or kind in ("experts", "shared")
]


@pytest.mark.parametrize(("kind", "size", "ep"), GRIDS)
def test_adapters_are_those_of_merged_weights_on_every_grid(ranks: RankPool, kind: str, size: int, ep: int) -> None:
    model, full = filled(kind)
    log_probs, gradients = run(model)
    leaves = {name: tensor.clone().requires_grad_("lora" in name) for name, tensor in full.items()}
    plain = Model(kind).double()
    expected = functional_call(plain, merged(leaves, kind), (torch.arange(sum(LENGTHS)) * 3,))
    (expected * torch.arange(1.0, 1 + len(expected))).sum().backward()
    torch.testing.assert_close(log_probs, expected.detach())
    assert gradients.keys() == {name for name in full if "lora" in name}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, leaves[name].grad, msg=lambda text, name=name: f"{name}: {text}")
    for results in zip(*ranks.run(on_rank, kind, full, ep, world=size), strict=True):
        for found, parts, places in results:
            torch.testing.assert_close(found, log_probs)
            for name, (shape, blocks) in places.items():
                assert shape == tuple(full[name].shape)
                for here, there in blocks:
                    torch.testing.assert_close(parts[name][here], gradients[name][there])


def initial(group: ProcessGroup | None) -> list[Any]:
    model = Model("dense", group)
    add_lora_(model, LoraOptions(rank=2, targets=EVERYTHING[:3]))
    return [
        (f"{path}.{name}", full_shape(owner, name), there, getattr(owner, name).detach()[here])
        for path, owner in model.named_modules()
        if isinstance(owner, LowRank)
        for name in ("A", "B")
        for here, there in blocks_of(owner, name)
    ]


def test_initial_weights_do_not_depend_on_the_grid(ranks: RankPool) -> None:
    whole = {name: tensor for name, _, _, tensor in initial(None)}
    assert all(bool(tensor.any()) == (("embedding" in name) == name.endswith("B")) for name, tensor in whole.items())
    assert len({tuple(tensor[0].tolist()) for name, tensor in whole.items() if name.endswith("A")}) == len(whole) // 2
    for parts in ranks.run(initial, world=4):
        for name, shape, there, tensor in parts:
            assert shape == whole[name].shape
            assert torch.equal(tensor, whole[name][there])


def test_some_parts_of_fused_weights_have_adapters(ranks: RankPool) -> None:
    model = Model("dense")
    assert add_lora_(model, LoraOptions(targets=["q_proj", "v_proj"])) == [
        "layer.self_attn.q_proj", "layer.self_attn.v_proj",
    ]  # fmt: skip
    lora = model.layer.self_attn.qkv_proj.lora
    assert (tuple(lora.A.shape), tuple(lora.B.shape)) == ((32, 16), (48, 16))
    nn.init.ones_(lora.B)
    delta = lora.delta()
    assert not delta[32:48].any()
    torch.testing.assert_close(delta[:32], 2 * lora.A[:16].sum(0).expand(32, -1))
    torch.testing.assert_close(delta[48:], 2 * lora.A[16:].sum(0).expand(16, -1))


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def test_a_frozen_base_has_no_weight_gradient_product() -> None:
    layers = nn.Sequential(ColumnParallelLinear(64, 48), RowParallelLinear(48, 64))
    x = torch.randn(32, 64, requires_grad=True)

    def count() -> int:
        with Products() as products:
            layers(x).sum().backward()
        return products.count

    base, rank = 32 * 64 * 48, 2
    assert count() == 3 * 2 * base
    add_lora_(layers, LoraOptions(rank=rank))
    layers.zero_grad()
    # Forward and dx of both layers, and six small products of each adapter.
    assert count() == 2 * 2 * base + 2 * 3 * 32 * rank * (64 + 48)
    assert [p.grad is None for p in layers.parameters()] == [True, False, False] * 2


@pytest.mark.slow
def test_layers_with_adapters_compile_whole() -> None:
    layers = nn.Sequential(ColumnParallelLinear(16, 32), RowParallelLinear(32, 16)).double()
    add_lora_(layers, LoraOptions(rank=2))
    for layer in layers:
        nn.init.normal_(layer.lora.B)
    x, found = torch.randn(8, 16, dtype=torch.float64, requires_grad=True), []
    adapters = [parameter for parameter in layers.parameters() if parameter.requires_grad]
    for model in (layers, torch.compile(layers, fullgraph=True, backend="aot_eager")):
        out = model(x)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, *adapters])])
    torch.testing.assert_close(found[1], found[0])


def dropped(group: ProcessGroup | None, sequence_parallel: bool) -> list[Tensor]:
    placement = Placement(group, sequence_parallel)
    torch.manual_seed(1)
    column = ColumnParallelLinear(8, 16, placement=placement)
    layers = nn.Sequential(column, RowParallelLinear(16, 8, placement=placement))
    add_lora_(layers, LoraOptions(rank=2, dropout=0.5))
    for layer in layers:
        nn.init.constant_(layer.lora.B, 0.5)
    x = torch.randn(4, 8)
    rank = 0 if group is None else group.rank()
    with RngStates.tensor_parallel(7, group).fork("replicated"):
        out = layers(x.chunk(group.size())[rank] if sequence_parallel else x)
    out.sum().backward()
    return [out.detach(), layers[0].lora.A.grad, layers[1].lora.B.grad]


def test_dropout_is_alike_at_every_tp(ranks: RankPool) -> None:
    out, of_A, of_B = dropped(None, False)
    assert not torch.equal(out, dropped(None, False)[0].zero_())
    for sequence_parallel in (False, True):
        found = ranks.run(dropped, sequence_parallel, world=2)
        whole = torch.cat([part[0] for part in found]) if sequence_parallel else found[1][0]
        torch.testing.assert_close(whole, out)
        for part in found:
            torch.testing.assert_close(part[1:], [of_A, of_B])


def test_without_adapters_is_the_base() -> None:
    model, full = filled("dense")
    base = Model("dense").double()
    base.load_state_dict({name: tensor for name, tensor in full.items() if "lora" not in name}, strict=False)
    ids = torch.arange(sum(LENGTHS)) * 3
    with torch.no_grad():
        with without_adapters(model):
            assert torch.equal(model(ids), base(ids))
        assert not torch.allclose(model(ids), base(ids))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"targets": "layer.*none"}, r"'layer.\*none' of the adapters matches no layer; there are embedding, head, "),
        ({"targets": ["q_proj", "w_proj"]}, "target 'w_proj' of the adapters matches no layer; .*q_proj"),
        ({"targets": "("}, "is no regular expression"),
        ({"targets": []}, "names no layer"),
        ({"rank": 0}, "rank=0 must be"),
        ({"alpha": 0}, "alpha=0 must be"),
        ({"targets": ["head"], "dropout": 0.1}, "dropout=0.1 is for adapters of linear layers, and head is none"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        add_lora_(Model("dense"), LoraOptions(**options))


def test_rslora_scales_by_the_root() -> None:
    assert LoraOptions(rank=16, alpha=8, rslora=True).scaling == 2
    assert LoraOptions(rank=16, alpha=8).scaling == 0.5
    assert ParallelDims().world_size == 1
