"""`Sample`: a response that an engine draws in several calls, part by part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parallel_layers.head import SamplingMask
from parallel_models import SamplingOptions
from rl_models import Batch, VisualInputs
from rl_models.batch import Visual
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION

PerToken = Tensor | SamplingMask
# The name of the sampling mask among the fields of a part.
SAMPLING_MASK = "sampling_mask"


@dataclass
class Sample:
    """A prompt and what follows it, at most `limit` tokens with the prompt.

    `parts` has an entry for each call of an engine: the begin and the end of the tokens that were drawn, and their
    fields `[L, ...]`.
    """

    prompt: Prompt
    visual: VisualInputs | None
    limit: int
    tokens: list[int]
    parts: list[tuple[int, int, dict[str, PerToken]]] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Return the number of tokens that may follow."""
        return self.limit - len(self.tokens)

    def take(self, tokens: list[int], fields: dict[str, PerToken]) -> None:
        """Add a part from the engine's sequence `[L]` and its fields `[L, ...]`, cut at `limit` tokens."""
        begin = len(self.tokens)
        self.tokens = [*self.tokens, *tokens[begin : self.limit]]
        end = len(self.tokens)
        self.parts.append((begin, end, {name: values[begin:end] for name, values in fields.items()}))


def take_parts(samples: Sequence[Sample], batch: Batch) -> None:
    """Add to each sample what an engine has drawn for it, a sequence of the batch."""
    fields: dict[str, Sequence[PerToken]] = {name: batch.split(name) for name in batch.fields}
    if batch.sampling_mask is not None:
        fields[SAMPLING_MASK] = batch.sampling_mask.split(batch.lengths)
    for row, (sample, tokens) in enumerate(zip(samples, batch.split(), strict=True)):
        sample.take(tokens.tolist(), {name: rows[row] for name, rows in fields.items()})


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
    """Return samples with the drawn tokens in the mask; fields are 0, and versions -1, elsewhere."""
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
                if name not in fields:
                    shape, filler = (total, *values.shape[1:]), -1 if name == VERSION else 0
                    fields[name] = values.new_full(shape, filler, device="cpu")
                fields[name][start + begin : start + end] = values.cpu()
    tokens = torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int64)
    sampling_mask = SamplingMask.concatenate(masks)[rows] if masks else None
    return Batch(tokens, tuple(lengths), mask, fields, tuple(sample.visual for sample in samples), sampling_mask)
