"""Prefix sharing between micro-batches of whole sequences and packs that have each prompt once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.data import SharedPrefixes, share_prefixes
from parallel_layers.head import SamplingMask
from parallel_models.engine.engine import MicroBatch, Outputs, SharedPrompt


def shared_pack(packed: PackedSequence, prompts: Sequence[SharedPrompt]) -> SharedPrefixes:
    """Return the sequences of a pack with each of `prompts` once, without padding; all tokens are scored."""
    rows = packed.split(packed.input_ids)
    return share_prefixes(
        [rows[prompt.sequences[0]][: prompt.length] for prompt in prompts],
        [[rows[n][prompt.length :] for n in prompt.sequences] for prompt in prompts],
        score_prompts=True,
    )


def shared_mask(micro_batch: MicroBatch) -> SamplingMask | None:
    """Return the rows of the sampling mask that belong to the R scored tokens of the shared pack."""
    packed, mask = micro_batch.packed, micro_batch.sampling_mask
    if mask is None:
        return None
    numbers, rows = packed.split(torch.arange(len(mask))), []
    for length, sequences in micro_batch.prompts:
        prompt_rows = length - 1
        rows += [numbers[sequences[0]][:prompt_rows], *(numbers[n][prompt_rows:-1] for n in sequences)]
    return mask[torch.cat(rows)]


def whole_outputs(shared: SharedPrefixes, outputs: Outputs, prompts: Sequence[SharedPrompt]) -> Outputs:
    """Return the outputs after each token of each sequence, from the outputs of the scored tokens, `[R]` or longer.

    The outputs after the last token of a sequence are 0.
    """
    return tuple(_of_sequences(shared, scores, prompts) for scores in outputs)


def _of_sequences(shared: SharedPrefixes, scores: Tensor, prompts: Sequence[SharedPrompt]) -> Tensor:
    pieces, end = iter(shared.split(scores[: len(shared.rows)])), scores.new_zeros(1, *scores.shape[1:])
    scores_of: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for prompt in prompts:
        prompt_scores = next(pieces)
        scores_of |= {n: (prompt_scores, next(pieces), end) for n in prompt.sequences}
    return torch.cat([scores for n in sorted(scores_of) for scores in scores_of[n]])
