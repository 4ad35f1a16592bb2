"""How per-token numbers become one: weights that are right over micro-batches and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_models.batch import Batch


def _token_mean(batch: Batch) -> Tensor:
    return batch.mask.double()


def _sequence_mean(batch: Batch) -> Tensor:
    counts = batch.sum_by_sequence(torch.ones(batch.num_tokens, dtype=torch.float64, device=batch.device))
    return batch.mask.double() / counts.clamp(min=1)[batch.sequence_ids]


AGGREGATIONS: dict[str, Callable[[Batch], Tensor]] = {"token-mean": _token_mean, "sequence-mean": _sequence_mean}


def token_weights(batch: Batch, aggregation: str, group: ProcessGroup | None) -> Tensor:
    """The weight of every token in the mean over the whole batch, all data-parallel ranks together.

        token-mean      1 / (all masked tokens): every token counts the same (DAPO, arXiv:2503.14476, section 3.3)
        sequence-mean   1 / (masked tokens of its sequence) / (sequences that have any): every sequence counts the same
                        (GRPO, arXiv:2402.03300, equation 3)

    Args:
        batch: this rank's part.
        aggregation: one of `AGGREGATIONS`.
        group: the data-parallel group; one all-reduce of one number.

    Returns:
        `[T]` fp32, zero outside the mask; its sum over all ranks is 1.

    Raises:
        ValueError: an unknown aggregation, or no token of any rank is in the mask.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
    weights = AGGREGATIONS[aggregation](batch)
    total = weights.sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    if not total > 0:
        raise ValueError("no token of the batch is in its mask, on any rank: there is nothing to learn from")
    return (weights / total).float()
