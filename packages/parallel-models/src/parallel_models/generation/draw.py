"""The responses to prompts, drawn by an engine whose ranks divide the prompts.

R responses, L tokens of a prompt or of a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from ckpt import agree
from parallel_layers.distributed import all_gather
from parallel_layers.head import SamplingMask, check_token_ids
from parallel_layers.module import rank_seed
from parallel_models.engine.engine import Engine
from parallel_models.engine.grid import Grid
from parallel_models.generation.continuous_batching import ContinuousBatching, Responses, largest_of_ranks
from parallel_models.generation.decoding import CacheOptions
from parallel_models.generation.options import GenerationOptions
from parallel_models.generation.session import GenerationSession, end_sessions, keep


class Prompt(NamedTuple):
    """The tokens of a prompt `[L]`, its images, and the offset of the positions behind them."""

    tokens: Tensor
    visual: Any = None
    offset: int = 0


def generate(
    engine: Engine, prompts: Sequence[Tensor | Sequence[int]], options: GenerationOptions, *, max_tokens: int = 16384
) -> list[Tensor]:
    """Return the n responses `[L]` to each prompt of token ids, one prompt after another.

    Args:
        engine: The model. Data-parallel ranks bring different prompts; all other ranks of a model bring the same.
        prompts: The prompts, each with at least one token.
        options: The options.
        max_tokens: Maximum number of prompt tokens in one forward pass.

    Raises:
        ValueError: A prompt is empty, too long for `max_length`, or has a token outside the vocabulary; or as for
            `draw_responses`; on every rank.
    """

    def check() -> list[Prompt]:
        rows = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
        if empty := [number for number, row in enumerate(rows) if row.dim() != 1 or not len(row)]:
            raise ValueError(f"prompts {empty[:8]} are no rows of token ids; give each prompt at least one token")
        for row in rows:
            check_token_ids(row, engine.vocab_size)
            options.limit(len(row))
        return [Prompt(row.to(engine.grid.device)) for row in rows]

    rows = agree(check, _data_group(engine.grid))  # other ranks would wait for a rank that raises
    responses = draw_responses(engine, rows, options, max_tokens)
    lengths = responses.lengths[: len(rows) * options.n]
    return [tokens[:length] for tokens, length in zip(responses.tokens, lengths, strict=False)]


def draw_responses(
    engine: Engine,
    rows: Sequence[Prompt],
    options: GenerationOptions,
    max_tokens: int,
    uniforms: Tensor | None = None,
) -> Responses:
    """Return the n responses to each prompt, one prompt after another, on every rank.

    Each context-parallel rank draws the responses to a part of the prompts; a later turn of a conversation goes to the
    rank that has its keys and values. Responses are `[R, L]`, R = n times the number of prompts, L = `max_new_tokens`.

    Args:
        engine: The model. Data-parallel ranks bring different prompts; all other ranks of a model bring the same.
        rows: The prompts, on the engine's device, of which `options.limit` refuses none on any rank.
        options: The options.
        max_tokens: Maximum number of prompt tokens in one forward pass.
        uniforms: `[prompts, n, L]` fp32 in [0, 1), the numbers that decide the tokens (default: by the options' seed).

    Raises:
        ValueError: Logits are NaN or infinite, or the memory of the caches does not suffice; on every rank.
    """
    grid, n = engine.grid, options.n
    if uniforms is None:
        generator = torch.Generator(grid.device).manual_seed(rank_seed(options.seed, grid.rank("dp")))
        shape = len(rows), n, options.max_new_tokens
        uniforms = torch.rand(shape, generator=generator, device=grid.device)
    parts = _divide(engine, rows, options)
    numbers = parts[grid.rank("cp")]
    local_rows, local_uniforms = [rows[number] for number in numbers], uniforms[numbers].flatten(0, 1)
    drawn = agree(lambda: _draw(engine, local_rows, local_uniforms, options, max_tokens, numbers), _data_group(grid))
    responses = _gathered(drawn, parts, n, grid.group("cp"))
    if options.keep_cache and grid.dims.cp > 1 and engine.session is not None:
        for place, (tokens, length) in enumerate(zip(responses.tokens.tolist(), responses.lengths, strict=True)):
            owner = next(rank for rank, part in enumerate(parts) if place // n in part)
            engine.session.affinity.remember(rows[place // n].tokens.tolist() + tokens[:length], owner)
    return responses


def _divide(engine: Engine, rows: Sequence[Prompt], options: GenerationOptions) -> list[list[int]]:
    """Return the numbers of the prompts of each context-parallel rank, the same on all ranks of the model."""
    grid, cp = engine.grid, engine.grid.dims.cp
    if options.keep_cache and cp > 1:
        # All ranks make sessions and remember sequences together; a rank may have lost its session.
        (lost,) = largest_of_ranks(grid.everyone, grid.device, int(engine.session is None))
        if not lost and engine.session is not None:
            costs = [len(row.tokens) + options.n * options.max_new_tokens for row in rows]
            begun = engine.session.affinity.divide([row.tokens.tolist() for row in rows], costs, cp)
            if begun is not None:
                return begun
    share = -(-len(rows) // cp)
    return [list(range(len(rows)))[rank * share : (rank + 1) * share] for rank in range(cp)]


@torch.no_grad()
def _draw(
    engine: Engine,
    rows: Sequence[Prompt],
    uniforms: Tensor,
    options: GenerationOptions,
    max_tokens: int,
    prompt_numbers: Sequence[int],
) -> Responses:
    """Return the responses to these prompts; errors name their numbers."""
    grid, multiple_of = engine.grid, engine.tokens_multiple_of
    together = ranks_together(grid)
    prompts = [row for row in rows for _ in range(options.n)]
    (sequences,) = largest_of_ranks(together, grid.device, min(len(prompts), options.max_sequences))
    slots = slots_for(engine, sequences)
    limits = [options.limit(len(prompt.tokens)) for prompt in prompts]
    longest = max((len(prompt.tokens) + limit for prompt, limit in zip(prompts, limits, strict=True)), default=1)
    if options.keep_cache and options.max_length is not None:
        longest = max(longest, options.max_length)  # of later calls
    how = options.exact, options.float8, options.float8_cache, options.drafts, options.experts
    sizes = CacheOptions(slots, longest, options.cache_gib, *how)
    with _session(engine, sizes, options) as session:
        batching = ContinuousBatching(
            *(session, [prompt.tokens for prompt in prompts], uniforms, limits),
            max_tokens=max_tokens,
            multiple_of=multiple_of,
            together=None if session.decoding.independent else together,
            visual=tuple(prompt.visual for prompt in prompts),
            offsets=[prompt.offset for prompt in prompts],
            progress=engine.progress,
        )
        responses = batching.run()
    broken = responses.log_probs.isnan()
    if broken.any():
        step = int(broken.any(dim=0).nonzero()[0])
        numbers = broken[:, step].nonzero()[:, 0].tolist()
        diverged = [(prompt_numbers[number // options.n], number % options.n) for number in numbers]
        raise ValueError(
            f"the model gives NaN or infinite logits after {step} tokens of the responses (prompt, response) "
            f"{diverged[:8]}{' and others' * (len(diverged) > 8)}: it has diverged, or its checkpoint is broken; go "
            "back to an earlier checkpoint, and check the learning rate and the loss"
        )
    return responses


@contextmanager
def _session(engine: Engine, sizes: CacheOptions, options: GenerationOptions) -> Iterator[GenerationSession]:
    """Yield the session that the engine keeps, or a new one; keep it where the options ask for that.

    All ranks of the model take the kept session or none: a new one gathers weights.
    """
    session, grid = engine.session, engine.grid
    if options.keep_cache:
        fits = session is not None and session.fits(sizes, slots_for(engine, options.max_sequences))
        (unfit,) = largest_of_ranks(grid.everyone, grid.device, int(not fits))
    if not options.keep_cache or unfit or session is None:
        end_sessions()
        session = None  # caches and gathered weights of the old session are freed before the new one makes its own
        session = GenerationSession(sizes, engine.decoding(sizes), engine.module, grid.device)
        if options.keep_cache and session.decoding.lasting:
            keep(engine, session)
    session.sample_by(options, engine.vocab_size)
    session.running = True
    try:
        yield session
    except BaseException:
        engine.session = None
        raise
    finally:
        session.running = False
        if engine.session is not session:
            session.end()


def slots_for(engine: Engine, sequences: int) -> int:
    """Return the number of slots for sequences that are drawn at a time: equal groups for the stages of a pipeline."""
    multiple_of = engine.tokens_multiple_of * engine.grid.dims.pp
    return -(-sequences // multiple_of) * multiple_of


def ranks_together(grid: Grid) -> ProcessGroup | None:
    """Return the ranks that share experts. They run every forward pass together: idle ranks feed padding."""
    return _data_group(grid) if grid.dims.ep > 1 else None


def _data_group(grid: Grid) -> ProcessGroup | None:
    """Return the ranks that have other tokens of the same layers; None: this rank has all."""
    return None if grid.data_mesh is None else grid.data_mesh.get_group()


def _gathered(responses: Responses, parts: Sequence[Sequence[int]], n: int, group: ProcessGroup | None) -> Responses:
    """Return the n responses to each prompt from the context-parallel ranks that have these parts of the prompts."""
    if group is None:
        return responses
    most = n * max(map(len, parts))
    owners = {number: rank * most + n * i for rank, part in enumerate(parts) for i, number in enumerate(part)}
    places = [owners[number] + i for number in range(len(owners)) for i in range(n)]
    numbers = responses.tokens.new_tensor([responses.lengths, responses.computed, responses.steps]).t()

    def gather(rows: Tensor) -> Tensor:
        missing = most - len(rows)
        return all_gather(torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))), group)[places]

    lengths, computed, steps = gather(numbers).t().tolist()
    mask, longest = responses.mask, responses.tokens.shape[1]
    if mask is not None:
        counts = numbers.new_zeros(most, longest)
        counts[: len(numbers)][torch.arange(longest, device=counts.device) < numbers[:, :1]] = mask.counts
        every_mask = _every_mask(mask.ids, counts.flatten(), group)
        rows = torch.arange(len(every_mask)).view(-1, longest)[places]
        mask = every_mask[rows[torch.arange(longest) < torch.tensor(lengths)[:, None]]]
    return Responses(gather(responses.tokens), gather(responses.log_probs), lengths, mask, computed, steps)


def _every_mask(ids: Tensor, counts: Tensor, group: ProcessGroup) -> SamplingMask:
    """Return the rows of all ranks, which have `counts` ids each; ranks have equally many rows."""
    (most,) = largest_of_ranks(group, ids.device, len(ids))
    padded = all_gather(F.pad(ids, (0, most - len(ids)))[None], group)
    every_count = all_gather(counts, group)
    totals = every_count.view(len(padded), -1).sum(1).tolist()
    return SamplingMask(
        torch.cat([row[:total] for row, total in zip(padded, totals, strict=True)]),
        F.pad(every_count.cumsum(0), (1, 0)),
    )
