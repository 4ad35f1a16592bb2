"""Prefix sharing between micro-batches of whole sequences and packs that have each prompt once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.data import SharedPrefixes, share_prefixes
from parallel_models.engine.engine import MicroBatch, Outputs, SharedPrompt


def shared_pack(packed: PackedSequence, prompts: Sequence[SharedPrompt]) -> SharedPrefixes:
    """Return the sequences of a pack with each of `prompts` once, without padding; all tokens are scored."""
    rows = packed.split(packed.input_ids)
    return share_prefixes(
        [rows[prompt.sequences[0]][: prompt.length] for prompt in prompts],
        [[rows[n][prompt.length :] for n in prompt.sequences] for prompt in prompts],
        score_prompts=True,
    )


def shared_mask(micro_batch: MicroBatch) -> Tensor | None:
    """Return the rows of `next_mask` that belong to the scored tokens of the shared pack, `[R, K]`."""
    packed, mask = micro_batch.packed, micro_batch.next_mask
    if mask is None:
        return None
    masks, parts = packed.split(mask), []
    for length, sequences in micro_batch.prompts:
        before = length - 1
        parts += [masks[sequences[0]][:before], *(masks[n][before:-1] for n in sequences)]
    return torch.cat(parts)


def whole_outputs(shared: SharedPrefixes, outputs: Outputs, prompts: Sequence[SharedPrompt]) -> Outputs:
    """Return the outputs after each token of each sequence, from the outputs of the scored tokens, `[R]` or longer.

    The outputs after the last token of a sequence are 0.
    """
    return tuple(_whole(shared, scores, prompts) for scores in outputs)


def _whole(shared: SharedPrefixes, scores: Tensor, prompts: Sequence[SharedPrompt]) -> Tensor:
    pieces, end = iter(shared.split(scores[: len(shared.rows)])), scores.new_zeros(1)
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for prompt in prompts:
        of_prompt = next(pieces)
        parts |= {n: (of_prompt, next(pieces), end) for n in prompt.sequences}
    return torch.cat([part for _, of_sequence in sorted(parts.items()) for part in of_sequence])
