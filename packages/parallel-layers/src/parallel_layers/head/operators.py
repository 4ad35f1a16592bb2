"""The custom operator behind the log-probs, and its backward, with shapes and an autograd formula for torch.compile.

The statistics are merged in order of rank, so results are bitwise equal on all ranks. The hidden states' gradient is
summed over the ranks during the GEMM of the weight's last slice. With sequence parallelism the backward gathers the
hidden states again.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel_layers.distributed import async_collectives
from parallel_layers.head import chunked, fused
from parallel_layers.head.chunked import LogitTransform, UpstreamGradients, finish_statistics, merge_statistics
from parallel_layers.head.invariant import invariant_statistics
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.head.vocabulary import (
    IGNORE_INDEX,
    check_rows,
    check_token_ids,
    gather_rows,
    group_of,
    vocab_range,
)
from parallel_layers.module.autocast import wide, without_autocast
from parallel_layers.training.weight_gradients import Destination


@torch.library.custom_op("parallel_layers::log_probs", mutates_args=())
@without_autocast
def log_probs_op(
    hidden_TH: Tensor,
    weight_VH: Tensor | None,
    labels_T: Tensor,
    temperatures_T: Tensor | None,
    mask: list[Tensor],
    numbers: list[float],
    vocab_size: int,
    sequence_parallel: bool,
    group_name: str,
    keep: bool,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return `(log_probs, entropy, logsumexp)`, each `[T]`, and the two tensors of `fused.Kept` (empty: nothing kept).

    `numbers` are the fields of `LogitTransform`; `temperatures_T` replaces its temperature. `mask` are the tensors of
    `SamplingMask`, or nothing. Without a weight
    `hidden_TH` are the logits, which are not transformed. See `linear_log_probs` for the other arguments.
    """
    group = group_of(group_name)
    check_rows(_num_rows(hidden_TH, weight_VH), vocab_size, group, hidden_TH.device)
    check_token_ids(labels_T, vocab_size, ignore_index=IGNORE_INDEX)
    hidden, weight, first_entry = _local(hidden_TH, weight_VH, vocab_size, group_name)
    hidden = gather_rows(hidden, group) if sequence_parallel else hidden
    labels, transform = labels_T.long() - first_entry, _transform(numbers, temperatures_T)
    kept = SamplingMask(*mask).shift(first_entry) if mask else None
    saved = _new_saved(hidden, weight, len(labels_T), keep)
    if weight is None or weight_VH is None:
        statistics = chunked.given_statistics(hidden, labels)
    elif blocks:
        statistics = invariant_statistics(hidden, weight_VH, labels, transform, kept, vocab_size, blocks, group)
    elif fused.supports(hidden, weight):
        statistics = fused.head_statistics(
            hidden, weight, labels, transform, kept, saved if saved.tiles.numel() else None
        )
    else:
        statistics = chunked.head_statistics(hidden, weight, labels, transform, kept)
    if not blocks and async_collectives.is_sharded(group):
        statistics = merge_statistics(gather_rows(statistics[None], group))
    log_probs, entropy, logsumexp = (x.to(wide(hidden.dtype)) for x in finish_statistics(statistics))
    if kept is not None:
        is_empty = kept.counts == 0
        log_probs, entropy, logsumexp = (x.masked_fill(is_empty, 0.0) for x in (log_probs, entropy, logsumexp))
    return log_probs.masked_fill(labels_T == IGNORE_INDEX, 0.0), entropy, logsumexp, *saved


def _num_rows(hidden_TH: Tensor, weight_VH: Tensor | None) -> int:
    return hidden_TH.shape[1] if weight_VH is None else len(weight_VH)


def _local(
    hidden_TH: Tensor, weight_VH: Tensor | None, vocab_size: int, group_name: str
) -> tuple[Tensor, Tensor | None, int]:
    """Return the operands without the vocabulary's padding, and this rank's first entry."""
    first_entry, last_entry = vocab_range(vocab_size, group_of(group_name), _num_rows(hidden_TH, weight_VH))
    if weight_VH is None:
        return hidden_TH[:, : last_entry - first_entry], None, first_entry
    return hidden_TH, weight_VH[: last_entry - first_entry], first_entry


def _transform(numbers: list[float], temperatures_T: Tensor | None) -> LogitTransform:
    transform = LogitTransform(*numbers)
    return transform if temperatures_T is None else transform._replace(temperature=temperatures_T)


def _new_saved(hidden_TH: Tensor, weight_VH: Tensor | None, num_tokens: int, keep: bool) -> fused.SavedTiles:
    """Allocate the tensors for the backward; empty if nothing is kept or the kernels do not run."""
    if keep and weight_VH is not None and fused.supports(hidden_TH, weight_VH):
        return fused.new_kept(hidden_TH, num_tokens, len(weight_VH))
    return fused.SavedTiles(hidden_TH.new_empty(0), hidden_TH.new_empty(0, dtype=torch.float32))


@log_probs_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden_TH, weight_VH, labels_T, *_, vocab_size, _, group_name, keep, _ = arguments
    log_probs = hidden_TH.new_empty(labels_T.shape, dtype=wide(hidden_TH.dtype))
    hidden, weight, _ = _local(hidden_TH, weight_VH, vocab_size, group_name)
    saved = _new_saved(hidden, weight, len(labels_T), keep)
    return log_probs, torch.empty_like(log_probs), torch.empty_like(log_probs), *saved


@torch.library.custom_op("parallel_layers::log_probs_backward", mutates_args={"overwritten_TV", "weight_sum_VH"})
@without_autocast
def log_probs_backward_op(
    grad_log_probs_T: Tensor,
    grad_entropy_T: Tensor | None,
    hidden_TH: Tensor,
    weight_VH: Tensor | None,
    saved: list[Tensor],
    temperatures_T: Tensor | None,
    overwritten_TV: Tensor | None,
    weight_sum_VH: Tensor | None,
    weight_grad_dtype: torch.dtype | None,
    mask: list[Tensor],
    numbers: list[float],
    vocab_size: int,
    sequence_parallel: bool,
    group_name: str,
    hidden_needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients `(hidden, weight)`; empty if not needed.

    `saved` are the labels and the forward's results except the log-probs. `overwritten_TV` is the kept exponentials
    themselves if the operator may overwrite them, else None. The weight's gradient is added to `weight_sum_VH`, or
    else returned in its dtype; None: it is not needed.
    """
    labels_T, entropy_T, logsumexp_T, *exponentials = saved
    group, dtype = group_of(group_name), wide(hidden_TH.dtype)
    hidden, weight, first_entry = _local(hidden_TH, weight_VH, vocab_size, group_name)
    labels, nothing = labels_T.long() - first_entry, hidden_TH.new_empty(0)
    upstream = UpstreamGradients(
        grad_log_probs_T.to(dtype).masked_fill(labels_T == IGNORE_INDEX, 0.0),
        None if grad_entropy_T is None else grad_entropy_T.to(dtype),
        logsumexp_T,
        entropy_T,
    )
    if weight_VH is None or weight is None:
        gradient_TV = torch.zeros_like(hidden_TH, memory_format=torch.contiguous_format)
        chunked.given_gradients(hidden, labels, upstream, gradient_TV[:, : hidden.shape[1]])
        return gradient_TV, nothing
    hidden = gather_rows(hidden, group) if sequence_parallel else hidden
    grad_hidden: Tensor | None = None
    if hidden_needs_grad:
        grad_hidden = torch.zeros_like(hidden, dtype=dtype, memory_format=torch.contiguous_format)
    grad_weight = weight_sum_VH
    if weight_grad_dtype is not None and weight_sum_VH is None:
        grad_weight = hidden.new_empty(weight_VH.shape, dtype=weight_grad_dtype)
        grad_weight[len(weight) :].zero_()
    summed: Tensor | None = None

    def start_sum() -> None:
        """Start the all-reduce of the ranks' gradients; sequence parallel: the reduce-scatter."""
        nonlocal summed
        if grad_hidden is None or group is None or group.size() == 1:
            return
        if sequence_parallel:
            summed = async_collectives.start_reduce_scatter(grad_hidden, group)
        else:
            summed = async_collectives.start_all_reduce(grad_hidden, group, owned=True)
        async_collectives.head_start(summed)

    gradients: Callable[..., None] = chunked.head_gradients
    if fused.supports(hidden, weight):
        saved_exponentials = fused.SavedTiles(*exponentials) if exponentials[1].numel() else None
        gradients = partial(fused.head_gradients, saved=saved_exponentials, overwrite=overwritten_TV is not None)
    gradients(
        hidden,
        weight,
        labels,
        _transform(numbers, temperatures_T),
        upstream,
        SamplingMask(*mask).shift(first_entry) if mask else None,
        grad_hidden_TH=grad_hidden,
        grad_weight_VH=None if grad_weight is None else grad_weight[: len(weight)],
        add_to_weight=weight_sum_VH is not None,
        hidden_done=start_sum,
    )
    if summed is not None:
        grad_hidden = async_collectives.wait(summed)
    return (
        nothing if grad_hidden is None else grad_hidden.to(hidden_TH.dtype),
        # Results of an operator may not share memory.
        hidden.new_empty(0) if grad_weight is None or grad_weight is weight_sum_VH else grad_weight,
    )


@log_probs_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    hidden_TH, weight_VH = arguments[2:4]
    weight_sum_VH, dtype = arguments[7:9]
    has_gradient = dtype is not None and weight_sum_VH is None
    return (
        hidden_TH.new_empty(hidden_TH.shape if arguments[-1] else 0),
        hidden_TH.new_empty(weight_VH.shape if has_gradient else 0, dtype=dtype if has_gradient else hidden_TH.dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden_TH, weight_VH, labels_T, temperatures_T, mask, *ctx.options, _, _ = inputs
    _, entropy_T, *saved = output
    ctx.save_for_backward(hidden_TH, weight_VH, temperatures_T, labels_T, entropy_T, *saved, *mask)
    ctx.mark_non_differentiable(*saved)
    ctx.destination = None if weight_VH is None else Destination.of(weight_VH)
    ctx.set_materialize_grads(False)


def _is_last_backward(saved: Tensor) -> bool:
    """Return whether the running backward may overwrite what it saved; False if torch does not tell."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    # A compiled graph may not write to tensors that another graph has saved; it would copy them. While torch 2.11
    # traces a backward, only the class of its tensors says so.
    return type(saved) is Tensor and not torch.compiler.is_compiling() and not keeps_graph()


def _backward(
    ctx: Any, grad_log_probs_T: Tensor | None, grad_entropy_T: Tensor | None, *_unused: None
) -> tuple[Any, ...]:
    hidden_TH, weight_VH, temperatures_T, *saved = ctx.saved_tensors
    saved, mask = saved[:5], saved[5:]
    logsumexp_T, exponentials_TV = saved[2:4]
    hidden_needs_grad, weight_needs_grad, *_ = ctx.needs_input_grad
    weight_sum = ctx.destination.sum if weight_needs_grad else None
    grad_hidden, grad_weight = log_probs_backward_op(
        torch.zeros_like(logsumexp_T) if grad_log_probs_T is None else grad_log_probs_T,
        grad_entropy_T,
        hidden_TH,
        weight_VH,
        saved,
        temperatures_T,
        exponentials_TV if _is_last_backward(logsumexp_T) else None,
        weight_sum,
        ctx.destination.dtype if weight_needs_grad else None,
        mask,
        *ctx.options,
        hidden_needs_grad,
    )
    return (
        grad_hidden if hidden_needs_grad else None,
        grad_weight if weight_needs_grad and weight_sum is None else None,
        None,
        None,
        [None for _ in mask],
        *(None for _ in (*ctx.options, "keep", "blocks")),
    )


log_probs_op.register_autograd(_backward, setup_context=_setup_context)
