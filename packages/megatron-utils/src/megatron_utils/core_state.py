"""Megatron-Core's global state: set for a grid, and restored.

The models, schedules and optimizers of this package are given their groups. Some lines of Megatron-Core still read its
module globals (`tests/core_reads.json` lists them); for these lines a grid sets the globals for one `with` block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch.distributed import ProcessGroup

from megatron_utils.core_version import INSTALLED
from megatron_utils.random_streams import seed_streams
from parallel_layers.device import gpu

Groups = Mapping[str, ProcessGroup | None]
# Globals of `parallel_state`, each with the group that it holds, by the names of `ProcessGroupCollection`.
_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
}
# Globals that hold the ranks of a group.
_RANKS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
    "_EMBEDDING_GLOBAL_RANKS": "embd",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "pos_embd",
}


def is_active() -> bool:
    """Return whether Megatron-Core's global state holds the groups of a grid."""
    return bool(parallel_state.is_initialized())


@contextlib.contextmanager
def global_state(groups: Groups, *, virtual_stages: int | None, seed: int | None) -> Iterator[None]:
    """Set Megatron-Core's globals and random streams inside the block, and restore both at its end.

    Args:
        groups: The groups of this rank, by the names of `ProcessGroupCollection`, "tp_dp" and "single" beside.
        virtual_stages: The number of chunks per rank under the interleaved schedule.
        seed: Seeds torch inside the block, and Megatron's streams; None keeps torch's state and starts streams from 0.
    """
    with _restored(parallel_state), _restored(megatron_random):
        _set_groups(groups)
        if virtual_stages is not None:
            parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
            parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = virtual_stages
        parallel_state._set_global_memory_buffer()
        with _seeded(seed):
            yield


def _set_groups(groups: Groups) -> None:
    values: dict[str, Any] = {name: groups[field] for name, field in {**_GROUPS, **INSTALLED.globals}.items()}
    for name, field in {**_RANKS, **INSTALLED.ranks}.items():
        group = groups[field]
        values[name] = None if group is None else dist.get_process_group_ranks(group)
    unknown = sorted(name for name in values if not hasattr(parallel_state, name))
    assert not unknown, f"megatron-core's parallel_state has no {unknown}"
    vars(parallel_state).update(values)
    # Megatron changes the timeout of the groups in this list; None stands for the default group.
    parallel_state._global_process_group_list = [None, *dict.fromkeys(filter(None, groups.values()))]


@contextlib.contextmanager
def _restored(module: Any) -> Iterator[None]:
    """Restore the current private state of a module at the end of the block."""
    state = {name: value for name, value in vars(module).items() if name[0] == "_" and name.isupper()}
    if "_global_process_group_list" in vars(module):
        state["_global_process_group_list"] = module._global_process_group_list
    try:
        yield
    finally:
        vars(module).update(state)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Start Megatron's random streams, inside which parts of its layers run.

    With a seed, torch's own streams start from it and are restored at the end; without a seed they stay unchanged.
    """
    device = gpu.current_device()
    states = torch.get_rng_state(), gpu.get_rng_state(device)

    def put_back() -> None:
        torch.set_rng_state(states[0])
        gpu.set_rng_state(states[1], device)

    seed_streams(seed or 0)
    if seed is None:
        put_back()
        yield
        return
    torch.manual_seed(seed)
    try:
        yield
    finally:
        put_back()
