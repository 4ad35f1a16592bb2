"""clip_grad_norm_ against torch's own on the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_layers.dims import ParallelDims
from parallel_layers.embedding import VocabParallelEmbedding
from parallel_layers.gradients import clip_grad_norm_
from parallel_layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel_layers.sharding import blocks_of, full_shape
from parallel_layers.testing import RankPool


class Block(nn.Module):
    """One of each: rows divided, KV heads repeated, columns divided, padded vocabulary, replicated."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(10, 8, group=group)
        self.qkv = QKVParallelLinear(8, 8, 1, 2, bias=True, group=group)
        self.up = ColumnParallelLinear(8, 12, bias=True, group=group)
        self.down = RowParallelLinear(12, 8, bias=True, group=group)
        self.norm = nn.LayerNorm(8)


def gradient_of(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def owners(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(m, name) for m in model.modules() for name, _ in m.named_parameters(recurse=False)]


def fill_gradients(model: nn.Module) -> None:
    """The same full gradients on every grid; padding rows get none."""
    for seed, (owner, name) in enumerate(owners(model)):
        parameter = owner.get_parameter(name)
        parameter.grad = torch.zeros_like(parameter)
        full = gradient_of(full_shape(owner, name), seed)
        for local, where in blocks_of(owner, name):
            parameter.grad[local] = full[where]


def reference(max_norm: float) -> tuple[Tensor, list[Tensor]]:
    model = Block(None)
    fill_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm, [p.grad for p in model.parameters() if p.grad is not None]


def clip(group: ProcessGroup, max_norm: float) -> tuple[Tensor, bool]:
    model = Block(group)
    fill_gradients(model)
    norm = clip_grad_norm_(model, max_norm, groups=[group, None])
    _, expected = reference(max_norm)
    for (owner, name), full in zip(owners(model), expected, strict=True):
        grad = owner.get_parameter(name).grad
        assert grad is not None
        for local, where in blocks_of(owner, name):
            torch.testing.assert_close(grad[local], full[where])
    return norm, True


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_parameter_counts_once(ranks: RankPool, world: int, max_norm: float) -> None:
    expected, _ = reference(max_norm)
    norms = [norm for norm, _ in ranks.run(clip, max_norm, world=world)]
    torch.testing.assert_close(norms, [expected] * world)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_without_groups() -> None:
    model = Block(None)
    fill_gradients(model)
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), reference(1.0)[0])


def clip_fsdp(group: ProcessGroup, dims: ParallelDims) -> tuple[Tensor, Tensor]:
    """FSDP2 replaces the parameters; of the 8 q, 2 k and 2 v rows at tp 2 the second rank of dp 2 holds the last 6."""
    mesh = dims.build_mesh("cpu")
    tp = mesh.get_group("tp")
    model = Block(tp)
    fill_gradients(model)
    full = {name: p.grad for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        grad = full[name]
        assert grad is not None
        parts = grad.chunk(dims.dp, 0)
        rank = mesh.get_local_rank("dp")
        mine = parts[rank] if rank < len(parts) else grad[:0]
        assert mine.shape == local.shape
        parameter.grad = DTensor.from_local(
            mine.clone(), parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    norm = clip_grad_norm_(model, 1.0, groups=[tp])
    again = clip_grad_norm_(model, math.inf, groups=[tp])
    return norm, again


@pytest.mark.parametrize("dims", [ParallelDims(dp=2, tp=2), ParallelDims(dp=4), ParallelDims(dp=1, tp=4)], ids=str)
def test_fsdp_gradients(ranks: RankPool, dims: ParallelDims) -> None:
    expected, _ = reference(1.0)
    for norm, again in ranks.run(clip_fsdp, dims):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(again, torch.tensor(1.0), rtol=1e-4, atol=1e-4)


def clip_stages(group: ProcessGroup) -> Tensor:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.full((1, 2), float(group.rank() + 1))
    return clip_grad_norm_([model], 1.0, pipeline_group=group)


def test_pipeline_stages_add(ranks: RankPool) -> None:
    for norm in ranks.run(clip_stages, world=2):
        torch.testing.assert_close(norm, torch.tensor(math.sqrt(2 + 8)))


def clip_main_grads(group: ProcessGroup) -> Tensor:
    layer = ColumnParallelLinear(4, 8, group=group, accumulate_main_grad=True)
    layer(torch.ones(1, 4)).sum().backward()
    return clip_grad_norm_(layer, math.inf, groups=[group])


def test_main_grads_count(ranks: RankPool) -> None:
    torch.testing.assert_close(ranks.run(clip_main_grads, world=2), [torch.tensor(math.sqrt(32))] * 2)


def refuse(group: ProcessGroup) -> list[str]:
    arguments: list[tuple[Any, dict[str, Any]]] = [
        (ColumnParallelLinear(4, 8, group=group), {}),
        (nn.Linear(2, 2).parameters(), {"groups": [group]}),
    ]
    messages = []
    for model, options in arguments:
        with pytest.raises(ValueError, match="pass") as caught:
            clip_grad_norm_(model, 1.0, **options)
        messages.append(str(caught.value))
    return messages


def test_mistakes(ranks: RankPool) -> None:
    for first, second in ranks.run(refuse, world=2):
        assert first.startswith("parameter 'weight' of ColumnParallelLinear is divided over 2 ranks whose group")
        assert second.startswith("clip_grad_norm_ takes modules, got Parameter")
