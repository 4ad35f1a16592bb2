"""Checks of a batch's sampling mask, and its rows for the tokens of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from parallel_layers import PackedSequence
from parallel_layers.head import SamplingMask
from parallel_models import Engine
from rl_models.batch.batch import Batch


def require_sampling_mask(engine: Engine, batch: Batch) -> None:
    """Raise ValueError if the sampling mask of a batch lacks tokens, or the engine cannot use it."""
    mask = batch.sampling_mask
    if mask is None:
        return
    if not engine.takes_sampling_mask:
        raise ValueError("this backend takes no sampling masks; use dataclasses.replace(batch, sampling_mask=None)")
    mask.check(batch.tokens, engine.vocab_size)
    if without := int((batch.mask & (mask.counts == 0)).sum()):
        raise ValueError(
            f"the sampling mask lacks {without} tokens of the batch's mask, whose rows have no ids; give the ids that "
            "each was drawn from"
        )


def masks_of_next_tokens(
    mask: SamplingMask, positions: Sequence[Tensor], packs: Sequence[PackedSequence]
) -> list[SamplingMask]:
    """Return for each token of each micro-batch the row of the token after it, without ids for padding.

    `positions` says where in the batch the tokens of each micro-batch stand.
    """
    return [
        mask[F.pad(indices[1:], (0, packed.num_tokens - len(indices[1:])), value=-1)]
        for indices, packed in zip(positions, packs, strict=True)
    ]
