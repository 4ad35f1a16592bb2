"""Log-probabilities and entropies from logits whose vocabulary is sharded over a tensor-parallel group.

Shape suffixes: T tokens, V this rank's entries of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.autocast import wide
from parallel_layers.distributed import async_collectives
from parallel_layers.head.chunked import TILE_ELEMENTS, runs
from parallel_layers.head.embedding import check_token_ids, vocab_range
from parallel_layers.head.linear_log_probs import LogProbs
from parallel_layers.head.softmax_statistics import (
    UpstreamGradients,
    finish_statistics,
    logit_gradient,
    merge_statistics,
    tile_statistics,
)
from parallel_layers.head.vocabulary import (
    IGNORE_INDEX,
    check_rows,
    gather_rows,
    group_name,
    group_of,
    true_vocab_size,
)


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    entropy: bool = True,
) -> LogProbs:
    """Return the log-probability of each label, `z_label - logsumexp(z)`, and the entropy, `-sum_j p_j log p_j`.

    Rank r holds the columns of the entries `r * V ... (r + 1) * V - 1` of the (padded) vocabulary, and all labels. If
    the logits come from a GEMM, `linear_log_probs` gives the same results without holding them.

    Forward: one all-gather of four statistics a token (`head.softmax_statistics`). Backward, without communication:
    `dz_j = g_log_prob (1[j = label] - p_j) - g_entropy p_j (log p_j + entropy)`; upstream gradients must be the same on
    all ranks. Both work in tiles and make no temporary of the logits' size.

    Args:
        logits: `[..., V]`, this rank's columns. Results are finite for any finite logits; logits of -inf are entries of
            probability zero.
        labels: `[...]` integers of the whole vocabulary, the same on all ranks. -100 is the label of tokens without a
            label; their log-prob is 0.
        group: The tensor-parallel group; None for unsharded logits.
        vocab_size: The size of the vocabulary without padding; columns beyond it have no effect. Default: all columns;
            required with several ranks.
        entropy: Return the entropy.

    Returns:
        `LogProbs(log_probs, entropy)`, `[...]` fp32 (fp64 for fp64 logits), bitwise equal on all ranks.

    Raises:
        ValueError: Shapes do not fit; the columns cannot hold the vocabulary; ranks have different columns or
            vocabularies (compared once for each group and size); or a label is outside the vocabulary. The last two are
            raised on every rank.
    """
    if logits.ndim < 1 or labels.shape != logits.shape[:-1] or not logits.is_floating_point():
        raise ValueError(
            f"logits {logits.dtype} {list(logits.shape)} must be floating [..., V], labels {list(labels.shape)} [...]"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    log_probs, entropies, _ = logit_log_probs_op(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        true_vocab_size(logits.shape[-1], vocab_size, group),
        group_name(group),
    )
    return LogProbs(log_probs.view(labels.shape), entropies.view(labels.shape) if entropy else None)


@torch.library.custom_op("parallel_layers::logit_log_probs", mutates_args=())
def logit_log_probs_op(
    logits_TV: Tensor, labels_T: Tensor, vocab_size: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(log_probs, entropy, logsumexp)`, each `[T]`, over the whole vocabulary."""
    group = group_of(group_name)
    check_rows(logits_TV.shape[1], vocab_size, group, logits_TV.device)
    check_token_ids(labels_T, vocab_size, ignore_index=IGNORE_INDEX)
    first, last = vocab_range(vocab_size, group, logits_TV.shape[1])
    labels, dtype = labels_T.long() - first, wide(logits_TV.dtype)
    statistics = logits_TV.new_empty(4, len(logits_TV), dtype=dtype)
    for tokens in _tiles(logits_TV):
        statistics[:, tokens] = tile_statistics(logits_TV[tokens, : last - first].to(dtype), labels[tokens])
    if async_collectives.is_sharded(group):
        statistics = merge_statistics(gather_rows(statistics[None], group))
    log_probs, entropy, logsumexp = finish_statistics(statistics)
    return log_probs.masked_fill(labels_T == IGNORE_INDEX, 0.0), entropy, logsumexp


@logit_log_probs_op.register_fake
def _(logits_TV: Tensor, labels_T: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    log_probs = logits_TV.new_empty(labels_T.shape, dtype=wide(logits_TV.dtype))
    return log_probs, torch.empty_like(log_probs), torch.empty_like(log_probs)


@torch.library.custom_op("parallel_layers::logit_gradient", mutates_args=())
def logit_gradient_op(
    grad_log_probs_T: Tensor,
    grad_entropy_T: Tensor | None,
    logits_TV: Tensor,
    labels_T: Tensor,
    entropy_T: Tensor,
    logsumexp_T: Tensor,
    vocab_size: int,
    group_name: str,
) -> Tensor:
    """Return the gradient of the logits in their dtype."""
    first, last = vocab_range(vocab_size, group_of(group_name), logits_TV.shape[1])
    labels = labels_T.long() - first
    grad_log_probs_T = grad_log_probs_T.masked_fill(labels_T == IGNORE_INDEX, 0.0)
    upstream = UpstreamGradients(grad_log_probs_T, grad_entropy_T, logsumexp_T, entropy_T)
    gradient_TV = torch.zeros_like(logits_TV, memory_format=torch.contiguous_format)
    for tokens in _tiles(logits_TV):
        # Copy also if the dtype is the same, because the tile is overwritten.
        tile = logits_TV[tokens, : last - first].to(logsumexp_T.dtype, copy=True)
        gradient_TV[tokens, : last - first] = logit_gradient(tile, labels[tokens], upstream, tokens)
    return gradient_TV


@logit_gradient_op.register_fake
def _(grad_log_probs_T: Tensor, grad_entropy_T: Tensor | None, logits_TV: Tensor, *_: Any) -> Tensor:
    return logits_TV.new_empty(logits_TV.shape)


def _tiles(logits_TV: Tensor) -> Iterator[slice]:
    """Cut the tokens into runs whose logits fit a temporary tile."""
    limit = TILE_ELEMENTS.get(logits_TV.device.type, TILE_ELEMENTS["cuda"])
    return runs(len(logits_TV), max(1, limit // max(logits_TV.shape[1], 1)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TV, labels_T, ctx.vocab_size, ctx.group_name = inputs
    _, entropy_T, logsumexp_T = output
    ctx.save_for_backward(logits_TV, labels_T, entropy_T, logsumexp_T)
    ctx.mark_non_differentiable(logsumexp_T)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_log_probs_T: Tensor | None, grad_entropy_T: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    logits_TV, labels_T, entropy_T, logsumexp_T = ctx.saved_tensors
    gradient_TV = logit_gradient_op(
        torch.zeros_like(logsumexp_T) if grad_log_probs_T is None else grad_log_probs_T,
        grad_entropy_T,
        logits_TV,
        labels_T,
        entropy_T,
        logsumexp_T,
        ctx.vocab_size,
        ctx.group_name,
    )
    return gradient_TV, None, None, None


logit_log_probs_op.register_autograd(_backward, setup_context=_setup_context)
