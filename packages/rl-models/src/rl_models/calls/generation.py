"""Generation on an engine: checked prompts and options in, a batch of prompts and responses out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel_layers.rotary import require_length
from parallel_models import Engine, GenerationOptions
from parallel_models.engine import options_of
from parallel_models.generation import Prompt, Responses, draw_responses
from rl_models.batch.batch import Batch
from rl_models.batch.prompts import prompt_rows
from rl_models.batch.visual import Visual
from rl_models.calls.agreement import CallArguments, agree_on_call
from rl_models.calls.tensor_digests import described_sequences

# A field of the batch with `keep_cache`, `[T]`: at the first token of a response the number of tokens that the model
# computed before it, 0 elsewhere.
PROMPT_TOKENS_COMPUTED = "prompt_tokens_computed"
# A field of the batch with `drafts`, `[T]`: at the first token of a response the number of steps that drew it, 0
# elsewhere.
DECODING_STEPS = "decoding_steps"


def generate(
    engine: Engine,
    prompts: Sequence[Tensor | Sequence[int]] | Batch,
    options: Mapping[str, Any],
    *,
    call: str,
    max_tokens: int,
    positions: int | None,
) -> Batch:
    """Continue every prompt, with the fields of `GenerationOptions`; see `Actor.generate`.

    An error of one dp rank is raised on all of them: the other ranks would wait for that rank in their next call.
    """
    request = _Request(engine, prompts, options, positions, call)
    agree_on_call(engine.grid, call, request.check)
    responses = draw_responses(engine, request.prompts, request.checked, max_tokens)
    prompts_of_responses = [prompt for prompt in request.prompts for _ in range(request.checked.n)]
    counts = {PROMPT_TOKENS_COMPUTED: responses.computed} if request.checked.keep_cache else {}
    counts |= {DECODING_STEPS: responses.steps} if request.checked.drafts else {}
    return _as_batch(prompts_of_responses, responses, counts)


@dataclass
class _Request:
    """The prompts and options of one call on this rank; `check` fills `prompts` and `checked`."""

    engine: Engine
    sequences: Sequence[Tensor | Sequence[int]] | Batch
    options: Mapping[str, Any]
    positions: int | None
    call: str
    prompts: list[Prompt] = field(init=False)
    checked: GenerationOptions = field(init=False)

    def check(self) -> CallArguments:
        """Check this rank's prompts and options, and move the prompts to the device."""
        engine, device = self.engine, self.engine.grid.device
        self.checked = options_of(GenerationOptions, self.call, self.options)
        rows = prompt_rows(self.sequences, engine.vocab_size, self.positions)
        for row in rows:
            require_length(len(row) + self.checked.limit(len(row)), engine.longest_sequence)
        visual: Visual = ()
        if isinstance(self.sequences, Batch):
            visual = self.sequences.visual
            engine.require_visual(rows, visual)
        self.prompts = [
            Prompt(row.to(device), *((None, 0) if images is None else engine.prompt_images(row, images)))
            for row, images in zip(rows, visual or [None] * len(rows), strict=True)
        ]
        return CallArguments({**described_sequences(rows, visual), **vars(self.checked)})


def _as_batch(prompts: Sequence[Prompt], responses: Responses, counts: Mapping[str, Sequence[int]]) -> Batch:
    """Return each prompt with its response and its images; `counts` are fields with one number for each response."""
    count, device = len(prompts), responses.tokens.device
    lengths = torch.tensor(responses.lengths[:count], dtype=torch.int64)
    pairs = torch.stack((torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int64), lengths), dim=1)
    mask = torch.repeat_interleave(torch.tensor([False, True]).repeat(count), pairs.flatten()).to(device)
    drawn = (torch.arange(responses.tokens.shape[1]) < lengths[:, None]).to(device)
    tokens = torch.zeros(len(mask), dtype=torch.int64, device=device)
    tokens[~mask] = torch.cat([tokens[:0], *(prompt.tokens for prompt in prompts)])
    tokens[mask] = responses.tokens[:count][drawn]
    log_probs = torch.zeros(len(mask), device=device)
    log_probs[mask] = responses.log_probs[:count][drawn]
    fields = {"log_probs": log_probs}
    sampling_mask = None
    if responses.mask is not None:
        # Responses beyond `count` are those of padding and stand at the end.
        sampling_mask = responses.mask[torch.where(mask, mask.cumsum(0) - 1, -1)]
    for name, numbers in counts.items():
        fields[name] = torch.zeros(len(mask))
        fields[name][pairs.flatten().cumsum(0)[::2]] = torch.tensor(numbers[:count], dtype=torch.float32)
        fields[name] = fields[name].to(device)
    visual = tuple(prompt.visual for prompt in prompts)
    return Batch(tokens, tuple(pairs.sum(dim=1).tolist()), mask, fields, visual, sampling_mask)
