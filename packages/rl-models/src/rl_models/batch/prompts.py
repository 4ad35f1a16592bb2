"""Prompts as rows of token ids, checked against a model, and other prompts in front of the same responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.head import check_token_ids
from rl_models.batch.batch import Batch, token_rows


def prompt_rows(
    prompts: Iterable[Tensor | Sequence[int]] | Batch, vocab_size: int, positions: int | None = None
) -> list[Tensor]:
    """Return prompts as int64 tensors `[L]`, each on its device.

    Raises:
        ValueError: As for `token_rows`; or a prompt is empty, is longer than `positions`, or on the CPU has a token
            outside the vocabulary.
    """
    rows = token_rows(prompts, "prompt")
    if empty := [i for i, row in enumerate(rows) if not len(row)]:
        raise ValueError(
            f"prompts {empty} are empty; give each at least one token, such as the beginning-of-text token"
        )
    for i, row in enumerate(rows):
        if positions is not None and len(row) > positions:
            raise ValueError(
                f"prompt {i} has {len(row)} tokens, more than the model's {positions} positions "
                "(max_position_embeddings in its config.json); shorten the prompt"
            )
        try:
            check_token_ids(row, vocab_size)  # on a GPU a bad id is a device assertion
        except ValueError as mistake:
            raise ValueError(f"prompt {i}: {mistake}") from None
    return rows


class OtherPrompts(NamedTuple):
    """The responses of a batch behind other prompts, such as those of a teacher that knows more.

    `places` `[T]` has the place in `batch` of each of the first batch's tokens; -1 for tokens of its prompts.
    """

    batch: Batch
    places: Tensor

    @classmethod
    def of(cls, batch: Batch, prompts: Sequence[Tensor | Sequence[int]]) -> OtherPrompts:
        """Put a prompt in front of each sequence's tokens from the first of the mask on, in place of those before.

        The result has the mask and the sampling mask of these tokens, and no fields.

        Raises:
            ValueError: A prompt is empty or no row of integers, there is not one for each sequence, or the batch has
                images.
        """
        rows = token_rows(prompts, "prompt")
        if len(rows) != len(batch) or not all(map(len, rows)):
            counts = [len(row) for row in rows]
            raise ValueError(f"got prompts of {counts} tokens for {len(batch)} sequences; give a prompt for each")
        if batch.visual:
            raise ValueError("other prompts are for text alone, and the batch has images; leave the images out")
        tokens, masks, kept, places = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        start = shift = 0
        for row, sequence, mask in zip(rows, batch.split(), batch.split("mask"), strict=True):
            begin, length = int(mask.int().argmax()) if mask.any() else len(mask), len(mask)
            place = torch.arange(start, start + length, device=batch.device)
            tokens += row.to(batch.device), sequence[begin:]
            masks += mask.new_zeros(len(row)), mask[begin:]
            kept += place.new_full((len(row),), -1), place[begin:]
            shift += len(row) - begin
            places.append(torch.where(torch.arange(length, device=batch.device) < begin, -1, place + shift))
            start += length
        lengths = tuple(len(prompt) + len(rest) for prompt, rest in zip(tokens[::2], tokens[1::2], strict=True))
        drawn = None if batch.sampling_mask is None else batch.sampling_mask[torch.cat(kept)]
        other = Batch(torch.cat(tokens), lengths, torch.cat(masks), sampling_mask=drawn)
        return cls(other, torch.cat(places))

    def aligned(self, per_token: Tensor, padding: int = 0) -> Tensor:
        """Return the rows `[T, ...]` of the first batch's tokens, from the rows of `batch`; `padding` for prompts."""
        rows = per_token[self.places.to(per_token.device).clamp(min=0)]
        behind = (self.places >= 0).to(per_token.device)
        return torch.where(behind.view(-1, *[1] * (rows.dim() - 1)), rows, padding)
