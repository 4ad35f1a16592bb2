"""`Sample`: a sequence whose tokens an engine draws in several calls, part by part; and the batch of samples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.head import SamplingMask
from parallel_models import SamplingOptions
from rl_models import Batch, VisualInputs
from rl_models.batch import Visual
from rl_models.calls import ROUTING
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION, Response

PerToken = Tensor | SamplingMask
# The name of the sampling mask among the fields of a part.
SAMPLING_MASK = "sampling_mask"
# A field of the batch, `[T, 5]`: the numbers `COLUMNS` of each turn at its last token, 0 elsewhere.
TURNS = "turns"
COLUMNS = ("turns", "environment_reward", "tool_errors", "truncated", "failed")
# The value of a field at tokens that no call has drawn.
_FILLERS = {VERSION: -1, ROUTING: -1}


class Part(NamedTuple):
    """The tokens that one call of an engine drew, and their fields `[L, ...]`.

    `routing` `[R, M, k]` are the experts of the first R tokens of the sequence; None where no engine reports them.
    """

    tokens: list[int]
    fields: dict[str, PerToken]
    routing: Tensor | None = None


@dataclass
class Sample:
    """A prompt and what follows it, at most `limit` tokens with the prompt.

    Attributes:
        prompt: The row that the sample answers.
        visual: The images of the prompt.
        limit: The largest number of tokens.
        tokens: All token ids: of the prompt, of the draws, and of the messages between them.
        parts: For each call of an engine the begin and the end of the tokens that it drew, and their fields `[L, ...]`.
        turns: The numbers `COLUMNS` of each turn, and the position of the turn's last token.
        routing: The experts `[R, M, k]` of the first R tokens, see `joined_routing`; None where no engine reports them.
    """

    prompt: Prompt
    visual: VisualInputs | None
    limit: int
    tokens: list[int]
    parts: list[tuple[int, int, dict[str, PerToken]]] = field(default_factory=list)
    turns: list[tuple[int, list[float]]] = field(default_factory=list)
    routing: Tensor | None = None

    @property
    def room(self) -> int:
        """Return the number of tokens that may follow."""
        return self.limit - len(self.tokens)

    def take(self, part: Part) -> None:
        """Add the tokens that a call drew, cut at `limit` tokens."""
        begin, count = len(self.tokens), max(0, min(len(part.tokens), self.room))
        self.tokens = [*self.tokens, *part.tokens[:count]]
        self.parts.append((begin, begin + count, {name: values[:count] for name, values in part.fields.items()}))
        routing = joined_routing(self.routing, part.routing)
        self.routing = None if routing is None else routing[: begin + count]

    def count(self, **numbers: float) -> None:
        """Add to the numbers `COLUMNS` of the newest turn, by name."""
        self.turns.append((len(self.tokens) - 1, [float(numbers.get(name, 0.0)) for name in COLUMNS]))


def joined_routing(earlier: Tensor | None, newest: Tensor | None) -> Tensor | None:
    """Return the experts of a sequence from those that an earlier call and the newest call report.

    The earlier call's stand where it reports them, since it drew its tokens with them. The newest call adds the experts
    of the tokens behind, and of the last token that the earlier call drew: that token was not computed then (-1). A
    call that reports none, or those of fewer tokens, takes none away; the routers choose for tokens without experts.
    """
    if earlier is None or newest is None:
        return newest if earlier is None else earlier
    shared = min(len(earlier), len(newest))
    experts = torch.where(earlier[:shared] < 0, newest[:shared], earlier[:shared])
    return torch.cat([experts, earlier[shared:], newest[shared:]])


def part_of(response: Response) -> Part:
    """Return the part of an engine's response."""
    fields: dict[str, PerToken] = {"log_probs": torch.tensor(response.log_probs)}
    if response.versions is not None:
        fields[VERSION] = torch.tensor(response.versions)
    if response.kept is not None:
        fields[SAMPLING_MASK] = SamplingMask.from_rows(response.kept)
    return Part(response.tokens, fields, response.routing)


def parts_of(batch: Batch, begins: Sequence[int]) -> list[Part]:
    """Return what an engine has drawn, for each sequence of the batch from the position `begins` on."""
    fields: dict[str, Sequence[PerToken]] = {name: batch.split(name) for name in batch.fields if name != ROUTING}
    if batch.sampling_mask is not None:
        fields[SAMPLING_MASK] = batch.sampling_mask.split(batch.lengths)
    routing = batch.split(ROUTING) if ROUTING in batch.fields else [None] * len(batch)
    return [
        Part(tokens[begin:].tolist(), {name: rows[number][begin:] for name, rows in fields.items()}, experts)
        for number, (begin, tokens, experts) in enumerate(zip(begins, batch.split(), routing, strict=True))
    ]


def next_call(
    samples: Sequence[Sample], sampling: SamplingOptions, seed: int, most: int | None = None
) -> tuple[list[list[int]] | Batch, SamplingOptions]:
    """Return the arguments of an engine's call that goes on with the samples, by at most `most` tokens."""
    room = max(sample.room for sample in samples)
    longest = max(sample.limit for sample in samples)
    sampling = replace(
        sampling, n=1, max_new_tokens=room if most is None else min(room, most), max_length=longest, seed=seed
    )
    return with_images([sample.tokens for sample in samples], tuple(sample.visual for sample in samples)), sampling


def with_images(tokens: list[list[int]], visual: Visual) -> list[list[int]] | Batch:
    """Return prompts in the form that an engine takes: a batch where there are images."""
    return Batch.from_sequences(tokens, visual=visual) if any(visual) else tokens


def batch_of(samples: Sequence[Sample]) -> Batch:
    """Return samples with the drawn tokens in the mask; fields are 0, versions and experts -1, elsewhere."""
    lengths = [len(sample.tokens) for sample in samples]
    starts = list(itertools.accumulate(lengths, initial=0))
    total = starts.pop()
    mask = torch.zeros(total, dtype=torch.bool)
    fields: dict[str, Tensor] = {}
    # The masks of the drawn tokens, and the row of each token among theirs.
    masks, rows, count = list[SamplingMask](), torch.full((total,), -1), 0
    for start, sample in zip(starts, samples, strict=True):
        for begin, end, part in sample.parts:
            mask[start + begin : start + end] = True
            for name, values in part.items():
                if isinstance(values, SamplingMask):
                    masks.append(values.to("cpu"))
                    rows[start + begin : start + end] = torch.arange(count, count + end - begin)
                    count += end - begin
                    continue
                _write(fields, name, total, start + begin, values)
        if sample.routing is not None:
            _write(fields, ROUTING, total, start, sample.routing)
        for position, numbers in sample.turns:
            turns = fields.setdefault(TURNS, torch.zeros(total, len(COLUMNS)))
            turns[start + position] += torch.tensor(numbers)
    tokens = torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int64)
    sampling_mask = SamplingMask.concatenate(masks)[rows] if masks else None
    return Batch(tokens, tuple(lengths), mask, fields, tuple(sample.visual for sample in samples), sampling_mask)


def _write(fields: dict[str, Tensor], name: str, total: int, begin: int, values: Tensor) -> None:
    """Write the values of a field `[total, ...]` at the tokens from `begin` on."""
    if name not in fields:
        fields[name] = values.new_full((total, *values.shape[1:]), _FILLERS.get(name, 0), device="cpu")
    fields[name][begin : begin + len(values)] = values.cpu()
