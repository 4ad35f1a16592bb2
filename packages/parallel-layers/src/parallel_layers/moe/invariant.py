"""Mixtures of experts with the same bits at every size of their groups and in every batch, for `tp_invariant`.

A row of an expert is one token's. The second GEMM is cut into blocks of the contraction, whose fp32 sums are added as
one tree over the ranks that divide an expert; then the row is rounded, and its bias added. A token's rows are added in
the order of its choices, wherever the experts are.

Shape suffixes: as in `experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.device.gpus import on_gpu
from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import scatter_to_sequence_parallel
from parallel_layers.kernels.matmul import MAX_LEAVES, step_of, supports_matmul
from parallel_layers.kernels.matmul_tiles import grouped_matmul
from parallel_layers.linear.invariant import InvariantProduct
from parallel_layers.linear.transports import tree_scatter
from parallel_layers.module.autocast import as_operand, without_autocast
from parallel_layers.moe.dispatch import Dispatch
from parallel_layers.moe.experts import GroupedExperts, grouped_bias, is_one_kernel, loop_backward
from parallel_layers.moe.layer import MoE


class InvariantExperts(GroupedExperts):
    """The view of routed experts. The output is the whole sum over a token's experts on every rank, no part of it.

    `blocks` is the number of blocks of the second contraction over all ranks. Communication beyond `GroupedExperts`:
    an all-to-all of fp32 rows `[M, H]` and an all-gather of rows over the tensor-parallel group.
    """

    blocks: int

    def forward(self, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the sum over a token's experts of weight · expert(x): `[T, H]`."""
        dispatch = Dispatch.plan(experts_Tk, self.num_experts, self.expert_group)
        rows, weights = dispatch.to_experts(x_TH, weights_Tk)
        return dispatch.to_tokens(self.compute(rows, weights, dispatch.counts))

    def compute(self, rows: Tensor, weights: Tensor, counts: Tensor, *, biased: bool = True) -> Tensor:
        """See `GroupedExperts.compute`; the outputs are whole."""
        first, second = (as_operand(getattr(self, name)) for name in self.projections)
        if self.input_major:
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        rows = as_operand(rows)
        wide = _GroupedProduct.apply(rows, first, counts, None, None)
        # On a CPU in fp64, which hides the place of an element; see `kernels.exact`.
        wide, of_rows = (wide, weights) if on_gpu(wide) else (wide.double(), weights.double())
        inner = self._activate(wide, of_rows, counts).to(rows.dtype)
        out: Tensor = _GroupedProduct.apply(inner, second, counts, self.blocks // self.tp, self.group)
        if self.down_proj_bias is not None and biased:
            # Each of tp ranks adds the bias, so each has a share of the weights' gradient.
            weights = weights.detach() + (weights - weights.detach()) / self.tp
            out = out + grouped_bias(self.down_proj_bias, counts, weights)
        return out

    @property
    def waits_for_counts(self) -> bool:
        """Whether the GEMMs are loops over experts, for which the host reads counts from the device."""
        first, second = (
            weight.transpose(1, 2) if self.input_major else weight
            for weight in (getattr(self, name) for name in self.projections)
        )
        return not (_has_kernel(first, None) and _has_kernel(second, self.blocks // self.tp))


class InvariantMixture(MoE):
    """The view of a mixture with `InvariantExperts`."""

    def _sum(self, out: Tensor) -> Tensor:
        """Return this rank's tokens; the experts have summed already."""
        return scatter_to_sequence_parallel(out, self.group) if self.sequence_parallel else out


class _GroupedProduct(torch.autograd.Function):
    """`grouped_linear` of `InvariantProduct`s, summed over the ranks of a group; gradients are the ordinary ones."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, leaves: int | None, group: ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        if group is None:
            return _multiply(x, weight, counts, leaves, x.dtype)
        y = _multiply(x, weight, counts, leaves, torch.float32)
        padded = F.pad(y, (0, 0, 0, -len(y) % group.size()))
        return async_collectives.all_gather(tree_scatter(padded, group).to(x.dtype), group)[: len(y)]

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        if not is_one_kernel(weight):
            dx, dw = loop_backward(dy.contiguous(), x, weight, counts, trains)
            return dx, dw if trains else None, None, None, None
        ends = counts.cumsum(0, dtype=torch.int32)
        dw = F.grouped_mm(dy.t(), x, offs=ends) if trains else None
        return F.grouped_mm(dy, weight, offs=ends), dw, None, None, None


def _multiply(x: Tensor, weight: Tensor, counts: Tensor, leaves: int | None, dtype: torch.dtype) -> Tensor:
    """Return each run of rows times the transposed weight of its expert: `[M, K]`, `[e, N, K]` -> `[M, N]`."""
    if len(x) and x.dtype == weight.dtype and _has_kernel(weight, leaves):
        block_k = step_of(x.shape[1], leaves or 1, in_tree=leaves is not None)
        return grouped_matmul(x.contiguous(), weight, counts, leaves=leaves or 1, block_k=block_k, dtype=dtype)
    product = InvariantProduct(leaves)
    runs = x.split(counts.tolist())
    return torch.cat([product(rows, of_expert, None, dtype) for rows, of_expert in zip(runs, weight, strict=True)])


def _has_kernel(weight_eNK: Tensor, leaves: int | None) -> bool:
    """Return whether one kernel multiplies rows of the weight's dtype, without host synchronisation."""
    outputs, inputs = weight_eNK.shape[1:]
    leaf_size = None if leaves is None else inputs // leaves
    return (leaves or 1) <= MAX_LEAVES and outputs % 8 == 0 and supports_matmul(weight_eNK, weight_eNK, leaf_size)
