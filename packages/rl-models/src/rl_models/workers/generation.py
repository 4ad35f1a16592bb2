"""Generation on an engine: one pass over the prompts, then one token at a time for each response until it stops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import agree
from parallel_layers.head.embedding import check_token_ids
from rl_models.batch import Batch, token_rows
from rl_models.engines import Engine
from rl_models.numbers import require_number
from rl_models.workers.agreement import Given, agree_on_call
from rl_models.workers.digests import described_lengths, digests
from rl_models.workers.sampling import check_sampling, sample


@dataclass(frozen=True)
class SamplingOptions:
    """The options of a draw; see `Actor.generate`.

    Raises:
        ValueError: An option is no number or out of its range, or `stop_ids` are no integers.
    """

    max_new_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: Iterable[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n"):
            require_number(name, getattr(self, name), at_least=1, integer=True)
        require_number("seed", self.seed, integer=True)
        check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        if isinstance(self.stop_ids, str | bytes) or not isinstance(self.stop_ids, Iterable):
            raise ValueError(f"stop_ids={self.stop_ids!r} must be a list of token ids, such as stop_ids=[2]")
        ids = list(self.stop_ids)
        for token in ids:
            require_number("stop_ids", token, at_least=0, integer=True)
        object.__setattr__(self, "stop_ids", sorted(set(map(int, ids))))


def generate(
    engine: Engine,
    prompts: Sequence[Tensor | Sequence[int]],
    make_options: Callable[[], SamplingOptions],
    *,
    call: str,
    positions: int | None = None,
) -> Batch:
    """Continue every prompt; see `Actor.generate`.

    Args:
        engine: The model.
        prompts: This data-parallel rank's prompts.
        make_options: Returns the options, or raises ValueError.
        call: What an error calls this call.
        positions: The longest sequence that the model was made for; None: not known.

    Raises:
        ValueError: As `Actor.generate` says. An error of one dp rank is raised on all of them: the other ranks would
            wait for that rank in their next call.
    """
    rows, options = list[Tensor](), SamplingOptions(1)

    def prepare() -> Given:
        nonlocal rows, options
        options = make_options()
        rows = _checked(engine, prompts, positions)
        flat = torch.cat([row.to(engine.grid.device) for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        found, _ = digests({"prompt_tokens": flat})
        given = {"prompts": described_lengths([len(row) for row in rows]), **vars(options)}
        return Given({**given, **found})

    agree_on_call(engine.grid, call, prepare)
    rows = [row.to(engine.grid.device) for row in rows]
    return agree(lambda: _responses(engine, rows, options), engine.grid.group("dp"))


def _checked(engine: Engine, prompts: Sequence[Tensor | Sequence[int]], positions: int | None) -> list[Tensor]:
    """Return the prompts as tokens, where they are.

    Raises:
        ValueError: A prompt is empty, no row of integers, longer than the model's positions, or has a token outside the
            vocabulary.
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
        check_token_ids(row, engine.vocab_size)  # on a GPU a bad id is a device assertion
    return rows


def _responses(engine: Engine, rows: list[Tensor], options: SamplingOptions) -> Batch:
    """Return prompts and responses.

    Raises:
        ValueError: Logits are NaN or infinite.
    """
    device = engine.grid.device
    # Ranks that share experts run every forward pass together: idle ranks feed a dummy token.
    together = engine.grid.group("dp") if engine.grid.dims.ep > 1 else None
    inputs = rows
    if together is not None and not rows:
        inputs = [torch.zeros(1, dtype=torch.int64, device=device)]
    rows = [row for row in rows for _ in range(options.n)]
    generator = torch.Generator(device).manual_seed(_seed(options.seed, engine.grid.rank("dp")))
    stop = torch.tensor(options.stop_ids, dtype=torch.int64, device=device)
    tokens = torch.zeros(len(rows), options.max_new_tokens, dtype=torch.int64, device=device)
    log_probs = torch.zeros(len(rows), options.max_new_tokens, device=device)
    lengths = [0] * len(rows)
    # The responses of the engine's sequences, and whether each continues.
    held, alive = list(range(len(rows))), [True] * len(rows)
    nothing, broken = stop[:0], list[int]()
    longest = max((len(row) for row in rows), default=0)
    with engine.decoding(len(inputs), longest + options.max_new_tokens) as next_logits:
        step, keep = 0, None
        while _anyone(going := step < options.max_new_tokens and any(alive), together, device):
            logits = next_logits(inputs, keep)
            inputs, keep = [nothing] * len(logits), None
            if not going:
                continue
            if step == 0:
                # The n responses of a prompt share one pass over the prompt.
                logits, keep = logits.repeat_interleave(options.n, dim=0), [number // options.n for number in held]
            drawn, drawn_log_probs = sample(
                logits,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                generator=generator,
            )
            tokens[held, step], log_probs[held, step] = drawn, drawn_log_probs
            step += 1
            stopping, undrawn = torch.stack([torch.isin(drawn, stop), drawn_log_probs.isnan()]).tolist()
            if broken := [held[place] for place, bad in enumerate(undrawn) if bad and alive[place]]:
                # Ranks that share experts still need this rank in their forward passes.
                alive, inputs = [False] * len(alive), [nothing] * len(alive)
                continue
            for place, stops in enumerate(stopping):
                lengths[held[place]] += alive[place]
                alive[place] &= not stops
            if 0 < 2 * sum(alive) <= len(alive):
                # Remove stopped responses from the cache once half have stopped: a removal may copy the cache.
                stay = [place for place, goes_on in enumerate(alive) if goes_on]
                keep = stay if keep is None else [keep[place] for place in stay]
                held, alive, drawn = [held[place] for place in stay], [True] * len(stay), drawn[stay]
            inputs = [nothing] * len(held)
            if step < options.max_new_tokens:
                inputs = [drawn[i : i + 1] if goes_on else nothing for i, goes_on in enumerate(alive)]
    if broken:
        where = [(number // options.n, number % options.n) for number in broken]
        raise ValueError(
            f"the model gives NaN or infinite logits after {step - 1} tokens of the responses (prompt, response) "
            f"{where[:8]}{' and others' * (len(where) > 8)}: it has diverged, or its checkpoint is broken; go back to "
            "an earlier checkpoint, and check the learning rate and the loss"
        )
    responses = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    of_responses = [row[:length] for row, length in zip(log_probs, lengths, strict=True)]
    of_prompts = [torch.zeros(len(row), device=device) for row in rows]
    return Batch.from_sequences(
        [torch.cat(pair) for pair in zip(rows, responses, strict=True)],
        response_lengths=lengths,
        device=device,
        log_probs=[torch.cat(pair) for pair in zip(of_prompts, of_responses, strict=True)],
    )


def _anyone(going: bool, group: ProcessGroup | None, device: torch.device) -> bool:
    """Return whether any rank of the group has a token to draw."""
    if group is None:
        return going
    flag = torch.tensor(int(going), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _seed(seed: int, dp_rank: int) -> int:
    """Return a seed for a dp rank: splitmix64's finaliser of the pair makes neighbouring streams unrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + dp_rank * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & (2**63 - 1)
