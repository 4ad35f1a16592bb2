"""`Grid`: its groups, its places, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import Grid


def places(group: ProcessGroup, dims: ParallelDims) -> dict[str, Any]:
    grid = Grid.build(dims, device="cpu", mesh=dims.build_mesh("cpu", list(range(group.size()))))
    ranks = {}
    for axis in ("dp", "tp"):
        of_axis = grid.group(axis)
        ranks[axis] = None if of_axis is None else dist.get_process_group_ranks(of_axis)
    everyone = None if grid.everyone is None else dist.get_process_group_ranks(grid.everyone)
    return {"groups": ranks, "place": (grid.rank("dp"), grid.rank("tp")), "everyone": everyone}


def test_groups_of_a_grid_on_all_and_on_some_ranks(ranks: RankPool) -> None:
    four = ranks.run(places, ParallelDims(dp=2, tp=2), world=4)
    assert [result["place"] for result in four] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert four[2]["groups"] == {"dp": [0, 2], "tp": [2, 3]}
    assert {tuple(result["everyone"]) for result in four} == {(0, 1, 2, 3)}
    two = ranks.run(places, ParallelDims(tp=2), world=2)
    assert two[1] == {"groups": {"dp": None, "tp": [0, 1]}, "place": (0, 1), "everyone": [0, 1]}


def flat_meshes(group: ProcessGroup, dims: ParallelDims) -> list[list[int]]:
    grid = Grid.build(dims, device="cpu", mesh=dims.build_mesh("cpu", list(range(group.size()))))
    assert grid.data_mesh is not None
    assert grid.tensor_mesh is not None
    data, tensor, shards = grid.data_mesh, grid.tensor_mesh, grid.shard_mesh
    assert shards is not None
    # FSDP2 wants it of tensor-parallel DTensors.
    assert shards._get_root_mesh() is tensor._get_root_mesh()
    assert tensor.mesh_dim_names == ("tp",)
    assert shards.mesh_dim_names == (("dp", "cp") if dims.replicate > 1 else data.mesh_dim_names)
    return [dist.get_process_group_ranks(mesh.get_group()) for mesh in (data, tensor)]


def test_the_ranks_of_a_layer_and_of_its_copies_are_axes_of_one_mesh(ranks: RankPool) -> None:
    assert ranks.run(flat_meshes, ParallelDims(dp=2, tp=2), world=4)[1] == [[1, 3], [0, 1]]
    assert ranks.run(flat_meshes, ParallelDims(cp=2, tp=2), world=4)[2] == [[0, 2], [2, 3]]
    assert ranks.run(flat_meshes, ParallelDims(dp=2, cp=2), world=4)[2] == [[0, 1, 2, 3], [2]]
    assert ranks.run(flat_meshes, ParallelDims(dp=2, tp=2, replicate=2), world=4)[1] == [[1, 3], [0, 1]]
    assert ranks.run(flat_meshes, ParallelDims(dp=4, replicate=2), world=4)[2] == [[0, 1, 2, 3], [2]]


def replicas(group: ProcessGroup, dims: ParallelDims) -> list[list[list[int]]]:
    """Return the ranks of this rank's row and column of each mesh that FSDP2 takes, and of the group of replicas."""
    grid = Grid.build(dims, device="cpu", mesh=dims.build_mesh("cpu", list(range(group.size()))))
    meshes = [mesh for mesh in (grid.shard_mesh, grid.expert_shard_mesh) if mesh is not None]
    groups = [[mesh.get_group(axis) for axis in range(mesh.ndim)] for mesh in meshes] + [[grid.group("replicate")]]
    return [[[] if of is None else dist.get_process_group_ranks(of) for of in row] for row in groups]


def test_parameters_are_sharded_within_a_replica(ranks: RankPool) -> None:
    plain = ranks.run(replicas, ParallelDims(dp=4), world=4)
    assert plain[1] == [[[0, 1, 2, 3]], [[]]]
    pairs = ranks.run(replicas, ParallelDims(dp=4, replicate=2), world=4)
    assert pairs == [[[across, within], [across]] for within in ([0, 1], [2, 3]) for across in ([0, 2], [1, 3])]
    # Experts are distributed over the two ranks of a replica, and each replica has a copy.
    experts = ranks.run(replicas, ParallelDims(dp=4, ep=2, replicate=2), world=4)
    assert experts[3] == [[[1, 3], [2, 3]], [[1, 3], [3]], [[1, 3]]]
    whole = ranks.run(replicas, ParallelDims(dp=2, tp=2, ep=2, replicate=2), world=4)
    assert whole[3] == [[[1, 3], [3]], [[1, 3], [3]], [[1, 3]]]


def test_one_rank_needs_no_process_group() -> None:
    grid = Grid.build(ParallelDims(), device="cpu")
    assert grid.group("tp") is grid.everyone is None
    assert grid.rank("tp") == 0
    assert grid.device == torch.device("cpu")


def wrong_mesh(group: ProcessGroup) -> str:
    mesh = ParallelDims(tp=2).build_mesh("cpu", [0, 1])
    with pytest.raises(ValueError, match=r"the mesh has .* and dims is ParallelDims\(dp=2") as error:
        Grid.build(ParallelDims(dp=2), device="cpu", mesh=mesh)
    return str(error.value)


def test_what_does_not_fit_is_refused(ranks: RankPool) -> None:
    assert len(ranks.run(wrong_mesh, world=2)) == 2
    with pytest.raises(ValueError, match="there is no process group; start the ranks with torchrun"):
        Grid.build(ParallelDims(dp=2), device="cpu")
    with pytest.raises(ValueError, match="backend='x' does not offer tp=2; it offers dp"):
        Grid(ParallelDims(tp=2), torch.device("cpu")).require(("dp",), "x")
