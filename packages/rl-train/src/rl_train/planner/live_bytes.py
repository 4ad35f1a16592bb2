"""Count the live bytes of layers that run on the meta device, and form groups of ranks for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The operators whose own temporaries count: their bodies run on the meta device, too.
WITH_TEMPORARIES = {
    f"parallel_layers::{name}"
    for name in (
        *("log_probs", "log_probs_backward", "packed_attention_backward"),
        *("chunked_gated_delta_rule", "chunked_gated_delta_rule_backward"),
    )
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make inside, while they are alive, without `ignored`."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = 0
        self._peak = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in ignored}

    def cut(self) -> int:
        """Return the most bytes since the last cut."""
        peak, self._peak = max(self._peak, self.bytes), self.bytes
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count the tensors that it returns."""
        self._peak = max(self._peak, self.bytes)
        if func._schema.name in WITH_TEMPORARIES:
            with self:
                out = OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        # Without a dispatch mode autograd adds a gradient in place to one that nothing else refers to.
        sums_gradients = func is torch.ops.aten.add.Tensor and _runs_backward()
        self._peak = self._peak if sums_gradients else max(self._peak, self.bytes)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._held:
            self._held.add(storage._cdata)
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, address: int, size: int) -> None:
        self._held.discard(address)
        self.bytes -= size


def _runs_backward() -> bool:
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


@contextmanager
def idle_groups(*members: range) -> Iterator[list[ProcessGroup | None]]:
    """Yield a group of each of these ranges of ranks, of which this process is the first; None for one rank.

    torch's fake backend serves the groups. No default group is needed, and no other group changes.
    """
    import torch.distributed._functional_collectives  # defines the collectives of the meta device; takes half a second
    from torch._C import _distributed_c10d as c10d  # torch has no public door to its fake backend

    groups: list[ProcessGroup | None] = []
    for number, ranks in enumerate(members):
        group = None
        if len(ranks) > 1:
            group = ProcessGroup(0, len(ranks))  # type: ignore[call-arg]
            backend = c10d.FakeProcessGroup._create_internal(0, len(ranks))
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
            group._set_group_name(f"rl_train.planner.{number}")  # type: ignore[arg-type]
            c10d._register_process_group(group.group_name, group)
            distributed_c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}
        groups.append(group)
    try:
        yield groups
    finally:
        for group in filter(None, groups):
            c10d._unregister_process_group(group.group_name)
            del distributed_c10d._world.pg_group_ranks[group]
