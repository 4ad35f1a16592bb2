"""Prompts as rows of token ids, checked against a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
