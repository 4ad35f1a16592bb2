"""The grid: Megatron's own groups, entered and left, one at a time, on any ranks."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool

# tp, cp, ep, dp, pp; expert tensor parallelism as Megatron chooses it, then as we do.
GRIDS = [
    ParallelDims(tp=4),
    ParallelDims(tp=2, dp=2, ep=2),
    ParallelDims(pp=2, tp=2),
    ParallelDims(dp=4, ep=2),
    ParallelDims(cp=2, tp=2),
    ParallelDims(pp=4),
]


def globals_of_megatron() -> dict[str, object]:
    """Every group and list of ranks that Megatron's global state holds, groups as their ranks."""
    from megatron.core import parallel_state

    def plain(value: object) -> object:
        return dist.get_process_group_ranks(value) if isinstance(value, ProcessGroup) else value

    names = [name for name in vars(parallel_state) if name.isupper() and ("GROUP" in name or "RANK" in name)]
    return {name: plain(getattr(parallel_state, name)) for name in names}


def groups_on(group: ProcessGroup, dims: ParallelDims) -> None:
    from megatron.core import parallel_state

    from megatron_utils import megatron_grid
    from megatron_utils.testing import cpu_stand_in

    before = globals_of_megatron()
    with cpu_stand_in(), megatron_grid(dims) as grid:
        ours = globals_of_megatron()
        assert parallel_state.get_tensor_model_parallel_world_size() == dims.tp
        assert parallel_state.get_pipeline_model_parallel_world_size() == dims.pp
        assert parallel_state.get_data_parallel_world_size() == dims.dp
        assert parallel_state.get_context_parallel_world_size() == dims.cp
        assert parallel_state.get_expert_model_parallel_world_size() == dims.ep
        assert (grid.tp is None) == (dims.tp == 1)
        total = torch.ones(1)
        dist.all_reduce(total, group=grid.groups.dp)
        assert total.item() == dims.dp
    assert globals_of_megatron() == before
    parallel_state.initialize_model_parallel(
        dims.tp,
        dims.pp,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=grid.expert_tp,
        create_gloo_process_groups=False,
    )
    try:
        theirs = globals_of_megatron()
        different = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
        assert not different, different
    finally:
        parallel_state.destroy_model_parallel()
        for name, value in before.items():
            setattr(parallel_state, name, value)


@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_the_groups_are_those_of_megatron_itself(ranks: RankPool, dims: ParallelDims) -> None:
    ranks.run(groups_on, dims)


def one_after_the_other_on(group: ProcessGroup) -> list[str]:
    from megatron_utils.testing import cpu_stand_in

    with cpu_stand_in():
        return grids_in_turn()


def grids_in_turn() -> list[str]:
    from megatron_utils import megatron_grid

    errors = []
    state = torch.get_rng_state()
    for dims in (ParallelDims(tp=2), ParallelDims(dp=2), ParallelDims(tp=2)):
        with megatron_grid(dims, ranks=range(2)):
            try:
                with megatron_grid(dims, ranks=range(2)):
                    pass
            except RuntimeError as error:
                errors.append(str(error))
    try:
        with megatron_grid(dims, ranks=range(2)):
            raise KeyError("what the block raises leaves it, and the grid")
    except KeyError:
        pass
    with megatron_grid(dims, ranks=range(2)) as grid, grid.as_world():
        assert dist.get_world_size() == 2
    assert dist.get_world_size() == 4
    assert torch.equal(torch.get_rng_state(), state)
    return errors


def test_grids_come_one_after_the_other_and_never_two_at_once(ranks: RankPool) -> None:
    for errors in ranks.run(one_after_the_other_on, world=2):
        assert len(errors) == 3
        assert all("a Megatron grid is already active" in error for error in errors)


def random_streams_on(group: ProcessGroup) -> list[torch.Tensor]:
    from megatron.core.tensor_parallel import random

    from megatron_utils import megatron_grid
    from megatron_utils.testing import cpu_stand_in

    before = torch.get_rng_state()
    with cpu_stand_in(), megatron_grid(ParallelDims(tp=2), ranks=range(2), seed=7):
        replicated = torch.rand(4)
        with random.get_cuda_rng_tracker().fork():
            sharded = torch.rand(4)
        assert random._CUDA_RNG_STATE_TRACKER is not None
    assert random._CUDA_RNG_STATE_TRACKER is None
    # The seed is the block's: torch's own stream goes on as if there had been none.
    assert torch.equal(torch.get_rng_state(), before)
    return [replicated, sharded]


def test_random_streams_differ_over_tensor_parallelism_only_where_sharded(ranks: RankPool) -> None:
    (same, one), (also, other) = ranks.run(random_streams_on, world=2)
    assert torch.equal(same, also)
    assert not torch.equal(one, other)


def mistakes_on(group: ProcessGroup) -> list[str]:
    from megatron_utils import megatron_grid

    messages = []
    for dims, options in (
        (ParallelDims(tp=2), {"virtual_stages": 2}),
        (ParallelDims(pp=2), {"virtual_stages": 1}),
        (ParallelDims(tp=2), {"expert_tp": 4}),
        (ParallelDims(tp=4), {}),
        (ParallelDims(dp=2, replicate=2), {}),
        (2, {}),
    ):
        try:
            with megatron_grid(dims, ranks=range(2), **options):
                raise AssertionError("was accepted")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_mistakes_are_named(ranks: RankPool) -> None:
    no_pipeline, one_stage, expert_tp, too_many, replicas, no_dims = ranks.run(mistakes_on, world=2)[0]
    assert no_pipeline == "virtual_stages=2 needs to be at least 2 with pp > 1, got pp=1"
    assert one_stage == "virtual_stages=1 needs to be at least 2 with pp > 1, got pp=2"
    assert expert_tp == "ep=1 times expert_tp=4 does not divide the dp * cp * tp = 2 ranks of a stage"
    assert "needs 4 ranks, but was given 2" in too_many
    assert replicas == "replicate=2 is not offered: Megatron-Core shards over all of dp; leave it out"
    assert no_dims == "dims=2 must be sizes of a grid, such as ParallelDims(tp=2)"


DESTROYED = """
import os
import torch
import torch.distributed as dist
from megatron_utils import megatron_grid
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims

def threads():
    return [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]

for _ in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu_stand_in():
        for _ in range(2):
            with megatron_grid(ParallelDims()) as grid:
                dist.all_reduce(torch.zeros(1), group=grid.groups.tp)
    assert any("gloo" in name for name in threads()), threads()
    del grid
    dist.destroy_process_group()
    assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the threads in /proc")
@pytest.mark.slow
def test_a_destroyed_default_group_takes_the_groups_of_its_grids_along() -> None:
    """A thread of gloo that still runs as the interpreter ends can abort it."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", DESTROYED], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
