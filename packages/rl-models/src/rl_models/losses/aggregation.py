"""Weights that average per-token numbers over micro-batches and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rl_models.batch.batch import Batch

AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-sum")


def total_weight(counts: Sequence[int], aggregation: str) -> int:
    """Count the masked tokens of a batch, or its sequences with masked tokens, for `token_weights`.

    `counts` are the masked tokens of each sequence.

    Raises:
        ValueError: The aggregation is unknown.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
    return sum(counts) if aggregation == "token-mean" else sum(count > 0 for count in counts)


def token_weights(batch: Batch, aggregation: str, total: int) -> Tensor:
    """Return the weight of every token in the mean over the whole batch, all data-parallel ranks together.

        token-mean      1 / (all masked tokens): all tokens weigh the same (DAPO, arXiv:2503.14476, section 3.3)
        sequence-mean   1 / (masked tokens of its sequence) / (sequences that have any): all sequences weigh the same
                        (GRPO, arXiv:2402.03300, equation 3)
        sequence-sum    1 / (sequences that have any): the mean over sequences of sums over tokens (Dr. GRPO,
                        arXiv:2503.20783); multiply the loss by 1 / (longest response) to keep its size

    `total` is the sum of `total_weight` over all data-parallel ranks. The result is `[T]` fp32, zero outside the mask;
    its sum over all ranks is 1, and for sequence-sum the mean number of masked tokens.

    Raises:
        ValueError: No token of any rank is in the mask.
    """
    if total < 1:
        raise ValueError("no token of the batch is in its mask, on any rank; put at least one token into the mask")
    weights = batch.mask.double()
    if aggregation == "sequence-mean":
        weights = weights / batch.masked_counts.clamp(min=1)[batch.sequence_ids]
    return (weights / total).float()
