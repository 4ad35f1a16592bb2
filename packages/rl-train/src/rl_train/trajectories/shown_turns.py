"""`shown_turns`: the responses of a batch as turns with the values of their tokens, for `samples.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rl_models import Batch
from rl_train.data.codec import TextCodec
from rl_train.engines.interface import VERSION
from rl_train.environments.tools import FORMATS, calls_in
from rl_train.trajectories.episodes import episode_ids

# The values of a token in `samples.jsonl`, the field of the batch, and the number of digits after the point.
VALUES = {"log_probs": ("log_probs", 2), "advantages": ("advantages", 3), "versions": (VERSION, 0)}


def shown_turns(batch: Batch, codec: TextCodec) -> Iterator[list[dict[str, Any]]]:
    """Yield the turns of each episode, from the policy's first token on, sample by sample.

    A turn of the policy has "texts", the text of each token (with special tokens; ids without a tokenizer), and lists
    of `VALUES`; a list of equal values is one number, and a value that is not finite is None. Its "calls" are the
    calls of tools in it. A turn of the environment has a "text".
    """
    rows = {name: batch.split(field) for name, (field, _) in VALUES.items() if field in batch.fields}
    sequences = enumerate(zip(episode_ids(batch).tolist(), batch.split(), batch.split("mask"), strict=True))
    for _, samples in groupby(sequences, lambda sequence: sequence[1][0]):
        turns = list[dict[str, Any]]()
        for number, (_, tokens, mask) in samples:
            begin = 0
            for drawn, run in groupby(mask.tolist()):
                end = begin + len(list(run))
                texts = codec.pieces(tokens[begin:end].tolist())
                if drawn:
                    values = {name: _values(split[number][begin:end].tolist(), name) for name, split in rows.items()}
                    calls = _calls("".join(texts))
                    turns.append({"role": "policy", "texts": texts, **values} | ({"calls": calls} if calls else {}))
                elif begin:  # the tokens before are the prompt
                    turns.append({"role": "environment", "text": "".join(texts)})
                begin = end
        yield turns


def _values(values: Sequence[float], name: str) -> list[float | None] | float | None:
    digits = VALUES[name][1]
    numbers = [round(value, digits or None) if math.isfinite(value) else None for value in values]
    return numbers[0] if len({*numbers}) == 1 else numbers


def _calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of tools in a response, in the first format that has one."""
    for name in FORMATS:
        if calls := [call for call in calls_in(text, name) if call.error is None]:
            return [{"name": call.name, "arguments": call.arguments} for call in calls]
    return []
