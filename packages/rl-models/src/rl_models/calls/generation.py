"""Generation on an engine: checked prompts and options in, a batch of prompts and responses out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_layers.rotary import require_length
from parallel_models import Engine, GenerationOptions
from parallel_models.engine import options_of
from parallel_models.generation import Prompt, Responses, draw_responses
from rl_models.batch.batch import Batch, prompt_rows
from rl_models.batch.visual import described
from rl_models.calls.agreement import Given, agree_on_call
from rl_models.calls.sampling_mask import SAMPLING_MASK
from rl_models.calls.tensor_digests import described_lengths, digests


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
    found_prompts, checked = list[Prompt](), GenerationOptions(max_new_tokens=1)
    visual = prompts.visual if isinstance(prompts, Batch) else ()

    def prepare() -> Given:
        nonlocal found_prompts, checked
        checked = options_of(GenerationOptions, call, options)
        rows = prompt_rows(prompts, engine.vocab_size, positions)
        for row in rows:
            require_length(len(row) + checked.limit(len(row)), engine.longest_sequence)
        if isinstance(prompts, Batch):
            engine.require_visual(rows, visual)
        found_prompts = [
            Prompt(row.to(engine.grid.device), *((None, 0) if one is None else engine.prompt_images(row, one)))
            for row, one in zip(rows, visual or [None] * len(rows), strict=True)
        ]
        flat = torch.cat([row.to(engine.grid.device) for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        found, _ = digests({"prompt_tokens": flat})
        given = {"prompts": described_lengths([len(row) for row in rows]), "images": described(visual), **vars(checked)}
        return Given({**given, **found})

    agree_on_call(engine.grid, call, prepare)
    responses = draw_responses(engine, found_prompts, checked, max_tokens)
    return _as_batch([prompt for prompt in found_prompts for _ in range(checked.n)], responses)


def _as_batch(prompts: Sequence[Prompt], responses: Responses) -> Batch:
    """Return each prompt with its response, and with its images."""
    number, device = len(prompts), responses.tokens.device
    lengths = torch.tensor(responses.lengths[:number], dtype=torch.int64)
    pairs = torch.stack((torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.int64), lengths), dim=1)
    mask = torch.repeat_interleave(torch.tensor([False, True]).repeat(number), pairs.flatten()).to(device)
    drawn = (torch.arange(responses.tokens.shape[1]) < lengths[:, None]).to(device)
    tokens = torch.zeros(len(mask), dtype=torch.int64, device=device)
    tokens[~mask] = torch.cat([tokens[:0], *(prompt.tokens for prompt in prompts)])
    tokens[mask] = responses.tokens[:number][drawn]
    log_probs = torch.zeros(len(mask), device=device)
    log_probs[mask] = responses.log_probs[:number][drawn]
    fields = {"log_probs": log_probs}
    if responses.masks is not None:
        kept = responses.masks.new_full((len(mask), responses.masks.shape[-1]), -1)
        kept[mask] = responses.masks[:number][drawn]
        fields[SAMPLING_MASK] = kept
    visual = tuple(prompt.visual for prompt in prompts)
    return Batch(tokens, tuple(pairs.sum(dim=1).tolist()), mask, fields, visual)
