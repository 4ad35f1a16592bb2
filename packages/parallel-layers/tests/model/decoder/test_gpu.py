"""Decoder layers at sizes that the kernels of a GPU take, over every grid: as close to fp64 as a dense layer on a CPU.

That layer is compared with transformers' own in test_parity.py, at sizes that no kernel takes. The same code runs here
on gloo, where it can be tried without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import DecoderConfig, DecoderLayer, ParallelDims, RotaryEmbedding
from parallel_layers.attention import LatentConfig
from parallel_layers.attention.context_parallel.sequence_layout import gather_sequence, split_sequence
from parallel_layers.distributed.collectives import gather_from_sequence_parallel
from parallel_layers.linear.execution import Placement
from parallel_layers.module.sharding import load_full_
from parallel_layers.moe import ClampedSwiGLU, MoEConfig, RouterReplay, RoutingContext
from parallel_layers.testing import RankPool

LENGTHS = [300, 1, 0, 129, 75, 7]  # 512 in all: every grid divides them
HIDDEN, ROTARY = 256, 64
LLAMA = DecoderConfig(hidden_size=HIDDEN, num_heads=8, num_kv_heads=4, head_dim=ROTARY, intermediate_size=512)
LATENT = LatentConfig(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=ROTARY, v_head_dim=48, q_lora_rank=96)
EXPERTS = MoEConfig(num_experts=8, top_k=2, intermediate_size=64, shared_intermediate_size=64)
CLAMPED = MoEConfig(
    num_experts=8, top_k=2, intermediate_size=64, router_bias=True, expert_bias=True, activation=ClampedSwiGLU()
)
CONFIGS = {
    "qwen3": replace(LLAMA, qk_norm="head", attention_bias=True),
    "gemma2": replace(
        LLAMA, attention_softcap=2.0, norm_placement="sandwich", norm_unit_offset=True, activation="gelu_pytorch_tanh"
    ),
    "mistral": replace(LLAMA, window=100),
    "qwen3 moe": replace(LLAMA, qk_norm="head", moe=EXPERTS),
    "deepseek": replace(
        LLAMA, num_kv_heads=8, head_dim=None, latent=LATENT, rotary_interleaved=True,
        moe=replace(EXPERTS, scoring="sigmoid", num_groups=4, top_k_groups=2),
    ),
    "gpt-oss": replace(
        LLAMA, attention_sinks=True, attention_bias=True, output_bias=True, window=100, moe=CLAMPED
    ),
}  # fmt: skip
GRIDS: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp 2": {"tp": 2},
    "cp 2": {"cp": 2},
    "ep 2": {"tp": 2},  # whole experts: an all-to-all among the ranks that share a pack
    "tp 4": {"tp": 4},
    "cp 4": {"cp": 4},
    "cp 2 tp 2": {"cp": 2, "tp": 2},
}
Tensors = dict[str, Tensor]


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])


def boundaries() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def dense(config: DecoderConfig, dtype: torch.dtype, weights: Tensors, inputs: list[Tensor], replay: Any) -> Tensors:
    """Output and gradients of the layer on one CPU."""
    layer = DecoderLayer(config, dtype=dtype)
    load_full_(layer, weights)
    leaf = inputs[0].to(dtype, copy=True).requires_grad_()
    tables = RotaryEmbedding(ROTARY)(positions())
    out = layer(leaf, tables, boundaries(), max(LENGTHS), routing=RoutingContext(replay=replay))
    out.backward(inputs[1].to(dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"out": out.detach(), "d_x": leaf.grad} | gradients


def errors_on_a_rank(
    group: ProcessGroup,
    config: DecoderConfig,
    grid: str,
    dtype: torch.dtype,
    weights: Tensors,
    inputs: list[Tensor],
    experts: Tensor | None,
    references: list[Tensors],
) -> dict[str, list[float]]:
    """Return for each final tensor of this rank its error, the plain error and the norm of the truth, squared."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mesh = ParallelDims(**GRIDS[grid]).build_mesh(device, ranks=dist.get_process_group_ranks(group))
    tp, cp = (mesh.get_group(axis) if GRIDS[grid].get(axis, 1) > 1 else None for axis in ("tp", "cp"))
    layout = "zigzag" if config.context_parallel == "ring" else "contiguous"
    place: dict[str, Any] = {"placement": Placement(tp, sequence_parallel=tp is not None)}
    if grid == "ep 2" and config.moe is not None:
        place |= {"expert_group": tp, "expert_tensor_parallel": False}
    layer = DecoderLayer(config, context_group=cp, dtype=dtype, device=device, **place)
    load_full_(layer, weights)

    x, seed = (split_sequence(t.to(device), cp, layout=layout) for t in inputs)
    if tp is not None:
        x, seed = (t.chunk(tp.size())[tp.rank()] for t in (x, seed))
    leaf = x.to(dtype, copy=True).requires_grad_()
    tables = RotaryEmbedding(ROTARY, device=device)(positions().to(device))
    tables = tuple(split_sequence(table, cp, layout=layout) for table in tables)
    replay = None
    if experts is not None:
        assert config.moe is not None
        chosen = split_sequence(experts.to(device), cp, layout=layout)
        replay = RouterReplay({0: chosen}, num_experts=config.moe.num_experts)
    bounds = boundaries().to(device)
    out = layer(leaf, tables, bounds, max(LENGTHS), routing=RoutingContext(replay=replay))
    out.backward(seed.to(dtype))

    whole = {"out": out.detach(), "d_x": leaf.grad}
    if tp is not None:
        whole = {name: gather_from_sequence_parallel(t, tp) for name, t in whole.items()}
    ours = {name: gather_sequence(t, cp, layout=layout).double().cpu() for name, t in whole.items()}
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad.float()
        if cp is not None:
            dist.all_reduce(gradient, group=cp)  # a share, which a trainer adds up
        ours[name] = gradient.double().cpu()

    twin = DecoderLayer(config, context_group=cp, dtype=torch.float64, **place)
    squares: dict[str, list[float]] = {}
    plain, truth = (parts_of(twin, reference) for reference in references)
    assert ours.keys() == plain.keys() == truth.keys()
    for name, exact in truth.items():
        differences = (ours[name] - exact, plain[name] - exact, exact)
        squares[name] = [float(difference.square().sum()) for difference in differences]
    return squares


def parts_of(layer: nn.Module, full: Tensors) -> Tensors:
    """This rank's parts of full gradients; output and input gradient as they are."""
    load_full_(layer, {name: tensor for name, tensor in full.items() if name not in ("out", "d_x")})
    parts = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    return parts | {name: full[name].double() for name in ("out", "d_x")}


@cache
def problem(name: str, dtype: torch.dtype) -> tuple[Tensors, list[tuple[list[Tensor], Tensor | None, list[Tensors]]]]:
    """The weights, and several batches: sinks have few numbers, and the errors of few numbers scatter.

    Of each batch the inputs, fp64's choice of experts (near a tie another is no rounding: all take it), and the dense
    layer's output and gradients in `dtype` and in fp64.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]
    weights = {}
    for key, parameter in DecoderLayer(config).named_parameters():
        scale = 1.0 if "norm" in key else parameter.shape[-1] ** -0.5
        weights[key] = (nn.init.normal_(parameter, std=scale).detach() + ("norm" in key)).to(dtype)
    batches = []
    for _ in range(3 if dtype == torch.bfloat16 else 1):
        inputs = list(torch.randn(2, sum(LENGTHS), HIDDEN).to(dtype))
        record = RouterReplay()
        truth = dense(config, torch.float64, weights, inputs, record)
        plain = dense(config, dtype, weights, inputs, record.replaying() if config.moe else None)
        batches.append((inputs, record.experts.get(0), [plain, truth]))
    return weights, batches


def check(pool: RankPool, name: str, attention: str, grid: str, dtype: torch.dtype) -> None:
    config, world = replace(CONFIGS[name], context_parallel=attention), ParallelDims(**GRIDS[grid]).world_size
    weights, batches = problem(name, dtype)
    totals: dict[tuple[int, str], Tensor] = {}
    for batch in batches:
        results = pool.run(errors_on_a_rank, config, grid, dtype, weights, *batch, world=world, timeout=300)
        for rank, squares in enumerate(results):
            for key, numbers in squares.items():
                totals[rank, key] = totals.get((rank, key), 0) + torch.tensor(numbers, dtype=torch.float64)
    # What one rounding of each number of a bf16 tensor makes; fp32 has a bound of its own.
    floor = 2.0**-8 if dtype == torch.bfloat16 else 1e-5 / 1.5
    for place, total in totals.items():
        error, of_plain, size = total.sqrt().tolist()
        assert error <= 1.5 * max(of_plain, floor * size), f"{place}: {error:.2e}, {of_plain:.2e} of {size:.2e}"


CASES = [
    (name, attention, grid, dtype)
    for name, config in CONFIGS.items()
    for grid, sizes in GRIDS.items()
    for attention in (("ulysses", "ring") if "cp" in sizes else ("ulysses",))
    for dtype in (torch.bfloat16, torch.float32)
    if (config.moe or grid != "ep 2") and (dtype == torch.bfloat16 or ParallelDims(**sizes).world_size <= 2)
]


@pytest.mark.parametrize(
    ("name", "attention", "grid", "dtype"),
    [pytest.param(*case, marks=pytest.mark.gpu(ParallelDims(**GRIDS[case[2]]).world_size)) for case in CASES],
)
def test_on_gpus(request: pytest.FixtureRequest, name: str, attention: str, grid: str, dtype: torch.dtype) -> None:
    pools = {1: "one_nccl_rank", 2: "nccl_ranks", 4: "four_nccl_ranks"}
    check(request.getfixturevalue(pools[ParallelDims(**GRIDS[grid]).world_size]), name, attention, grid, dtype)


@pytest.mark.parametrize(
    ("name", "attention", "grid", "dtype"),
    [
        ("gpt-oss", "ulysses", "ep 2", torch.float32),
        pytest.param("qwen3", "ring", "cp 2 tp 2", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("deepseek", "ulysses", "cp 2 tp 2", torch.float32, marks=pytest.mark.slow),
        pytest.param("gpt-oss", "ring", "cp 4", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_on_gloo(ranks: RankPool, name: str, attention: str, grid: str, dtype: torch.dtype) -> None:
    check(ranks, name, attention, grid, dtype)


@pytest.fixture(scope="module")
def one_nccl_rank() -> Any:
    with RankPool(1, backend="nccl") as pool:
        yield pool
