from __future__ import annotations

import datetime
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard

from parallel_layers.distributed.parallel_dims import MESH_AXES, ParallelDims, form_group, time_limit
from parallel_layers.testing import RankPool


def test_world_size_leaves_expert_parallelism_out() -> None:
    assert ParallelDims(dp=2, pp=3, cp=1, tp=4, ep=8).world_size == 24


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"dp": -1}, {"pp": 1.0}, {"cp": True}, {"tp": "2"}, {"replicate": 0}])
def test_sizes_are_positive_integers(sizes: dict[str, int]) -> None:
    name, size = next(iter(sizes.items()))
    with pytest.raises(ValueError, match=f"{name}={size!r} must be a positive integer"):
        ParallelDims(**sizes)


def test_ep_divides_a_replica_of_a_stage() -> None:
    text = r"ep=4 does not divide dp / replicate \* cp \* tp = {} \* 1 \* 2 = 6; use ep in \{{1, 2, 3, 6\}}"
    with pytest.raises(ValueError, match=text.format("3 / 1")):
        ParallelDims(dp=3, tp=2, ep=4)
    with pytest.raises(ValueError, match=text.format("6 / 2")):
        ParallelDims(dp=6, tp=2, ep=4, replicate=2)


def test_replicas_divide_dp() -> None:
    with pytest.raises(ValueError, match=r"replicate=4 does not divide dp = 6; use replicate in \{1, 2, 3, 6\}"):
        ParallelDims(dp=6, replicate=4)
    dims = ParallelDims(dp=6, pp=2, cp=2, tp=2, replicate=3)
    assert (dims.world_size, dims.replica_size) == (48, 8)
    # Experts are divided over tp where the data-parallel ranks of one replica suffice for ep.
    assert [ParallelDims(dp=4, tp=2, ep=4, replicate=n).expert_tensor_parallel for n in (1, 2)] == [True, False]


def test_parse() -> None:
    assert ParallelDims.parse("tp=2, pp=2") == ParallelDims(tp=2, pp=2)
    assert ParallelDims.parse("dp=4,replicate=2") == ParallelDims(dp=4, replicate=2)
    assert ParallelDims.parse("") == ParallelDims()
    for text in ("tp", "tp=2,tp=2", "sp=2", "tp=-1", "tp=two"):
        with pytest.raises(ValueError, match="cannot read"):
            ParallelDims.parse(text)


def axis_ranks(group: ProcessGroup, dims: ParallelDims, ranks: list[int] | None) -> dict[str, list[int]] | None:
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    mesh = dims.build_mesh("cpu", ranks)
    return {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("pp", "dp", "cp", "tp")}


@pytest.fixture
def default_group_of_7_seconds() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=7))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group_of_7_seconds")
def test_groups_have_the_time_limit_of_the_default_group() -> None:
    mesh = ParallelDims().build_mesh("cpu")
    assert [limit(mesh.get_group(axis)) for axis in MESH_AXES] == [7] * 4
    assert limit(form_group([0])) == 7
    # Such a group serves other waits than the default group's, those for files, say.
    assert limit(form_group([0], "gloo")) == 1800


def limit(group: ProcessGroup) -> float:
    seconds = time_limit(group)
    assert seconds is not None
    return seconds.total_seconds()


def test_axes_outermost_first(ranks: RankPool) -> None:
    results = ranks.run(axis_ranks, ParallelDims(pp=2, tp=2), None)
    assert [r["tp"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["pp"] for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["dp"] for r in results] == [[0], [1], [2], [3]]


def test_a_grid_on_a_subset(ranks: RankPool) -> None:
    results = ranks.run(axis_ranks, ParallelDims(dp=2), [1, 3])
    assert [r and r["dp"] for r in results] == [None, [1, 3], None, [1, 3]]


def sums_over_three_grids(group: ProcessGroup) -> list[float]:
    """The first two ranks belong to a grid of their own between two grids of all ranks."""
    sums = []
    for dims, ranks in ((ParallelDims(tp=4), None), (ParallelDims(tp=2), [0, 1]), (ParallelDims(dp=2, tp=2), None)):
        if ranks is None or dist.get_rank() in ranks:
            total = torch.tensor(1.0 + dist.get_rank())
            dist.all_reduce(total, group=dims.build_mesh("cpu", ranks).get_group("tp"))
            sums.append(total.item())
    return sums


def test_grids_on_different_subsets_live_side_by_side(ranks: RankPool) -> None:
    assert ranks.run(sums_over_three_grids, timeout=30) == [[10, 3, 3], [10, 3, 3], [10, 7], [10, 7]]


def groups_of_torch_between(group: ProcessGroup) -> tuple[float, list[str]]:
    """Rank r forms r groups of itself, and ranks 0 and 1 a common group twice, among torch's groups of all ranks."""
    me = dist.get_rank()
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group(range(4)))
    names = [form_group([me]).group_name for _ in range(me)]
    names += [form_group([0, 1]).group_name for _ in range(2) if me < 2]
    for common in (dist.new_group(range(4)), form_group(range(4))):
        dist.all_reduce(total, group=common)
    return total.item(), names


def test_groups_of_a_few_ranks_leave_the_names_of_other_groups_alone(ranks: RankPool) -> None:
    results = ranks.run(groups_of_torch_between, timeout=30)
    assert [total for total, _ in results] == [64.0] * 4
    names = [names for _, names in results]
    assert [len(set(names_of_rank)) for names_of_rank in names] == [2, 3, 2, 3]
    assert names[0] == names[1][1:]


def test_slices_of_the_mesh_serve_fsdp(ranks: RankPool) -> None:
    assert ranks.run(data_parallel_gradient) == [[2.0, 2.0], [3.0, 3.0]] * 2


def data_parallel_gradient(group: ProcessGroup) -> list[float]:
    mesh = ParallelDims(dp=2, tp=2).build_mesh("cpu")
    model = torch.nn.Linear(2, 1, bias=False)
    fully_shard(model, mesh=mesh["dp"])
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    return gradient.full_tensor().flatten().tolist()


def wrong_ranks(group: ProcessGroup) -> list[str]:
    messages = []
    for dims, ranks in (
        (ParallelDims(tp=2), [0, 1, 2]),
        (ParallelDims(tp=2), [1, 0]),
        (ParallelDims(tp=2), [0, 9]),
        (ParallelDims(), [2]),
    ):
        with pytest.raises(ValueError, match="ranks") as caught:
            dims.build_mesh("cpu", ranks)
        messages.append(str(caught.value))
    return messages


def test_wrong_ranks_are_named(ranks: RankPool) -> None:
    first, second = ranks.run(wrong_ranks, world=2)
    assert "needs 2 ranks, but was given 3: [0, 1, 2]; start 2 (torchrun --nproc-per-node), or choose" in first[0]
    assert "ranks=[1, 0] must increase and lie in 0..3" in first[1]
    assert "[0, 9]" in first[2]
    assert "rank 1 is not a member of ranks=[2]" in second[3]


def other_grids(group: ProcessGroup) -> list[str]:
    messages = []
    for dims, ranks in (
        ([ParallelDims(tp=4), ParallelDims(dp=2, tp=2)], None),
        ([ParallelDims(tp=4), ParallelDims(tp=2)], None),
        ([ParallelDims(tp=2), ParallelDims(pp=2)], [1, 3]),
    ):
        if ranks is None or dist.get_rank() in ranks:
            with pytest.raises(ValueError, match="rank") as caught:
                dims[dist.get_rank() == 3].build_mesh("cpu", ranks)
            messages.append(str(caught.value))
    with pytest.raises(ValueError, match="forms a group with backend=None and rank 3 a group with backend='gloo'"):
        form_group(range(4), "gloo" if dist.get_rank() == 3 else None)
    mesh = ParallelDims(tp=4).build_mesh("cpu")  # they still can
    total = torch.ones(())
    dist.all_reduce(total, group=mesh.get_group("tp"))
    assert total == 4
    return messages


def test_ranks_that_build_other_grids_are_told(ranks: RankPool) -> None:
    results = ranks.run(other_grids, timeout=60)
    one, two, three = results[3]
    assert results == [[one, two], [one, two, three], [one, two], [one, two, three]]
    assert (
        "rank 0 forms ParallelDims(dp=1, pp=1, cp=1, tp=4, ep=1, replicate=1) and rank 3 ParallelDims(dp=2, pp" in one
    )
    assert "and rank 3 ParallelDims(dp=1, pp=1, cp=1, tp=2" in two
    assert "forms ParallelDims(dp=1, pp=1, cp=1, tp=2, ep=1, replicate=1) and rank 3 ParallelDims(dp=1, pp=2" in three


def other_members(group: ProcessGroup, lists: dict[int, list[int] | None]) -> str | None:
    me, message = dist.get_rank(), None
    if me in lists:
        ranks = lists[me]
        dims = ParallelDims(tp=4 if ranks is None else len(ranks))
        with pytest.raises(ValueError, match="they would wait for ever") as caught:
            dims.build_mesh("cpu", ranks)
        message = str(caught.value)
    dist.barrier()
    # Rank 2 first forms a group with 3 alone: 1 waits for it, which is no mistake. Lists that failed before work.
    for ranks in ([2, 3], [1, 2], [0, 1, 2]):
        if me in ranks:
            if (me, ranks) == (3, [2, 3]):
                time.sleep(1)
            total = torch.ones(())
            dist.all_reduce(total, group=form_group(ranks))
            assert total == len(ranks)
    return message


@pytest.mark.parametrize(
    ("lists", "two"),
    [
        # Three in a cycle, and a fourth that waits for them.
        pytest.param(
            {0: [0, 1], 1: [1, 2], 2: [0, 2], 3: [0, 1, 2, 3]},
            "ranks=[0, 1] and rank 1 a group of ranks=[1, 2]",
            marks=pytest.mark.slow,
        ),
        # Two that wait for each other.
        pytest.param(
            {1: [1, 2], 2: [0, 1, 2], 0: [0, 1, 2]},
            "ranks=[0, 1, 2] and rank 1 a group of ranks=[1, 2]",
            marks=pytest.mark.slow,
        ),
        # All, and a part.
        pytest.param({0: None, 1: None, 2: [1, 2], 3: None}, "", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_give_other_members_are_told(ranks: RankPool, lists: dict[int, list[int] | None], two: str) -> None:
    messages = [message for message in ranks.run(other_members, lists, timeout=60) if message is not None]
    assert len(messages) == len(lists)
    assert not two or f"rank 0 forms a group of {two}, and they" in messages[-1]


def left_alone(group: ProcessGroup) -> None:
    for rank in range(2):  # the second rank comes when the first has given up
        if dist.get_rank() == rank:
            dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))
            message = rf"ranks \[{1 - rank}\] did not come to form .*tp=2.* on ranks \[0, 1\] within 1"
            try:
                with pytest.raises(TimeoutError, match=message):
                    ParallelDims(tp=2).build_mesh("cpu", [0, 1])
            finally:
                dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=300))
        dist.barrier(group)


def test_members_that_do_not_come_are_named(ranks: RankPool) -> None:
    ranks.run(left_alone, timeout=60)
