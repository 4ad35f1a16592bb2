"""The operators behind the parallel linear layers (Megatron-LM, https://arxiv.org/abs/1909.08053).

A column-parallel layer divides the outputs, a row-parallel layer the inputs, so that a pair of them around an
elementwise function needs one all-reduce in the forward and one in the backward. Under sequence parallelism
(https://arxiv.org/abs/2205.05198) the tokens are divided outside the pair: an all-gather before it and a reduce-scatter
after it. The gathered input is not saved; the backward gathers it again.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `I/tp` or `O/tp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.low_rank import Factors
from parallel_layers.linear.products import PLAIN, LowRankProduct, Product, add_product_, is_torch_alone
from parallel_layers.linear.transports import DIVIDED, WHOLE, Transport, choose_overlap
from parallel_layers.module.autocast import as_operand, wide, without_autocast
from parallel_layers.training.weight_gradients import Destination

_Shared = tuple[ProcessGroup, int, int, int] | None  # the group and `shared_rows`


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    placement: Placement = UNDIVIDED,
    execution: Execution = DEFAULT,
    reduce_gradient: bool = True,
    shared_rows: tuple[int, int, int] | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Return `y = x W^T + b` where each rank has some rows of W and computes those columns of y.

    Args:
        x: `[T, ..., I]`, replicated; under sequence parallelism this rank's `[T/tp, ..., I]`. Every rank must have the
            same shape, which is not checked: a check would communicate.
        weight: `[O/tp, I]`.
        bias: `[O/tp]` or None.
        placement, execution: See `LinearOptions`.
        reduce_gradient: False leaves dx this rank's partial sum, for callers that add several partial sums (a frozen
            weight and its low-rank adapter) and reduce them once.
        shared_rows: `(first, stop, replicas)`: the rows `first` to `stop - 1` are the same on `replicas` consecutive
            ranks (KV heads); their gradients are summed over these ranks.
        factors: A low-rank adapter of a frozen weight: down `[R, I]`, whose gradient is this rank's part of a sum over
            the ranks, and up `[O/tp, R]`.

    Returns:
        `[T, ..., O/tp]`.

    Forward: none; sequence parallel: all-gather of x, overlapped with the GEMM of this rank's own tokens.
    Backward: `dx = dy W` all-reduced during the GEMM of `dW = dy^T x`. Sequence parallel: all-gather of x during the
    GEMM of dx, reduce-scatter of dx during the GEMM of dW. Shared rows: one all-reduce each of both gradients.

    Raises:
        ValueError: `reduce_gradient=False` under sequence parallelism, which cannot return partial sums of its tokens;
            x and weight differ in dtype outside of torch.autocast; or these ranks cannot use `execution.overlap`.
    """
    check_reduce_gradient(reduce_gradient, placement)
    group, product = placement.sharded, execution.product
    if product.differentiable or (factors is not None and _by_autograd(factors)):
        if reduce_gradient:
            gather = gather_from_sequence_parallel if placement.sequence_parallel else copy_to_tensor_parallel
            x = gather(x, group, reduce_dtype=execution.reduce_dtype)
        y = _alone(product, x, weight)
        y = y if bias is None else y + bias
        return y if factors is None else y + _low_rank_term(x, factors, _shared(group, shared_rows))
    if group is None and product is PLAIN and factors is None and is_torch_alone(x, weight, bias):
        return F.linear(x, weight, bias)
    x, weight, bias = _operands(x, weight, bias, product)
    product, transposed, down, up = _with_factors(product, weight, factors)
    place, rows = placement if reduce_gradient else UNDIVIDED, math.prod(x.shape[:-1])
    dtype = async_collectives.sum_dtype(x, execution.reduce_dtype) if place.sharded is not None else None
    forward = _transport(place, execution, x, rows, None, product)
    backward = _transport(place, execution, x, rows, dtype, transposed)
    return _ColumnLinear.apply(x, weight, bias, down, up, forward, backward, _shared(group, shared_rows))


def check_reduce_gradient(reduce_gradient: bool, placement: Placement) -> None:
    """Raise ValueError for `reduce_gradient=False` under sequence parallelism."""
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
    factors: Factors | None = None,
) -> Tensor:
    """Return `y = sum over ranks of x W^T + b` where each rank has some columns of W and of x.

    Args:
        x: `[T, ..., I/tp]`, of one shape on every rank, which is not checked.
        weight: `[O, I/tp]`.
        bias: `[O]`, replicated, or None. The first rank adds it inside its GEMM, without a further rounding.
        placement, execution: See `LinearOptions`. Under sequence parallelism each rank keeps an equal part of y.
        factors: A low-rank adapter of a frozen weight: down `[R, I/tp]`, and up `[O, R]`, whose gradient is this rank's
            part of a sum over the ranks.

    Returns:
        `[T, ..., O]`, replicated; under sequence parallelism `[T/tp, ..., O]`.

    Forward: all-reduce of y; sequence parallel: reduce-scatter, overlapped with the GEMM chunk by chunk.
    Backward: none; sequence parallel: all-gather of dy, from which each rank computes the whole bias gradient, too,
    overlapped with the part of `dx = dy W` for this rank's own tokens.

    Raises:
        ValueError: x and weight differ in dtype outside of torch.autocast; these ranks cannot use `execution.overlap`;
            or they do not divide T.
    """
    group, divided, product = placement.sharded, placement.sequence_parallel, execution.product
    if product.differentiable or (factors is not None and _by_autograd(factors)):
        total = reduce_scatter_to_sequence_parallel if divided else reduce_from_tensor_parallel
        y = _alone(product, x, weight)
        y = y if factors is None else y + _low_rank_term(x, factors, None)
        y = total(y, group, reduce_dtype=execution.reduce_dtype)
        return y if bias is None else y + (copy_to_tensor_parallel(bias, group) if divided else bias)
    if group is None and product is PLAIN and factors is None and is_torch_alone(x, weight, bias):
        return F.linear(x, weight, bias)
    x, weight, bias = _operands(x, weight, bias, product)
    product, transposed, down, up = _with_factors(product, weight, factors)
    rounded_once = group is None or product.in_tree
    dtype = x.dtype if rounded_once else async_collectives.sum_dtype(x, execution.reduce_dtype)
    rows = math.prod(x.shape[:-1]) // placement.tp
    forward = _transport(placement, execution, x, rows, dtype, product)
    backward = _transport(placement, execution, x, rows, None, transposed)
    return _RowLinear.apply(x, weight, bias, down, up, forward, backward)


def _shared(group: ProcessGroup | None, shared_rows: tuple[int, int, int] | None) -> _Shared:
    return None if group is None or shared_rows is None else (group, *shared_rows)


def _by_autograd(factors: Factors) -> bool:
    """Return whether autograd computes the low-rank term separately; torch.compile traces no `LowRankProduct`."""
    return factors.dropout is not None or torch.compiler.is_compiling()


def _with_factors(
    product: Product, weight: Tensor, factors: Factors | None
) -> tuple[Product, Product, Tensor | None, Tensor | None]:
    """Return the `Product` of a forward and of its `dx`, and the factors as operands."""
    if factors is None:
        return product, product.transposed(), None, None
    if product is not PLAIN and not product.frozen:
        raise ValueError(f"{type(product).__name__} does not take a low-rank adapter; merge the adapter first")
    if weight.requires_grad:
        raise ValueError("a weight with a low-rank adapter is frozen; call weight.requires_grad_(False)")
    down, up = as_operand(factors.down), as_operand(factors.up)
    forward = LowRankProduct(down.detach(), up.detach(), product)
    return forward, LowRankProduct(up.detach().t(), down.detach().t(), product.transposed()), down, up


def _alone(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    """Return `x W^T` with gradients, where the layer communicates and adds the bias itself."""
    if not product.frozen:
        return product(x, weight, None)
    # By autograd the dense weight would stay until the backward.
    x, weight, _ = _operands(x, weight, None, product)
    forward, backward = Transport(None, None, product), Transport(None, None, product.transposed())
    return _RowLinear.apply(x, weight, None, None, None, forward, backward)


def _low_rank_term(x: Tensor, factors: Factors, shared: _Shared) -> Tensor:
    """Return `(dropout(x) D^T) U^T`, with gradients by autograd."""
    x = x if factors.dropout is None else factors.dropout(x)
    inner, up, _ = _operands(F.linear(x, factors.down), factors.up, None, PLAIN)
    if shared is None:
        return F.linear(inner, up)
    transport = Transport(None, None, PLAIN)
    return _ColumnLinear.apply(inner, up, None, None, None, transport, transport, shared)


def _transport(
    placement: Placement, execution: Execution, x: Tensor, rows: int, dtype: Any = None, product: Product = PLAIN
) -> Transport:
    """Choose the transport of a forward or a backward over `rows` tokens on each rank."""
    group = placement.sharded
    if group is None:
        return Transport(None, dtype, product)
    name = "tree" if product.in_tree else "serial"
    if placement.sequence_parallel and not execution.product.in_tree and not product.serial:
        name = choose_overlap(execution.overlap, x, rows, group, dtype)
    elif execution.few_tokens and name == "serial":
        name = "few-tokens"
    return (DIVIDED if placement.sequence_parallel else WHOLE)[name](group, dtype, product)


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the operands as torch.autocast does: the backward must find them in one dtype."""
    x, bias = as_operand(x), None if bias is None else as_operand(bias)
    if product.frozen:
        return x, weight, bias
    weight = as_operand(weight)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"x is {x.dtype} and the weight {weight.dtype}; cast one of them, or run the model under torch.autocast"
        )
    return x, weight, bias


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor | None,
        up: Tensor | None,
        forward: Transport,
        backward: Transport,
        shared: Any,
    ) -> Tensor:
        y = forward.gather_product(x, weight, bias)[0]
        inner = forward.product.take_inner() if isinstance(forward.product, LowRankProduct) else None
        ctx.save_for_backward(x if weight.requires_grad or inner is not None else None, weight, inner)
        ctx.transport, ctx.shared, ctx.dtype, ctx.destination = backward, shared, x.dtype, Destination.of(weight)
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.to(ctx.dtype)
        dx = None
        gradients: tuple[Tensor | None, ...] = (None, None, None)

        def of_weights(x: Tensor) -> tuple[Tensor | None, ...]:
            """Return dW, or the gradients of a frozen weight's two factors."""
            if inner is None and ctx.shared is None:
                return _sum_weight_gradient(ctx.destination, x, dy), None, None
            if inner is None:
                return _gradient_of_rows(_weight_gradient(x), dy, ctx.shared), None, None
            d_inner = _inner(ctx.transport.product, dy, made=needs_x)
            d_up = _gradient_of_rows(_weight_gradient(inner), dy, ctx.shared)
            return None, _weight_gradient(x)(d_inner, x.dtype), d_up

        needs_weight = needs_weight or inner is not None
        if needs_x and needs_weight:
            dx, gradients = ctx.transport.product_scatter_beside_gather(dy, weight.t(), x, of_weights)
        elif needs_x:
            dx = ctx.transport.product_scatter(dy, weight.t())
        elif needs_weight:
            gradients = of_weights(ctx.transport.gather(x))
        dw, d_down, d_up = gradients
        db = _gradient_of_rows(_bias_gradient, dy, ctx.shared) if needs_bias else None
        return None if dx is None else dx.to(ctx.dtype), dw, db, d_down, d_up, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor | None,
        up: Tensor | None,
        forward: Transport,
        backward: Transport,
    ) -> Tensor:
        y = async_collectives.cast(forward.product_scatter(x, weight, bias), x.dtype)
        inner = forward.product.take_inner() if isinstance(forward.product, LowRankProduct) else None
        ctx.save_for_backward(x if weight.requires_grad or inner is not None else None, weight, inner)
        ctx.transport, ctx.dtype, ctx.destination = backward, x.dtype, Destination.of(weight)
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.to(ctx.dtype)
        dx = d_down = d_up = None
        if needs_x:
            dx, dy = ctx.transport.gather_product(dy, weight.t(), keep=True)
        else:
            dy = ctx.transport.gather(dy)
        if inner is not None:
            d_down = _weight_gradient(x)(_inner(ctx.transport.product, dy, made=needs_x), dy.dtype)
            d_up = _weight_gradient(inner)(dy, dy.dtype)
        dw = _sum_weight_gradient(ctx.destination, x, dy) if needs_weight else None
        db = _bias_gradient(dy, dy.dtype) if needs_bias else None
        return dx, dw, db, d_down, d_up, None, None


def _inner(transposed: LowRankProduct, dy: Tensor, *, made: bool) -> Tensor:
    """Return `dy U`, the gradient of the low-rank activations, which the GEMM of dx has computed already."""
    return transposed.take_inner() if made else F.linear(dy, transposed.down)


Gradient = Callable[[Tensor, torch.dtype], Tensor]


def _weight_gradient(x: Tensor) -> Gradient:
    """Return the function that makes `dW = dy^T x`, summed over all leading dims, of dy and a dtype."""
    x_columns = x.reshape(-1, x.shape[-1]).t()
    return lambda dy, dtype: PLAIN(dy.reshape(-1, dy.shape[-1]).t(), x_columns, None, dtype)


def _sum_weight_gradient(destination: Destination, x: Tensor, dy: Tensor) -> Tensor | None:
    """Add dW to its sum and return None, or return it."""
    if (total := destination.sum) is None:
        return _weight_gradient(x)(dy, destination.dtype)
    add_product_(total, dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]).t())
    return None


def _bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `db`, the sum of dy over all leading dims, rounded once to `dtype`."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=dtype)


def _gradient_of_rows(gradient: Gradient, dy: Tensor, shared: _Shared) -> Tensor:
    """Return the gradient of a parameter's rows; shared rows are summed over the ranks that share them.

    One all-reduce has a slot for each run of `replicas` consecutive ranks, because there is no group of these ranks
    alone.
    """
    if shared is None:
        return gradient(dy, dy.dtype)
    group, first, stop, replicas = shared
    slot = group.rank() // replicas
    shared_rows_gradient = gradient(dy[..., first:stop], wide(dy.dtype))
    slots = shared_rows_gradient.new_zeros(group.size() // replicas, *shared_rows_gradient.shape)
    slots[slot] = shared_rows_gradient
    slots = async_collectives.start_all_reduce(slots, group, owned=True)
    local_gradient = gradient(dy, dy.dtype)
    local_gradient[first:stop] = async_collectives.wait(slots)[slot]
    return local_gradient
