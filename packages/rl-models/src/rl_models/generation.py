"""Generation on an engine: prefill, then one token at a time for all sequences that have not stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.embedding import check_token_ids
from rl_models.backends import Engine
from rl_models.batch import Batch
from rl_models.sampling import sample


@dataclass(frozen=True)
class SamplingOptions:
    """How to draw; see `Actor.generate`."""

    max_new_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def generate(engine: Engine, prompts: Sequence[Tensor | Sequence[int]], options: SamplingOptions) -> Batch:
    """Continue every prompt `options.n` times; see `Actor.generate`."""
    device = engine.grid.device
    rows = [torch.as_tensor(prompt, dtype=torch.int64, device=device).flatten() for prompt in prompts]
    if empty := [i for i, row in enumerate(rows) if not len(row)]:
        raise ValueError(
            f"prompts {empty} are empty; give each at least one token, such as the beginning-of-text token"
        )
    for row in rows:
        check_token_ids(row, engine.vocab_size)
    rows = [row for row in rows for _ in range(options.n)]
    count = len(rows)
    # Ranks that share experts run every forward pass together: who has nothing to do brings a token that nobody reads.
    together = engine.grid.group("dp") if engine.grid.dims.ep > 1 else None
    if together is not None and not rows:
        rows = [torch.zeros(1, dtype=torch.int64, device=device)]
    generator = torch.Generator(device).manual_seed(_seed(options.seed, engine.grid.rank("dp")))
    stop = torch.tensor(sorted(options.stop_ids), dtype=torch.int64, device=device)
    tokens = torch.zeros(len(rows), options.max_new_tokens, dtype=torch.int64, device=device)
    log_probs = torch.zeros(len(rows), options.max_new_tokens, device=device)
    lengths = torch.zeros(len(rows), dtype=torch.int64)
    running = torch.arange(len(rows)) < count
    longest = max((len(row) for row in rows), default=0)
    with engine.decoding(len(rows), longest + options.max_new_tokens) as next_logits:
        step, step_input = 0, rows
        while _anyone(going := step < options.max_new_tokens and bool(running.any()), together, device):
            logits = next_logits(step_input)
            step_input = [row[:0] for row in rows]
            if not going:
                continue
            drawn, drawn_log_probs = sample(
                logits,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                generator=generator,
            )
            tokens[:, step], log_probs[:, step] = drawn, drawn_log_probs
            lengths += running
            running &= ~torch.isin(drawn, stop).cpu()
            step += 1
            if step < options.max_new_tokens:
                step_input = [drawn[i : i + 1] if goes_on else drawn[:0] for i, goes_on in enumerate(running.tolist())]
    rows, tokens, log_probs, lengths = rows[:count], tokens[:count], log_probs[:count], lengths[:count]
    counts = lengths.tolist()
    responses = [row[:count] for row, count in zip(tokens, counts, strict=True)]
    zeros = [torch.zeros(len(row), device=device) for row in rows]
    return Batch.from_sequences(
        [torch.cat(pair) for pair in zip(rows, responses, strict=True)],
        response_lengths=counts,
        device=device,
        log_probs=[torch.cat([zero, row[:count]]) for zero, row, count in zip(zeros, log_probs, counts, strict=True)],
    )


def _anyone(going: bool, group: ProcessGroup | None, device: torch.device) -> bool:
    """Whether this rank, or any other of the group, has a token to draw."""
    if group is None:
        return going
    flag = torch.tensor(int(going), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _seed(seed: int, dp_rank: int) -> int:
    """Streams of neighbouring seeds and of neighbouring ranks are unrelated: splitmix64's finaliser of the pair."""
    z = (seed * 0x9E3779B97F4A7C15 + dp_rank * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & (2**63 - 1)
