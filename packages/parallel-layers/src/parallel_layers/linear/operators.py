"""The operators behind the parallel linear layers (Megatron-LM, https://arxiv.org/abs/1909.08053).

A column-parallel layer divides the outputs, a row-parallel layer the inputs, so that a pair of them around an
elementwise function needs one all-reduce in the forward and one in the backward. Under sequence parallelism
(https://arxiv.org/abs/2205.05198) the tokens are divided outside the pair: an all-gather before it and a reduce-scatter
after it. The gathered input is not saved; the backward gathers it again.

The forward and the backward are written once, over a product (`products`) and a transport (`transports`).

Shape suffixes: T tokens, I input features, O output features, of which this rank has `I/tp` or `O/tp`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.autocast import as_operand, wide, without_autocast
from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.products import PLAIN, PlainProduct, Product, add_wide_mm, wide_mm
from parallel_layers.linear.transports import (
    DIVIDED,
    LOCAL,
    WHOLE,
    Call,
    Overlap,
    Transport,
    choose_overlap,
)

MainGrads = tuple[Tensor | None, Tensor | None]
_NO_MAIN_GRADS: MainGrads = (None, None)


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    placement: Placement = UNDIVIDED,
    execution: Execution = DEFAULT,
    reduce_gradient: bool = True,
    shared_rows: tuple[int, int] | None = None,
    output_dtype: torch.dtype | None = None,
    main_grads: MainGrads = _NO_MAIN_GRADS,
) -> Tensor:
    """Return `y = x W^T + b` where each rank has some rows of W and computes those columns of y.

    Args:
        x: `[T, ..., I]`, replicated; under sequence parallelism this rank's `[T/tp, ..., I]`. Every rank must have the
            same shape, which is not checked: a check would communicate. Ranks with unequal numbers of tokens gather
            them by `collectives.gather_from_sequence_parallel(x, group, sizes=...)`, whose backward sums, and pass the
            result here with `reduce_gradient=False`.
        weight: `[O/tp, I]`.
        bias: `[O/tp]` or None.
        placement: Where the parts are. Under sequence parallelism the tokens are gathered first.
        execution: How the product is computed and the tokens are sent.
        reduce_gradient: False leaves dx this rank's partial sum, for callers that add several partial sums (a frozen
            weight and its low-rank adapter) and reduce them once.
        shared_rows: `(first, replicas)`: the rows from `first` on are the same on `replicas` consecutive ranks (KV
            heads); their gradients are summed over these.
        output_dtype: dtype of y; None: x's. A wider dtype comes straight from the GEMM.
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
            x and weight differ in dtype outside of torch.autocast; or these ranks cannot use `execution.overlap`.
    """
    check_reduce_gradient(reduce_gradient, placement)
    group = placement.sharded
    product = _product(execution, x, weight)
    if product.differentiable:
        if group is not None and reduce_gradient:
            gather = gather_from_sequence_parallel if placement.sequence_parallel else copy_to_tensor_parallel
            x = gather(x, group, reduce_dtype=execution.reduce_dtype)
        y = product(x, weight, None, output_dtype)
        return y if bias is None else y + bias
    if group is None and main_grads == _NO_MAIN_GRADS and output_dtype is None and isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)
    x, weight, bias = _operands(x, weight, bias)
    sums = group is not None and reduce_gradient
    dtype = async_collectives.sum_dtype(weight, execution.reduce_dtype) if sums else None
    calls = Call(group, output_dtype, product), Call(group, dtype)
    transports = _transports(placement if sums else UNDIVIDED, execution.overlap, x, _rows(x), *calls)
    return _apply(_ColumnLinear, x, weight, bias, _Plan(*transports, *calls, output_dtype, shared_rows), *main_grads)


def check_reduce_gradient(reduce_gradient: bool, placement: Placement) -> None:
    """Raise ValueError for partial sums of a gradient of which each rank is to have its own tokens."""
    if placement.sequence_parallel and not reduce_gradient:
        raise ValueError(
            "reduce_gradient=False leaves dx a partial sum over all tokens, and sequence_parallel=True returns dx for "
            "this rank's tokens only; gather x with gather_from_sequence_parallel and pass sequence_parallel=False"
        )


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    placement: Placement = UNDIVIDED,
    execution: Execution = DEFAULT,
    output_dtype: torch.dtype | None = None,
    main_grads: MainGrads = _NO_MAIN_GRADS,
) -> Tensor:
    """Return `y = sum over ranks of x W^T + b` where each rank has some columns of W and of x.

    Args:
        x: `[T, ..., I/tp]`, of one shape on every rank, which is not checked.
        weight: `[O, I/tp]`.
        bias: `[O]`, replicated, or None. The first rank adds it to its product, in which that costs no rounding.
        placement: Where the parts are. Under sequence parallelism each rank keeps its own tokens of y, an equal part.
            For unequal parts: `collectives.scatter_to_sequence_parallel(y, group, sizes=...)` of the whole y.
        execution: How the product is computed, the ranks' parts are summed and the tokens are sent.
        output_dtype: dtype of y; None: x's.
        main_grads: As in `column_parallel_linear`.

    Returns:
        `[T, ..., O]`, replicated; under sequence parallelism `[T/tp, ..., O]`.

    Forward: all-reduce of y; sequence parallel: reduce-scatter, overlapped with the product chunk by chunk.
    Backward: none; sequence parallel: all-gather of dy, from which each rank computes the whole bias gradient, too,
    overlapped with the part of `dx = dy W` for this rank's own tokens.

    Raises:
        ValueError: x and weight differ in dtype outside of torch.autocast; these ranks cannot use `execution.overlap`;
            or they do not divide T.
    """
    group, divided = placement.sharded, placement.sequence_parallel
    product = _product(execution, x, weight)
    if product.differentiable:
        y = product(x, weight, None, output_dtype)
        total = reduce_scatter_to_sequence_parallel if divided else reduce_from_tensor_parallel
        y = total(y, group, reduce_dtype=execution.reduce_dtype)
        return y if bias is None else y + (copy_to_tensor_parallel(bias, group) if divided else bias)
    if group is None and main_grads == _NO_MAIN_GRADS and output_dtype is None and isinstance(product, PlainProduct):
        return F.linear(x, weight, bias)
    x, weight, bias = _operands(x, weight, bias)
    output_dtype = x.dtype if output_dtype is None else output_dtype
    whole = group is None or product.transport is not None  # rounded once, to the output's dtype
    dtype = output_dtype if whole else async_collectives.sum_dtype(x, execution.reduce_dtype)
    calls = Call(group, dtype, product), Call(group, None)
    transports = _transports(placement, execution.overlap, x, _rows(x) // placement.tp, *calls)
    return _apply(_RowLinear, x, weight, bias, _Plan(*transports, *calls, output_dtype), *main_grads)


class _Plan(NamedTuple):
    """The plan of one call: the transports of its forward and backward, and the arguments of each."""

    forward: Transport
    backward: Transport
    call: Call
    backward_call: Call
    output_dtype: torch.dtype | None
    shared_rows: tuple[int, int] | None = None


def _transports(
    placement: Placement, overlap: Overlap, x: Tensor, rows: int, call: Call, backward_call: Call
) -> tuple[Transport, Transport]:
    """Choose the transports of a forward and of its backward, of which each rank has `rows` tokens."""
    table = DIVIDED if placement.sequence_parallel else WHOLE
    if placement.sharded is None:
        return LOCAL, LOCAL
    if call.product.transport is not None:
        return table[call.product.transport], table["serial"]
    if not placement.sequence_parallel:
        return table["serial"], table["serial"]
    dtypes = backward_call.dtype, call.dtype
    backward, forward = (choose_overlap(overlap, x, rows, placement.sharded, dtype) for dtype in dtypes)
    return table[forward], table[backward]


def _product(execution: Execution, x: Tensor, weight: Tensor) -> Product:
    return execution.product if execution.product.can_multiply(x, weight) else PLAIN


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the operands as torch.autocast does: the backward must find them in one dtype."""
    x, weight, bias = as_operand(x), as_operand(weight), None if bias is None else as_operand(bias)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; cast one of them, or run the model under torch.autocast"
        )
    return x, weight, bias


def _apply(function: type[torch.autograd.Function], x: Tensor, *arguments: Any) -> Tensor:
    """Apply `function` outside of torch.autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return function.apply(x, *arguments)
    with torch.autocast(device, enabled=False):
        return function.apply(x, *arguments)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, *main_grads: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.plan, ctx.main_grads = plan, main_grads
        return plan.forward.gather_product(x, weight, bias, plan.call)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        transport, call = ctx.plan.backward, ctx.plan.backward_call
        shared = call.group, ctx.plan.shared_rows
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.to(weight.dtype)
        dx = dw = None

        def weight_gradient(x: Tensor) -> Tensor | None:
            return _outer(dy, x, *shared, ctx.main_grads[0])

        if needs_x and needs_weight:
            dx, dw = transport.product_scatter_beside_gather(dy, weight.t(), x, call, weight_gradient)
        elif needs_x:
            dx = transport.product_scatter(dy, weight.t(), None, call)
        elif needs_weight:
            dw = weight_gradient(transport.gather(x, call.group))
        db = _column_sum(dy, *shared, ctx.main_grads[1]) if needs_bias else None
        return None if dx is None else dx.to(weight.dtype), dw, db, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, *main_grads: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.plan, ctx.main_grads = plan, main_grads
        y = plan.forward.product_scatter(x, weight, bias, plan.call)
        return y if plan.output_dtype is None else async_collectives.cast(y, plan.output_dtype)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        transport, group = ctx.plan.backward, ctx.plan.backward_call.group
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.to(weight.dtype)
        dx = None
        if needs_x:
            dx, dy = transport.gather_product_and_x(dy, weight.t(), group)
        else:
            dy = transport.gather(dy, group)
        dw = _outer(dy, x, None, None, ctx.main_grads[0]) if needs_weight else None
        db = _column_sum(dy, None, None, ctx.main_grads[1]) if needs_bias else None
        return dx, dw, db, None, None, None


def _rows(x: Tensor) -> int:
    """Return the number of vectors in the last dim."""
    return math.prod(x.shape[:-1])


def _outer(
    dy: Tensor, x: Tensor, group: ProcessGroup | None, shared_rows: tuple[int, int] | None, main_grad: Tensor | None
) -> Tensor | None:
    """Return `dW = dy^T x` over all leading dims, completed over shared rows, or add dW to `main_grad`."""
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
    """Return `db`, the sum of dy over all leading dims, completed over shared rows, or add db to `main_grad`."""
    dtype = wide(dy.dtype)
    db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=dtype)
    if group is not None and shared_rows is not None:
        first, replicas = shared_rows
        shared = _start_sum_of_shared(db[first:], group, replicas)
        db = torch.cat([db[:first], _finish_sum_of_shared(shared, group, replicas)])
    return _add_to(main_grad, db if main_grad is not None else db.to(dy.dtype))


def sum_gradients_of_shared_rows(bias: Tensor, group: ProcessGroup | None, shared_rows: tuple[int, int]) -> Tensor:
    """Return the bias; backward, sum the gradients of its shared rows over the ranks that have them.

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

    One all-reduce has a slot for each run: there is no group of just these ranks, and all KV heads of one layer are
    small. All ranks get the same tensor, so the copies stay bitwise equal.
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
