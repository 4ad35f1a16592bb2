"""The functions behind the parallel linear layers (Megatron-LM, https://arxiv.org/abs/1909.08053).

A column-parallel layer divides the outputs, a row-parallel layer the inputs, so that a pair of them around an
elementwise function needs one all-reduce in the forward and one in the backward. Under sequence parallelism
(https://arxiv.org/abs/2205.05198) the tokens are divided outside the pair: an all-gather before it and a reduce-scatter
after it. The gathered input is not saved; the backward gathers it again.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `I/tp` or `O/tp`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.autocast import as_operand, without_autocast
from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.overlap import (
    Overlap,
    check_overlap,
    choose_overlap,
    gather_product,
    gather_product_and_x,
    product_scatter,
    product_scatter_beside_gather,
)
from parallel_layers.products import add_wide_mm, product, wide, wide_mm


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    reduce_gradient: bool = True,
    shared_rows: tuple[int, int] | None = None,
    output_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    overlap: Overlap = "auto",
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`y = x W^T + b` where each rank has some rows of W and computes those columns of y.

    Args:
        x: `[T, ..., I]`, replicated; under sequence parallelism this rank's `[T/tp, ..., I]`, of one shape on every
            rank, which is not checked: it would cost a communication. Ranks with unequal numbers of tokens gather them
            by `collectives.gather_from_sequence_parallel(x, group, sizes=...)`, whose backward sums, and pass the
            result here with `reduce_gradient=False`.
        weight: `[O/tp, I]`.
        bias: `[O/tp]` or None.
        group: The tensor-parallel group.
        sequence_parallel: Gather the tokens first.
        reduce_gradient: False leaves dx this rank's partial sum, for callers that add several partial sums (a frozen
            weight and its low-rank adapter) and reduce them once.
        shared_rows: `(first, replicas)`: the rows from `first` on are the same on `replicas` consecutive ranks (KV
            heads); their gradients are summed over these.
        output_dtype: Of y; default x's. A wider one is the product's own: nothing is rounded to x's first.
        reduce_dtype: Of the sum dx over the ranks; default at least fp32, see `row_parallel_linear`.
        overlap: How the gather of x overlaps with the product under sequence parallelism; see `overlap`. The backward
            overlaps in every case, by whole collectives, or over symmetric memory where dx is summed in its own dtype.
        main_grads: fp32 tensors that the gradients of weight and bias are added to; the parameters' `.grad` then stay
            None.

    Returns:
        `[T, ..., O/tp]`.

    Forward: none; sequence parallel: all-gather of x, overlapped with the product of this rank's own tokens.
    Backward: `dx = dy W` all-reduced under the computation of `dW = dy^T x`. Sequence parallel: all-gather of x under
    that of dx, reduce-scatter of dx under that of dW. Shared rows: one more all-reduce of their
    gradients for the weight, and one for the bias.

    Raises:
        ValueError: `reduce_gradient=False` under sequence parallelism, which cannot return partial sums of its tokens;
            x and weight differ in dtype outside of torch.autocast; or `overlap` is unknown, or cannot be used by these
            ranks.
    """
    check_overlap(overlap)
    check_reduce_gradient(reduce_gradient, sequence_parallel)
    if not async_collectives.is_sharded(group) and main_grads == (None, None) and output_dtype is None:
        return F.linear(x, weight, bias)
    reduce = async_collectives.is_sharded(group) and reduce_gradient
    gather = async_collectives.is_sharded(group) and sequence_parallel
    options = output_dtype, reduce_dtype, overlap
    return _apply(_ColumnLinear, x, weight, bias, group, gather, reduce, shared_rows, options, *main_grads)


def check_reduce_gradient(reduce_gradient: bool, sequence_parallel: bool) -> None:
    """Raise ValueError for partial sums of a gradient of which each rank is to have its own tokens."""
    if sequence_parallel and not reduce_gradient:
        raise ValueError(
            "reduce_gradient=False leaves dx a partial sum over all tokens, and sequence_parallel=True returns dx for "
            "this rank's tokens only; gather x with gather_from_sequence_parallel and pass sequence_parallel=False"
        )


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    output_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    overlap: Overlap = "auto",
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """`y = sum over ranks of x W^T + b` where each rank has some columns of W and of x.

    Args:
        x: `[T, ..., I/tp]`, of one shape on every rank, which is not checked.
        weight: `[O, I/tp]`.
        bias: `[O]`, replicated, or None. The first rank adds it to its product, in which that costs no rounding.
        group: The tensor-parallel group.
        sequence_parallel: Keep only this rank's tokens of y, an equal part. Unequal ones:
            `collectives.scatter_to_sequence_parallel(y, group, sizes=...)` of the whole y.
        output_dtype: Of y; default x's.
        reduce_dtype: Of the sum over the ranks; default at least fp32. The ranks' parts are rounded to it before they
            are summed, and the sum at every step. In fp32 a bf16 layer has the error of one that is not divided;
            `torch.bfloat16` sends half the bytes and has 1.2 times that error at tp 2, 1.5 times at tp 4.
        overlap: How the scatter of y, and in the backward the gather of dy, overlap with the products under sequence
            parallelism; see `overlap`.
        main_grads: As in `column_parallel_linear`.

    Returns:
        `[T, ..., O]`, replicated; under sequence parallelism `[T/tp, ..., O]`.

    Forward: all-reduce of y; sequence parallel: reduce-scatter, overlapped with the product chunk by chunk.
    Backward: none; sequence parallel: all-gather of dy, from which each rank computes the whole bias gradient, too,
    overlapped with the part of `dx = dy W` for this rank's own tokens.

    Raises:
        ValueError: x and weight differ in dtype outside of torch.autocast; `overlap` is unknown, or cannot be used by
            these ranks; or they do not divide T.
    """
    check_overlap(overlap)
    if not async_collectives.is_sharded(group) and main_grads == (None, None) and output_dtype is None:
        return F.linear(x, weight, bias)
    options = output_dtype, reduce_dtype, overlap
    return _apply(_RowLinear, x, weight, bias, group, sequence_parallel, options, *main_grads)


def _apply(
    function: type[torch.autograd.Function], x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor:
    """`function` of what torch.autocast makes of a linear's arguments: its backward must find them in one dtype."""
    device = x.device.type
    x, weight, bias = as_operand(x), as_operand(weight), None if bias is None else as_operand(bias)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; cast one of them, or run the model under torch.autocast"
        )
    if not torch.is_autocast_enabled(device):
        return function.apply(x, weight, bias, *options)
    with torch.autocast(device, enabled=False):
        return function.apply(x, weight, bias, *options)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup | None,
        gather: bool,
        reduce: bool,
        shared_rows: tuple[int, int] | None,
        options: tuple[torch.dtype | None, torch.dtype | None, str],
        weight_main_grad: Tensor | None,
        bias_main_grad: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group, ctx.gather, ctx.reduce, ctx.shared_rows = group, gather, reduce, shared_rows
        ctx.main_grads = weight_main_grad, bias_main_grad
        output_dtype, reduce_dtype, overlap = options
        ctx.reduce_dtype = async_collectives.sum_dtype(weight, reduce_dtype) if reduce else None
        if not gather:
            return product(x, weight, bias, output_dtype)
        assert group is not None
        ctx.how = choose_overlap(overlap, x, _rows(x), group, ctx.reduce_dtype)  # of the backward
        how = choose_overlap(overlap, x, _rows(x), group, output_dtype)
        return gather_product(x, weight, bias, group, output_dtype, how)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, shared_rows = ctx.group, ctx.shared_rows
        dy = dy.to(weight.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None

        def weight_gradient(x: Tensor) -> Tensor | None:
            return _outer(dy, x, group, shared_rows, ctx.main_grads[0])

        if ctx.gather:
            if needs_x and needs_weight:
                dx, dw = product_scatter_beside_gather(
                    dy, weight.t(), x, group, ctx.reduce_dtype, ctx.how, weight_gradient
                )
            elif needs_x:
                dx = product_scatter(dy, weight.t(), None, group, ctx.reduce_dtype, ctx.how)
            elif needs_weight:
                dw = weight_gradient(async_collectives.all_gather(x, group))
        else:
            dx = product(dy, weight.t(), None, ctx.reduce_dtype) if needs_x else None
            if dx is not None and ctx.reduce:
                dx = async_collectives.start_all_reduce(dx, group, owned=True)
                async_collectives.head_start(dx)
            dw = weight_gradient(x) if needs_weight else None
            if dx is not None and ctx.reduce:
                dx = async_collectives.wait(dx)
        if needs_bias:
            db = _column_sum(dy, group, shared_rows, ctx.main_grads[1])
        return None if dx is None else dx.to(weight.dtype), dw, db, *[None] * 7


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup | None,
        sequence_parallel: bool,
        options: tuple[torch.dtype | None, torch.dtype | None, str],
        weight_main_grad: Tensor | None,
        bias_main_grad: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group = group if async_collectives.is_sharded(group) else None
        ctx.sequence_parallel = sequence_parallel
        ctx.main_grads = weight_main_grad, bias_main_grad
        output_dtype, reduce_dtype, overlap = options
        output_dtype = x.dtype if output_dtype is None else output_dtype
        if ctx.group is None:
            return product(x, weight, bias, output_dtype)
        dtype = async_collectives.sum_dtype(x, reduce_dtype)
        if sequence_parallel:
            rows = _rows(x) // ctx.group.size()
            ctx.how = choose_overlap(overlap, x, rows, ctx.group)  # of the backward, whose product is in dy's dtype
            how = choose_overlap(overlap, x, rows, ctx.group, dtype)
            y = product_scatter(x, weight, bias, ctx.group, dtype, how)
        else:
            y = product(x, weight, bias if ctx.group.rank() == 0 else None, dtype)
            y = async_collectives.wait(async_collectives.start_all_reduce(y, ctx.group, owned=True))
        return async_collectives.cast(y, output_dtype)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.to(weight.dtype)
        dx = None
        if ctx.group is not None and ctx.sequence_parallel and needs_x:
            dx, dy = gather_product_and_x(dy, weight.t(), ctx.group, ctx.how)
        elif ctx.group is not None and ctx.sequence_parallel:
            dy = async_collectives.all_gather(dy, ctx.group)
        elif needs_x:
            dx = dy.matmul(weight)
        dw = _outer(dy, x, None, None, ctx.main_grads[0]) if needs_weight else None
        db = _column_sum(dy, None, None, ctx.main_grads[1]) if needs_bias else None
        return dx, dw, db, *[None] * 5


def _rows(x: Tensor) -> int:
    """Vectors of the last dim."""
    return math.prod(x.shape[:-1])


def _outer(
    dy: Tensor, x: Tensor, group: ProcessGroup | None, shared_rows: tuple[int, int] | None, main_grad: Tensor | None
) -> Tensor | None:
    """`dW = dy^T x` over all leading dims, completed over shared rows; added to `main_grad` if there is one."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if group is None or shared_rows is None:
        if main_grad is None:
            return dy.t().mm(x)
        add_wide_mm(main_grad, dy.t(), x)
        return None
    first, replicas = shared_rows
    shared = _start_sum_of_shared(wide_mm(dy[:, first:].t(), x), group, replicas)
    own = wide_mm(dy[:, :first].t(), x) if main_grad is not None else dy[:, :first].t().mm(x)
    return _add_to(main_grad, torch.cat([own, _finish_sum_of_shared(shared, group, replicas).to(own.dtype)]))


def _column_sum(
    dy: Tensor, group: ProcessGroup | None, shared_rows: tuple[int, int] | None, main_grad: Tensor | None
) -> Tensor | None:
    """`db`, the sum of dy over all leading dims, completed over shared rows; added to `main_grad` if there is one."""
    dtype = wide(dy.dtype)
    db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=dtype)
    if group is not None and shared_rows is not None:
        first, replicas = shared_rows
        shared = _start_sum_of_shared(db[first:], group, replicas)
        db = torch.cat([db[:first], _finish_sum_of_shared(shared, group, replicas)])
    return _add_to(main_grad, db if main_grad is not None else db.to(dy.dtype))


def sum_gradients_of_shared_rows(bias: Tensor, group: ProcessGroup | None, shared_rows: tuple[int, int]) -> Tensor:
    """The bias itself; backward, the gradients of its shared rows are summed over the ranks that have them.

    Args:
        bias: `[O/tp]`.
        group: The tensor-parallel group.
        shared_rows: As in `column_parallel_linear`.
    """
    if group is None:
        return bias
    first, replicas = shared_rows
    own, shared = bias[:first], bias[first:]
    mine = group.rank() // replicas
    slots = [shared if slot == mine else torch.zeros_like(shared) for slot in range(group.size() // replicas)]
    return torch.cat((own, copy_to_tensor_parallel(torch.stack(slots), group)[mine]))


def _start_sum_of_shared(part: Tensor, group: ProcessGroup, replicas: int) -> Tensor:
    """Begin to sum `part` over each run of `replicas` consecutive ranks.

    One all-reduce of a slot for each run: there is no group of just these ranks, and the whole is small (all KV heads
    of one layer). The sum is one tensor for all, so the copies stay bitwise equal.
    """
    slots = part.new_zeros(group.size() // replicas, *part.shape)
    slots[group.rank() // replicas] = part
    return async_collectives.start_all_reduce(slots, group, owned=True)


def _finish_sum_of_shared(slots: Tensor, group: ProcessGroup, replicas: int) -> Tensor:
    return async_collectives.wait(slots)[group.rank() // replicas]


def _add_to(main_grad: Tensor | None, gradient: Tensor) -> Tensor | None:
    if main_grad is None:
        return gradient
    main_grad.add_(gradient)
    return None
