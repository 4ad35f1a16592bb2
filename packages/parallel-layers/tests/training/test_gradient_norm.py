"""clip_grad_norm_ against torch's own on the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_layers.distributed.parallel_dims import ParallelDims
from parallel_layers.head.embedding import VocabParallelEmbedding
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.layers import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from parallel_layers.module.sharding import blocks_of, full_shape
from parallel_layers.moe.experts import GroupedExperts
from parallel_layers.testing import RankPool
from parallel_layers.training.gradient_norm import clip_grad_norm_


class Block(nn.Module):
    """One of each: rows divided, KV heads repeated, columns divided, padded vocabulary, replicated."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(10, 8, group=group)
        self.qkv = QKVParallelLinear(8, 8, 1, 2, bias=True, placement=Placement(group))
        self.up = ColumnParallelLinear(8, 12, bias=True, placement=Placement(group))
        self.down = RowParallelLinear(12, 8, bias=True, placement=Placement(group))
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


class Stage(nn.Module):
    """Dense layers and experts, which may be divided over other ranks."""

    def __init__(
        self, group: ProcessGroup | None, expert_group: ProcessGroup | None = None, *, whole_experts: bool = False
    ) -> None:
        super().__init__()
        self.dense = Block(group)
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = GroupedExperts(8, 8, 4, group=None if whole_experts else group, expert_group=expert_group)


def regrouped(dims: ParallelDims, world: int) -> DeviceMesh:
    return dims.build_mesh("cpu", range(world))


def shard_with_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 replaces the parameters: give the new ones their parts of the old ones' gradients.

    The last axis of the mesh shards; an axis before it replicates.
    """
    old = {name: p.grad for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    fully_shard(module, mesh=mesh)
    for name, grad in old.items():
        parameter = module.get_parameter(name)
        assert isinstance(parameter, DTensor)
        assert grad is not None
        parts = grad.chunk(mesh.shape[-1])
        rank = mesh.get_local_rank(mesh.ndim - 1)
        mine = (parts[rank] if rank < len(parts) else grad[:0]).clone()
        assert mine.shape == parameter.to_local().shape
        parameter.grad = DTensor.from_local(
            mine, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )


def local_parts(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in gradients]


def clip_grid(group: ProcessGroup, dims: ParallelDims, fsdp: bool) -> tuple[Tensor, float]:
    """Experts as in a trainer: divided over tp where ep divides dp x cp, else whole and over neighbouring ranks."""
    data, world = dims.dp * dims.cp, dims.world_size
    dense = regrouped(ParallelDims(pp=dims.pp, dp=data, tp=dims.tp), world)
    whole = data % dims.ep > 0
    sets = ParallelDims(
        pp=dims.pp, dp=data * (dims.tp if whole else 1) // dims.ep, cp=dims.ep, tp=1 if whole else dims.tp
    )
    expert = regrouped(sets, world)
    tp, ep, pp = dense.get_group("tp"), expert.get_group("cp"), dense.get_group("pp")
    model = Stage(tp, ep if dims.ep > 1 else None, whole_experts=whole)
    fill_gradients(model)
    if fsdp:
        if dims.ep > 1:
            shard_with_gradients(model.experts, expert["dp"])
        shard_with_gradients(model, dense["dp"])
    before = local_parts(model)
    norm = clip_grad_norm_(model, 1.0, groups=[tp, ep], pipeline_group=pp)
    for mine, old in zip(local_parts(model), before, strict=True):
        torch.testing.assert_close(mine, old / norm)
    return norm, clip_grad_norm_(model, math.inf, groups=[ep, tp], pipeline_group=pp).item()


GRIDS = [
    ParallelDims(dp=2, tp=2),
    ParallelDims(dp=4),
    ParallelDims(tp=4, ep=4),  # whole experts over the tensor-parallel ranks
    ParallelDims(dp=2, tp=2, ep=2),  # over dp; each expert over tp
    ParallelDims(dp=2, tp=2, ep=4),  # whole experts over dp and tp
    ParallelDims(cp=2, tp=2, ep=4),
    ParallelDims(dp=2, cp=2, ep=2),  # two copies of each expert, four of the rest
    ParallelDims(pp=2, tp=2, ep=2),  # in each stage
    ParallelDims(pp=2, dp=2, ep=2),
]


# Every run has each grid once.
FSDP_IN_EVERY_RUN = (ParallelDims(dp=2, tp=2), ParallelDims(dp=2, tp=2, ep=2), ParallelDims(pp=2, dp=2, ep=2))


@pytest.mark.parametrize(
    ("dims", "fsdp"),
    [
        pytest.param(
            dims,
            fsdp,
            marks=[] if fsdp == (dims in FSDP_IN_EVERY_RUN) else pytest.mark.slow,
            id=f"{dims}-{'fsdp' if fsdp else 'whole'}",
        )
        for dims in GRIDS
        for fsdp in (False, True)
    ],
)
def test_any_grid(ranks: RankPool, dims: ParallelDims, fsdp: bool) -> None:
    model = Stage(None)
    fill_gradients(model)
    stage = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    results = ranks.run(clip_grid, dims, fsdp)
    for norm, again in results:
        torch.testing.assert_close(norm, stage * math.sqrt(dims.pp))
        assert again == pytest.approx(1.0, rel=1e-4)
    assert all(torch.equal(norm, results[0][0]) for norm, _ in results)


def clip_replicas(group: ProcessGroup) -> tuple[Tensor, float]:
    """Two replicas of two ranks, whose gradients are already summed over the replicas."""
    mesh = regrouped(ParallelDims(dp=2, cp=2), 4)["dp", "cp"]
    model = Stage(None)
    fill_gradients(model)
    shard_with_gradients(model, mesh)
    norm = clip_grad_norm_(model, 1.0, groups=[mesh.get_group("dp")])
    return norm, clip_grad_norm_(model, math.inf).item()


def test_replicas_count_once(ranks: RankPool) -> None:
    model = Stage(None)
    fill_gradients(model)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    for norm, clipped in ranks.run(clip_replicas):
        torch.testing.assert_close(norm, expected)
        assert clipped == pytest.approx(1.0, rel=1e-4)


def clip_bf16(group: ProcessGroup) -> Tensor:
    model = Block(group).to(torch.bfloat16)
    fill_gradients(model)
    norm = clip_grad_norm_(model, 1.0, groups=[group])
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    torch.testing.assert_close(clip_grad_norm_(model, 1.0, groups=[group]).item(), 1.0, rtol=1e-2, atol=0)
    return norm


def test_bf16_gradients_have_an_fp32_norm(ranks: RankPool) -> None:
    expected, _ = reference(1.0)
    for norm in ranks.run(clip_bf16, world=2):
        torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0)


def clip_drifted(group: ProcessGroup) -> Tensor:
    """Ranks whose replicated gradients should be equal and are not: NaN on one of them."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.full((1, 2), math.nan if group.rank() else 1.0)
    return clip_grad_norm_(model, 1.0, groups=[group])


def test_ranks_agree_on_the_norm_whatever_they_hold(ranks: RankPool) -> None:
    assert all(norm.isnan() for norm in ranks.run(clip_drifted, world=2))


def clip_stages(group: ProcessGroup) -> Tensor:
    """The third stage is frozen, the last empty."""
    model = nn.Sequential() if group.rank() == 3 else nn.Linear(2, 1, bias=False).requires_grad_(group.rank() < 2)
    for parameter in model.parameters():
        parameter.grad = torch.full((1, 2), float(group.rank() + 1))
    return clip_grad_norm_([model], 1.0, pipeline_group=group)


def test_pipeline_stages_add(ranks: RankPool) -> None:
    for norm in ranks.run(clip_stages):
        torch.testing.assert_close(norm, torch.tensor(math.sqrt(2 + 8)))


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_the_gradients(wrong: float, max_norm: float) -> None:
    layer = nn.Linear(3, 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[1.0, wrong, 2.0]]), torch.ones(1)
    norm = clip_grad_norm_(layer, max_norm)
    assert norm.isnan() if math.isnan(wrong) else norm == math.inf
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[1.0, wrong, 2.0]]), rtol=0, atol=0, equal_nan=True)
    assert layer.bias.grad.item() == 1.0


def test_gradients_in_fp64() -> None:
    models = [nn.ModuleList([nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 2)]) for _ in range(2)]
    for model in models:
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = gradient_of(tuple(parameter.shape), seed).to(parameter.dtype)
    norm, expected = clip_grad_norm_(models[0], 0.5), torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
    torch.testing.assert_close(norm, expected.double(), rtol=1e-6, atol=0)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)
    exact = torch.cat([p.grad.flatten() for p in models[0][0].parameters() if p.grad is not None]).norm()
    models[0][1].zero_grad()
    torch.testing.assert_close(clip_grad_norm_(models[0], math.inf), exact, rtol=1e-14, atol=0)


def clip_stages_of_two_dtypes(group: ProcessGroup) -> Tensor:
    stage = nn.Linear(2, 1, bias=False, dtype=[torch.float64, torch.float32][group.rank()])
    stage.weight.grad = torch.tensor([[[3.0, 4.0], [0.0, 12.0]][group.rank()]], dtype=stage.weight.dtype)
    return clip_grad_norm_(stage, math.inf, pipeline_group=group)


def test_stages_of_two_dtypes_add(ranks: RankPool) -> None:
    norms = ranks.run(clip_stages_of_two_dtypes, world=2)
    assert [(norm.dtype, norm.item()) for norm in norms] == [(torch.float64, 13.0), (torch.float32, 13.0)]


def refuse(group: ProcessGroup) -> list[str]:
    arguments: list[tuple[Any, dict[str, Any]]] = [
        (ColumnParallelLinear(4, 8, placement=Placement(group)), {}),
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
        assert first.startswith("parameter 'weight' of ColumnParallelLinear is sharded over 2 ranks whose group")
        assert second.startswith("clip_grad_norm_ takes modules, got Parameter")
