"""The error of bf16 layers that are divided, beside those that are not, and the dtype in which ranks are summed."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.attention.config import LatentConfig
from parallel_layers.distributed import collectives
from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.module.initialization import initialize_
from parallel_layers.module.sharding import blocks_of
from parallel_layers.moe import MoEConfig
from parallel_layers.testing import RankPool

TOKENS, HIDDEN = 64, 32
DENSE = DecoderConfig(
    hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64, qk_norm="head"
)
CONFIGS = {
    "dense": DENSE,
    # All experts for every token: a choice among them could change with a rounding.
    "moe": dataclasses.replace(
        DENSE, moe=MoEConfig(num_experts=2, top_k=2, intermediate_size=32, shared_intermediate_size=32)
    ),
    "latent": dataclasses.replace(
        DENSE,
        num_kv_heads=4,
        head_dim=None,
        qk_norm=None,
        latent=LatentConfig(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    ),
}


def build(
    config: DecoderConfig, group: ProcessGroup | None = None, sp: bool = False, reduce_dtype: torch.dtype | None = None
) -> DecoderLayer:
    layer = DecoderLayer(config, placement=Placement(group, sp), execution=Execution(reduce_dtype=reduce_dtype))
    initialize_(layer, 0)
    return layer.bfloat16()


def run(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input; those of the parameters are in them."""
    x = x.clone().requires_grad_()
    y = layer(x, None, torch.tensor([0, 20, TOKENS], dtype=torch.int32), 44)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def batch() -> Tensor:
    return torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def squared_errors(group: ProcessGroup, config: DecoderConfig, sp: bool) -> dict[str, Tensor]:
    """Return the errors of this rank's part of each result, for the layer and for a layer that is whole."""
    layer, whole = build(config, group, sp), build(config)
    exact = copy.deepcopy(whole).double()
    rows = slice(TOKENS // group.size() * group.rank(), TOKENS // group.size() * (group.rank() + 1))
    mine = rows if sp else slice(None)
    results = run(layer, *(t[mine] for t in batch())), run(whole, *batch()), run(exact, *batch().double())
    errors: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for name, got, plain, truth in zip(("y", "x"), *results, strict=True):
        errors[name] = [(got, plain[mine], truth[mine])]
    for path, owner in layer.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            of_whole, of_exact = (of.get_submodule(path).get_parameter(name).grad for of in (whole, exact))
            assert parameter.grad is not None
            assert of_whole is not None
            assert of_exact is not None
            errors[f"{path}.{name}"] = [
                (parameter.grad[local], of_whole[full], of_exact[full]) for local, full in blocks_of(owner, name)
            ]
    return {
        name: torch.stack([torch.stack([(t.double() - e).square().sum() for t in both]) for *both, e in parts]).sum(0)
        for name, parts in errors.items()
    }


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_divided_bf16_layer_is_as_exact_as_a_whole_one(ranks: RankPool, name: str, sp: bool) -> None:
    """At most 1.5 times as far from fp64, in the output and every gradient, at tp 4."""
    results = ranks.run(squared_errors, CONFIGS[name], sp)
    for key in results[0]:
        mine, plain = torch.stack([errors[key] for errors in results]).sum(0).sqrt()
        assert mine <= 1.5 * plain, f"{key}: {mine / plain:.2f} times"


class Sums(TorchDispatchMode):
    """The dtypes of the large tensors that are summed over ranks: hidden states, not weights' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("all_reduce", "reduce_scatter")) and args[0].numel() >= TOKENS * 16:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def dtypes_of_sums(group: ProcessGroup, config: DecoderConfig, sp: bool) -> list[list[torch.dtype]]:
    rows = TOKENS // group.size() if sp else TOKENS
    found = []
    for reduce_dtype in (None, torch.bfloat16):
        layer = build(config, group, sp, reduce_dtype)
        with Sums() as sums:
            run(layer, *(t[:rows] for t in batch()))
        found.append(sums.dtypes)
    return found


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_reduce_dtype_of_a_layer_reaches_every_sum_of_hidden_states(ranks: RankPool, name: str, sp: bool) -> None:
    for by_default, asked_for in ranks.run(dtypes_of_sums, CONFIGS[name], sp, world=2):
        assert len(by_default) >= 4
        assert set(by_default) == {torch.float32}
        assert asked_for == [torch.bfloat16] * len(by_default)


def sums_of_bf16(group: ProcessGroup, parts: Tensor) -> dict[str, Tensor]:
    mine = parts[group.rank()]
    copied = torch.zeros_like(mine, requires_grad=True)
    collectives.copy_to_tensor_parallel(copied, group).backward(mine)
    gathered = torch.zeros_like(mine.chunk(group.size())[0], requires_grad=True)
    collectives.gather_from_sequence_parallel(gathered, group).backward(mine)
    assert copied.grad is not None
    assert gathered.grad is not None
    return {
        "reduce": collectives.reduce_from_tensor_parallel(mine, group),
        "reduce in bf16": collectives.reduce_from_tensor_parallel(mine, group, reduce_dtype=torch.bfloat16),
        "scatter": collectives.reduce_scatter_to_sequence_parallel(mine, group),
        "scatter last": collectives.reduce_scatter_to_tensor_parallel(mine, group),
        "copy": copied.grad,
        "gather": gathered.grad,
    }


def test_collectives_sum_bf16_in_fp32(ranks: RankPool) -> None:
    """So that the sum is rounded once, by at most half a unit in the last place."""
    parts = torch.randn(4, 1000).bfloat16()
    exact = parts.double().sum(0)
    for rank, results in enumerate(ranks.run(sums_of_bf16, parts)):
        for name, got in results.items():
            truth = exact if len(got) == len(exact) else exact.chunk(4)[rank]
            assert got.dtype == torch.bfloat16
            rounded_once = ((got.double() - truth).abs() <= truth.abs() * 2**-8 + 1e-6).all()
            assert rounded_once == (name != "reduce in bf16"), name
