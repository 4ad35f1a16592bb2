"""Generation on an engine: checked prompts and options in, a batch of prompts and responses out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Required, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import agree
from parallel_layers.distributed.async_collectives import all_gather
from parallel_layers.inference.sampling import MIN_TEMPERATURE, sample, sample_with_mask
from parallel_layers.rotary import require_length
from rl_models.batch import Batch, prompt_rows
from rl_models.engines import Engine
from rl_models.engines.decoding import CacheOptions
from rl_models.numbers import options_of, require_flags, require_number
from rl_models.visual import VisualInputs, described
from rl_models.workers.agreement import Given, agree_on_call
from rl_models.workers.continuous_batching import ContinuousBatching, Draw, Responses
from rl_models.workers.digests import described_lengths, digests
from rl_models.workers.sampling_mask import SAMPLING_MASK


@dataclass(frozen=True)
class SamplingOptions:
    """The options of the draws.

    Attributes:
        max_new_tokens: The largest number of tokens of a response.
        max_length: The largest number of tokens of a prompt with its response (default: any number).
        n: The number of responses for each prompt.
        temperature, top_k, top_p: See `parallel_layers.inference.sampling.sample`; temperature 0 is greedy.
        stop_ids: A response ends with the first of these tokens.
        seed: The seed of the draws; data-parallel ranks with the same seed still draw differently. A response's draws
            depend neither on the other responses nor on `max_sequences`.
        keep_sampling_mask: Return the field `sampling_mask`: the tokens that top-k and top-p kept, at most `top_k` for
            each token. The field `log_probs` is then renormalised over them; see `rl_models.workers.sampling_mask`.

    Raises:
        ValueError: An option is no number or out of its range, `stop_ids` are no integers, or `keep_sampling_mask`
            stands without `top_k` or with temperature 0.
    """

    max_new_tokens: int
    max_length: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: Iterable[int] = ()
    seed: int = 0
    keep_sampling_mask: bool = False

    def __post_init__(self) -> None:
        require_flags(self)
        for name in ("max_new_tokens", "n"):
            require_number(name, getattr(self, name), at_least=1, integer=True)
        if self.max_length is not None:
            require_number("max_length", self.max_length, at_least=2, integer=True)
        require_number("seed", self.seed, integer=True)
        object.__setattr__(self, "seed", int(self.seed))  # a seed of numpy would overflow in `_seed`
        for name in ("temperature", "top_p"):
            require_number(name, getattr(self, name))
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} is too small to divide logits by; use 0, which takes the most likely "
                f"token, or at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None:
            require_number("top_k", self.top_k, at_least=1, integer=True)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.keep_sampling_mask and (self.top_k is None or not self.temperature):
            raise ValueError(
                f"keep_sampling_mask needs top_k, which bounds the kept tokens, and a temperature above 0, not top_k="
                f"{self.top_k} and temperature={self.temperature}; give top_k=100 beside top_p, or leave the mask out"
            )
        if isinstance(self.stop_ids, str | bytes) or not isinstance(self.stop_ids, Iterable):
            raise ValueError(f"stop_ids={self.stop_ids!r} must be a list of token ids, such as stop_ids=[2]")
        ids = list(self.stop_ids)
        for token in ids:
            require_number("stop_ids", token, at_least=0, integer=True)
        object.__setattr__(self, "stop_ids", sorted(set(map(int, ids))))

    def limit(self, prompt: int) -> int:
        """Return the largest number of tokens of a response to a prompt of `prompt` tokens.

        Raises:
            ValueError: `max_length` leaves no token for the response.
        """
        room = self.max_new_tokens if self.max_length is None else self.max_length - prompt
        if room < 1:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no token for a response; max_length={self.max_length}"
            )
        return min(room, self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingOptions):
    """The options of the draws, and how an actor computes them.

    Attributes:
        exact: Compute as `log_probs` does: the log-probs then agree with it to 1e-5 in fp32. The default takes a faster
            attention for single tokens and CUDA graphs; in bf16 its log-probs differ by rounding.
        max_sequences: Maximum number of responses that are drawn at a time; the others wait.
        cache_gib: Maximum memory of keys and values on this rank, in GiB (default: 80 % of a GPU's free memory).
            Responses without room wait.
    """

    exact: bool = False
    max_sequences: int = 512
    cache_gib: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("max_sequences", self.max_sequences, at_least=1, integer=True)
        if self.cache_gib is not None:
            require_number("cache_gib", self.cache_gib, positive=True)


class GenerationKeywords(TypedDict, total=False):
    """The fields of `GenerationOptions` as keyword arguments, by which editors complete them."""

    max_new_tokens: Required[int]
    max_length: int | None
    n: int
    temperature: float
    top_k: int | None
    top_p: float
    stop_ids: Iterable[int]
    seed: int
    keep_sampling_mask: bool
    exact: bool
    max_sequences: int
    cache_gib: float | None


class _Prompt(NamedTuple):
    """The tokens of a prompt `[L]`, its images, and the offset of the positions behind them."""

    tokens: Tensor
    visual: VisualInputs | None
    offset: int


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
    found_prompts, checked = list[_Prompt](), GenerationOptions(max_new_tokens=1)
    visual = prompts.visual if isinstance(prompts, Batch) else ()

    def prepare() -> Given:
        nonlocal found_prompts, checked
        checked = options_of(GenerationOptions, call, options)
        rows = prompt_rows(prompts, engine.vocab_size, positions)
        for row in rows:
            require_length(len(row) + checked.limit(len(row)), engine.longest_sequence)
        if isinstance(prompts, Batch):
            engine.require_visual(prompts)
        found_prompts = [
            _Prompt(row.to(engine.grid.device), *((None, 0) if one is None else engine.prompt_images(row, one)))
            for row, one in zip(rows, visual or [None] * len(rows), strict=True)
        ]
        flat = torch.cat([row.to(engine.grid.device) for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        found, _ = digests({"prompt_tokens": flat})
        given = {"prompts": described_lengths([len(row) for row in rows]), "images": described(visual), **vars(checked)}
        return Given({**given, **found})

    agree_on_call(engine.grid, call, prepare)
    return _responses(engine, found_prompts, checked, max_tokens)


def _responses(engine: Engine, rows: list[_Prompt], options: GenerationOptions, max_tokens: int) -> Batch:
    """Return prompts and responses; each context-parallel rank draws those of a part of the prompts."""
    grid, n = engine.grid, options.n
    generator = torch.Generator(grid.device).manual_seed(_seed(options.seed, grid.rank("dp")))
    shape = len(rows), n, options.max_new_tokens
    uniforms = torch.rand(shape, generator=generator, device=grid.device)
    part = -(-len(rows) // grid.dims.cp)
    first = grid.rank("cp") * part
    own = slice(first, first + part)
    data = None if grid.data_mesh is None else grid.data_mesh.get_group()
    responses = agree(lambda: _draw(engine, rows[own], uniforms[own].flatten(0, 1), options, max_tokens, first), data)
    responses = _of_all_parts(responses, part * n, grid.group("cp"))
    return _as_batch([row for row in rows for _ in range(n)], responses)


def _as_batch(prompts: list[_Prompt], responses: Responses) -> Batch:
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


def _draw(
    engine: Engine, rows: list[_Prompt], uniforms: Tensor, options: GenerationOptions, max_tokens: int, first: int
) -> Responses:
    """Return the responses to these prompts, the first of which has the number `first`."""
    grid, multiple_of = engine.grid, engine.tokens_multiple_of
    # Ranks that share experts run every forward pass together: idle ranks feed padding.
    together = grid.data_mesh.get_group() if grid.dims.ep > 1 and grid.data_mesh is not None else None
    prompts = [row for row in rows for _ in range(options.n)]
    wanted = min(len(prompts), options.max_sequences)
    if together is not None:
        wanted = max(wanted, 1)
    places = -(-wanted // multiple_of) * multiple_of
    limits = [options.limit(len(prompt.tokens)) for prompt in prompts]
    longest = max((len(row.tokens) for row in rows), default=1) + max(limits, default=options.max_new_tokens)
    sizes = CacheOptions(places, longest, options.cache_gib, options.exact)
    stop = torch.tensor(options.stop_ids, dtype=torch.int64, device=grid.device)
    width = options.top_k if options.keep_sampling_mask else None
    draw: Draw = partial(sample, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    if width is not None:
        draw = partial(sample_with_mask, temperature=options.temperature, top_k=width, top_p=options.top_p)
    with engine.decoding(sizes) as decoding:
        batching = ContinuousBatching(
            *(decoding, [prompt.tokens for prompt in prompts], uniforms, limits, draw, stop),
            mask_width=width,
            max_tokens=max_tokens,
            multiple_of=multiple_of,
            together=together,
            visual=tuple(prompt.visual for prompt in prompts),
            offsets=[prompt.offset for prompt in prompts],
            progress=engine.progress,
        )
        responses = batching.run()
    broken = responses.log_probs.isnan()
    if broken.any():
        step = int(broken.any(dim=0).nonzero()[0])
        numbers = broken[:, step].nonzero()[:, 0].tolist()
        where = [(first + number // options.n, number % options.n) for number in numbers]
        raise ValueError(
            f"the model gives NaN or infinite logits after {step} tokens of the responses (prompt, response) "
            f"{where[:8]}{' and others' * (len(where) > 8)}: it has diverged, or its checkpoint is broken; go back to "
            "an earlier checkpoint, and check the learning rate and the loss"
        )
    return responses


def _of_all_parts(responses: Responses, rows: int, group: ProcessGroup | None) -> Responses:
    """Return the responses of all context-parallel ranks in order; each rank has at most `rows`."""
    if group is None:
        return responses
    lengths = responses.tokens.new_tensor(responses.lengths)
    missing = rows - len(lengths)

    def whole(rows: Tensor) -> Tensor:
        return all_gather(torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))), group)

    masks = None if responses.masks is None else whole(responses.masks)
    return Responses(whole(responses.tokens), whole(responses.log_probs), whole(lengths).tolist(), masks)


def _seed(seed: int, dp_rank: int) -> int:
    """Return a seed for a dp rank: splitmix64's finaliser of the pair makes neighbouring streams unrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + dp_rank * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & (2**63 - 1)
