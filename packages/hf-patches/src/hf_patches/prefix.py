"""Prefix sharing under sequence parallelism: the rows of each rank for the head.

Shapes: T tokens of the shared batch, R scored tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_patches.batch import BatchPlan
from parallel_layers.data import SharedPrefixes
from parallel_layers.distributed import gather_from_sequence_parallel


@dataclass(frozen=True)
class HeadRows:
    """The hidden states of this rank that the head takes, and the places of its results.

    A rank's rows are padded to the largest count of any rank, so that one all-gather joins them.

    Attributes:
        local: `[m]`, the indices of this rank's tokens.
        chosen: `[c]`, their numbers among the R rows; the other m - c are padding.
        order: `[R]`, the place of each row among the gathered sp * m.
    """

    local: Tensor
    chosen: Tensor
    order: Tensor
    plan: BatchPlan

    @property
    def count(self) -> int:
        """Return R."""
        return len(self.order)

    def take(self, values_R: Tensor, fill: float) -> Tensor:
        """Return this rank's part of a tensor with one entry per response token."""
        local_values = values_R[self.chosen.to(values_R.device)]
        return torch.cat(
            [local_values, local_values.new_full((len(self.local) - len(local_values), *local_values.shape[1:]), fill)]
        )

    def collect(self, local: Tensor) -> Tensor:
        """Gather `[m, n]` of each rank into `[R, n]` on every rank. Backward: this rank's part of the gradient."""
        gathered = gather_from_sequence_parallel(local, self.plan.group, reduce_gradient=False)
        return gathered[self.order.to(gathered.device)]


def head_rows(shared: SharedPrefixes, plan: BatchPlan) -> HeadRows:
    """Assign every row to the rank that holds its token."""
    share = plan.num_tokens // plan.world_size
    owner = shared.rows // share
    counts = torch.bincount(owner, minlength=plan.world_size)
    width = max(int(counts.max()), 1)
    rank = 0 if plan.group is None else plan.group.rank()
    chosen = (owner == rank).nonzero().flatten()
    local = torch.zeros(width, dtype=torch.int64)
    local[: len(chosen)] = shared.rows[chosen] - rank * share
    order = torch.empty_like(shared.rows)
    for peer in range(plan.world_size):
        peer_rows = (owner == peer).nonzero().flatten()
        order[peer_rows] = peer * width + torch.arange(len(peer_rows))
    return HeadRows(local.to(shared.labels.device), chosen, order, plan)
