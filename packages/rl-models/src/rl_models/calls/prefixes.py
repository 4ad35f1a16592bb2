"""Prefix sharing: find the sequences of a batch that begin with the same prompt, which is then computed once.

The prompt of a sequence is the tokens before the first token of its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel_models import Engine
from parallel_models.engine import SharedPrompt
from rl_models.batch.batch import Batch
from rl_models.calls.routing import ROUTING


class Prompts(NamedTuple):
    """The prompts of a batch's N sequences.

    Attributes:
        units: Sequences with equal numbers stay in one micro-batch.
        numbers: Sequences of one unit with equal numbers share their prompt.
        lengths: The lengths of the prompts.
        computed: The tokens that each sequence adds to a micro-batch.
    """

    units: list[int]
    numbers: list[int]
    lengths: list[int]
    computed: list[int]

    @classmethod
    def of(cls, batch: Batch, max_tokens: int) -> Prompts:
        """Find the prompts; a unit has at most `max_tokens` tokens, or is a pair of the batch."""
        pairs, prompts = batch.units("pair"), cls([], [], [], [])
        # (pair, prompt) -> its number, the unit that is being filled, and the tokens of the unit.
        open_units: dict[tuple[int | None, bytes], tuple[int, int, int]] = {}
        rows = zip(batch.tokens.cpu().split(batch.lengths), batch.mask.cpu().split(batch.lengths), strict=True)
        for n, (row, mask) in enumerate(rows):
            length = int(mask.int().argmax()) if bool(mask.any()) else len(row)
            pair = None if pairs is None else pairs[n]
            key = pair, row[:length].numpy().tobytes()
            number, unit, tokens = open_units.get(key, (n, n if pair is None else pair, 0))
            added = len(row) - length if tokens else len(row)
            if pair is None and tokens and tokens + added > max_tokens:
                number, unit, tokens, added = n, n, 0, len(row)
            open_units[key] = number, unit, tokens + added
            for column, value in zip(prompts, (unit, number, length, added), strict=True):
                column.append(value)
        return prompts

    def of_micro_batch(self, numbers: Sequence[int]) -> tuple[SharedPrompt, ...]:
        """Return the prompts of these sequences, and the sequences by their places among them."""
        groups: dict[int, list[int]] = {}
        for index, n in enumerate(numbers):
            groups.setdefault(self.numbers[n], []).append(index)
        return tuple(SharedPrompt(self.lengths[numbers[indices[0]]], tuple(indices)) for indices in groups.values())


def require_shareable(engine: Engine, batch: Batch, *, record_routing: bool) -> None:
    """Raise ValueError if a batch does not go with an engine that shares prefixes."""
    for present, name in (
        (record_routing, "record_routing=True"),
        (ROUTING in batch.fields, f"the field {ROUTING!r}"),
        (bool(batch.visual), "images"),
    ):
        if engine.shares_prefixes and present:
            raise ValueError(
                f"share_prefixes=True does not go with {name}: a shared prompt is computed once; load the model with "
                "share_prefixes=False"
            )
