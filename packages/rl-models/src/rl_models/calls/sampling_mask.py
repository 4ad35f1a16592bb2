"""Sampling masks: the tokens that top-k and top-p kept when a response was drawn, and log-probs over them alone.

A truncated draw is of another distribution than the model's. Learning from it needs both probabilities of the ratio
p_train / p_rollout over the same tokens (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). A batch carries the tokens in
the field `sampling_mask` `[T, K]` int32: for each token of a response the ids that it was drawn from, then -1. K is
`top_k`, so the field takes 4 `top_k` bytes a token. Log-probs and entropies of a batch with this field describe the
distribution over the mask; they are 0 for tokens without a mask.

Shape legend: T tokens, K most tokens of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from parallel_layers import PackedSequence
from parallel_models import Engine
from rl_models.batch.batch import Batch

# The field of a batch.
SAMPLING_MASK = "sampling_mask"


def require_sampling_mask(engine: Engine, batch: Batch) -> None:
    """Raise ValueError if the sampling mask of a batch is malformed, or the engine cannot use it."""
    if SAMPLING_MASK not in batch.fields:
        return
    mask_TK = batch[SAMPLING_MASK]
    if mask_TK.dim() != 2 or mask_TK.is_floating_point():
        raise ValueError(f"{SAMPLING_MASK} must be [T, K] integers, got {list(mask_TK.shape)} {mask_TK.dtype}")
    if not engine.takes_next_mask:
        raise ValueError(f"{SAMPLING_MASK} does not go with tp_invariant=True; leave one of them out")
    lacking = batch.mask & ~(mask_TK == batch.tokens[:, None]).any(dim=1)
    outside = (mask_TK < -1) | (mask_TK >= engine.vocab_size)
    if bool(lacking.any() | outside.any()):
        raise ValueError(
            f"{SAMPLING_MASK} lacks {int(lacking.sum())} tokens of the batch's mask, and has {int(outside.sum())} ids "
            f"outside -1..{engine.vocab_size - 1}; each token must be one of those that it was drawn from"
        )


def masks_of_next_tokens(batch: Batch, positions: Sequence[Tensor], packs: Sequence[PackedSequence]) -> list[Tensor]:
    """Return for each token of each micro-batch the mask of the token after it, -1 for padding.

    `positions` says where in the batch the tokens of each micro-batch stand.
    """
    masks = []
    for indices, packed in zip(positions, packs, strict=True):
        next_TK = batch[SAMPLING_MASK][indices][1:]
        masks.append(F.pad(next_TK, (0, 0, 0, packed.num_tokens - len(next_TK)), value=-1))
    return masks
