"""Dispatch of tokens to experts and back: sorting by expert, and the exchange between the expert group's ranks.

Shape suffixes: T tokens, k experts per token, M = T · k rows (at the experts: the received rows), E experts,
e = E / ep experts of this rank, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import all_to_all
from parallel_layers.kernels.rows import copy_rows, sum_rows
from parallel_layers.kernels.runtime import has_triton, use_triton


@dataclass(frozen=True)
class Move:
    """The copy of tokens to rows, and the sum of each token's rows; each is the adjoint of the other. No gradient.

    Row i is token `order[i] // top_k`; `inverse` has the rows of the tokens in order. The sum is a gather and a sum:
    deterministic, without atomics.
    """

    order: Tensor
    inverse: Tensor
    top_k: int

    def to_rows(self, x: Tensor) -> Tensor:
        """Copy tokens to rows: `[T, H]` -> `[M, H]`, of any dtype."""
        if has_triton(x):
            return copy_rows(x, self.inverse, self.top_k)
        return x.index_select(0, self.order // self.top_k)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Sum each token's rows: `[M, H]` -> `[T, H]`."""
        if use_triton(rows):
            return sum_rows(rows, self.inverse, self.top_k)
        # fp64 hides the order of the sums on a CPU; see `kernels.exact`.
        of_tokens = rows.index_select(0, self.inverse).view(-1, self.top_k, rows.shape[1])
        return of_tokens.sum(1, dtype=torch.float64).to(rows.dtype)


class _MoveFunction(torch.autograd.Function):
    """`Move.to_rows` or `Move.to_tokens` with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int, to_rows: bool) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.top_k, ctx.to_rows = top_k, to_rows
        move = Move(order, inverse, top_k)
        return move.to_rows(x) if to_rows else move.to_tokens(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _MoveFunction.apply(gradient, *ctx.saved_tensors, ctx.top_k, not ctx.to_rows), None, None, None, None


@dataclass(frozen=True)
class _Exchange:
    """The exchange of rows between ranks: rows sent and received per rank, and the order of received rows by expert."""

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    order: Tensor
    inverse: Tensor

    def go(self, rows: Tensor) -> Tensor:
        arrived = all_to_all(rows, self.group, input_sizes=self.sent, output_sizes=self.received)
        return arrived.index_select(0, self.order)

    def come_back(self, rows: Tensor) -> Tensor:
        rows = rows.index_select(0, self.inverse)
        return all_to_all(rows, self.group, input_sizes=self.received, output_sizes=self.sent)


@dataclass(frozen=True)
class Dispatch:
    """The dispatch of one layer's tokens, made by `plan`."""

    counts: Tensor
    """Rows of each of this rank's experts, `[e]` int64."""
    move: Move
    """The copy of this rank's tokens to rows, before they are sent."""
    _exchange: _Exchange | None

    @classmethod
    def plan(cls, experts_Tk: Tensor, num_experts: int, group: ProcessGroup | None) -> Dispatch:
        """Plan the dispatch of this rank's tokens; rank r of the group has experts r · e to (r + 1) · e - 1.

        Communication: with a group, one all-to-all of `[E]` counts, and a host synchronisation to learn them.
        """
        # A radix sort of short keys takes fewer passes.
        chosen = experts_Tk.flatten().to(torch.int16 if num_experts < 2**15 else torch.int64)
        ordered, order = chosen.sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(ordered, torch.arange(num_experts, device=order.device).to(ordered), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        top_k = experts_Tk.shape[1]
        if group is None or group.size() == 1:
            return cls(counts, Move(order, inverse, top_k), None)
        ranks = group.size()
        arriving = all_to_all(counts, group).view(ranks, -1)
        if counts.is_meta:  # a plan: every rank sends and receives equally many rows
            send_sizes = receive_sizes = [len(order) // ranks] * ranks
        else:
            send_sizes, receive_sizes = torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1))).tolist()
        # Rows arrive by rank, and by expert within a rank.
        expert = torch.arange(arriving.shape[1], device=chosen.device).repeat(ranks)
        rows = expert.repeat_interleave(arriving.flatten(), output_size=sum(receive_sizes))
        by_expert = rows.argsort(stable=True)
        exchange = _Exchange(group, send_sizes, receive_sizes, by_expert, by_expert.argsort())
        return cls(arriving.sum(0), Move(order, inverse, top_k), exchange)

    @property
    def is_local(self) -> bool:
        """True if all rows stay on this rank."""
        return self._exchange is None

    def to_experts(self, x_TH: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor]:
        """Send each token to its k experts; return rows `[M, H]` and weights `[M]`, ordered by this rank's experts."""
        rows = _MoveFunction.apply(x_TH, self.move.order, self.move.inverse, self.move.top_k, True)
        return rows if self._exchange is None else self._exchange.go(rows), self.weights_of_rows(weights_Tk)

    def weights_of_rows(self, weights_Tk: Tensor) -> Tensor:
        """Return the weights `[M]` of the rows that `to_experts` returns."""
        weights = weights_Tk.flatten().index_select(0, self.move.order)
        return weights if self._exchange is None else self._exchange.go(weights)

    def to_tokens(self, rows_MH: Tensor) -> Tensor:
        """Send the rows back and sum over each token's experts: `[M, H]` -> `[T, H]`."""
        rows = rows_MH if self._exchange is None else self._exchange.come_back(rows_MH)
        result: Tensor = _MoveFunction.apply(rows, self.move.order, self.move.inverse, self.move.top_k, False)
        return result
