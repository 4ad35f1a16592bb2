"""The custom operators of the losses on vocabulary-parallel logits, with shapes and autograd formulas.

The forward all-gathers every rank's statistics; the backward sends nothing. Second derivatives run as differentiable
torch code with its own reductions.

Shape suffixes: T tokens, V this rank's entries of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.head.chunked import TILE_ELEMENTS, accumulation_dtype
from parallel_layers.head.softmax_statistics import (
    NEGLIGIBLE,
    UpstreamGradients,
    finish_statistics,
    logit_gradient,
    merge_statistics,
    tile_statistics,
)
from parallel_layers.head.vocabulary import (
    LocalLabels,
    LocalVocabulary,
    check_labels,
    check_rows,
    gather_rows,
    group_of,
)


def _tiles(logits_TV: Tensor) -> list[slice]:
    """Cut the tokens into runs whose logits fit a temporary tile."""
    limit = TILE_ELEMENTS.get(logits_TV.device.type, TILE_ELEMENTS["cuda"])
    step = max(1, limit // max(logits_TV.shape[1], 1))
    return [slice(start, start + step) for start in range(0, len(logits_TV), step)]


@torch.library.custom_op("parallel_layers::logit_statistics", mutates_args=())
def logit_statistics_op(
    logits_TV: Tensor, labels_T: Tensor, vocab_size: int, ignore_index: int, check: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `(log_probs, entropy, logsumexp, mean_logit)`, each `[T]`, over the whole vocabulary."""
    group = group_of(group_name)
    check_rows(logits_TV.shape[1], vocab_size, group, logits_TV.device)
    if check:
        check_labels(labels_T, vocab_size, ignore_index)
    vocabulary = LocalVocabulary.of(logits_TV.shape[1], vocab_size, group)
    labels = LocalLabels.of(labels_T, vocabulary, vocab_size, ignore_index)
    dtype = accumulation_dtype(logits_TV.dtype)
    statistics = logits_TV.new_empty(5, len(logits_TV), dtype=dtype)
    for tokens in _tiles(logits_TV):
        tile = logits_TV[tokens, : vocabulary.size].to(dtype)
        statistics[:4, tokens] = tile_statistics(tile, labels.local[tokens])
        statistics[4, tokens] = tile.sum(dim=-1)
    parts = gather_rows(statistics[None], group)
    total, sums = merge_statistics(parts[:, :4]), parts[:, 4].sum(dim=0)
    log_probs, logsumexp, entropy = finish_statistics(total)
    return labels.mask(log_probs), entropy, logsumexp, sums / vocab_size


@logit_statistics_op.register_fake
def _(logits_TV: Tensor, labels_T: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_probs = logits_TV.new_empty(labels_T.shape, dtype=accumulation_dtype(logits_TV.dtype))
    return log_probs, torch.empty_like(log_probs), torch.empty_like(log_probs), torch.empty_like(log_probs)


@torch.library.custom_op("parallel_layers::logit_gradient", mutates_args=())
def logit_gradient_op(
    grad_log_probs_T: Tensor,
    grad_entropy_T: Tensor | None,
    grad_logsumexp_T: Tensor | None,
    grad_mean_logit_T: Tensor | None,
    logits_TV: Tensor,
    labels_T: Tensor,
    entropy_T: Tensor,
    logsumexp_T: Tensor,
    vocab_size: int,
    ignore_index: int,
    group_name: str,
) -> Tensor:
    """Return the gradient of the logits in their dtype, tile by tile."""
    vocabulary = LocalVocabulary.of(logits_TV.shape[1], vocab_size, group_of(group_name))
    labels = LocalLabels.of(labels_T, vocabulary, vocab_size, ignore_index)
    grad_log_probs_T = labels.mask(grad_log_probs_T)
    upstream = UpstreamGradients(
        label=grad_log_probs_T,
        probability=grad_log_probs_T if grad_logsumexp_T is None else grad_log_probs_T - grad_logsumexp_T,
        entropy=grad_entropy_T,
        logsumexps=logsumexp_T,
        entropies=entropy_T,
    )
    gradient_TV = torch.zeros_like(logits_TV, memory_format=torch.contiguous_format)
    for tokens in _tiles(logits_TV):
        # Copy also if the dtype is the same, because the tile is overwritten.
        tile = logits_TV[tokens, : vocabulary.size].to(logsumexp_T.dtype, copy=True)
        tile = logit_gradient(tile, labels.local[tokens], upstream, tokens)
        if grad_mean_logit_T is not None:
            tile.add_(grad_mean_logit_T[tokens, None], alpha=1.0 / vocab_size)
        gradient_TV[tokens, : vocabulary.size] = tile
    return gradient_TV


@logit_gradient_op.register_fake
def _(*arguments: Any) -> Tensor:
    logits_TV: Tensor = arguments[4]
    return logits_TV.new_empty(logits_TV.shape)


def _differentiable_gradient(
    grad_log_probs_T: Tensor,
    grad_entropy_T: Tensor | None,
    grad_logsumexp_T: Tensor | None,
    grad_mean_logit_T: Tensor | None,
    logits_TV: Tensor,
    labels_T: Tensor,
    entropy_T: Tensor,
    logsumexp_T: Tensor,
    vocab_size: int,
    ignore_index: int,
    group_name: str,
) -> Tensor:
    """Compute `logit_gradient_op` as torch code that autograd can differentiate.

    Every rank uses the replicated `[T]` tensors for its own entries, so `copy_to_tensor_parallel` sums their gradients
    over the ranks.
    """
    group = group_of(group_name)
    vocabulary = LocalVocabulary.of(logits_TV.shape[1], vocab_size, group)
    labels = LocalLabels.of(labels_T, vocabulary, vocab_size, ignore_index)
    valid_TV = logits_TV[:, : vocabulary.size].to(logsumexp_T.dtype)
    grad_label = copy_to_tensor_parallel(labels.mask(grad_log_probs_T), group)
    log_probs_TV = valid_TV - copy_to_tensor_parallel(logsumexp_T, group)[:, None]
    factor_TV = -grad_label[:, None]
    if grad_logsumexp_T is not None:
        factor_TV = factor_TV + copy_to_tensor_parallel(grad_logsumexp_T, group)[:, None]
    if grad_entropy_T is not None:
        shifted_TV = log_probs_TV.clamp(min=NEGLIGIBLE) + copy_to_tensor_parallel(entropy_T, group)[:, None]
        factor_TV = factor_TV - copy_to_tensor_parallel(grad_entropy_T, group)[:, None] * shifted_TV
    entries = torch.arange(vocabulary.size, device=labels_T.device)
    at_label_TV = labels.local[:, None] == entries
    gradient_TV = log_probs_TV.exp() * factor_TV + torch.where(at_label_TV, grad_label[:, None], 0.0)
    if grad_mean_logit_T is not None:
        gradient_TV = gradient_TV + copy_to_tensor_parallel(grad_mean_logit_T, group)[:, None] / vocab_size
    padding = logits_TV.shape[1] - vocabulary.size
    return torch.nn.functional.pad(gradient_TV, (0, padding)).to(logits_TV.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TV, labels_T, ctx.vocab_size, ctx.ignore_index, _check, ctx.group_name = inputs
    _, entropy_T, logsumexp_T, _ = output
    ctx.save_for_backward(logits_TV, labels_T, entropy_T, logsumexp_T)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,
    grad_log_probs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    grad_logsumexp_T: Tensor | None,
    grad_mean_logit_T: Tensor | None,
) -> tuple[Tensor | None, ...]:
    logits_TV, labels_T, entropy_T, logsumexp_T = ctx.saved_tensors
    gradient = _differentiable_gradient if torch.is_grad_enabled() else logit_gradient_op
    grad_logits = gradient(
        torch.zeros_like(logsumexp_T) if grad_log_probs_T is None else grad_log_probs_T,
        grad_entropy_T,
        grad_logsumexp_T,
        grad_mean_logit_T,
        logits_TV,
        labels_T,
        entropy_T,
        logsumexp_T,
        ctx.vocab_size,
        ctx.ignore_index,
        ctx.group_name,
    )
    return grad_logits, None, None, None, None, None


logit_statistics_op.register_autograd(_backward, setup_context=_setup_context)
