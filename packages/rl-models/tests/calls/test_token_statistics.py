"""`Actor.token_statistics` against the sorted fp64 logits of transformers, on every grid, also of sampling masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.head import SamplingMask, TokenStatistics
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch
from rl_models.api.whole_batches import WholeBatches

ROWS = [[1, 5, 7, 2, 8, 3], [3, 4], [9, 9, 6, 9, 2], [1], [1, 5, 7, 30]]
TEMPERATURE, N = 0.7, 5


def batch_of(*, masked: bool) -> Batch:
    """The rows; with a mask each token was drawn from itself and three other ids."""
    batch = Batch.from_sequences(ROWS)
    if masked:
        kept = [
            [] if first else [token, 11, 12, 13]
            for token, first in zip(batch.tokens.tolist(), batch.first, strict=True)
        ]
        mask = SamplingMask.from_rows(kept)
        batch = Batch(batch.tokens, batch.lengths, batch.mask, sampling_mask=mask)
    return batch


def reference(path: Path, *, masked: bool) -> TokenStatistics:
    model, parts = AutoModelForCausalLM.from_pretrained(path).double().eval(), []
    first = (torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    for row in ROWS:
        tokens = torch.tensor(row)
        logits = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).detach()
        if masked:
            kept = torch.tensor([11, 12, 13]).expand(len(logits), 3)
            kept = torch.cat((kept, tokens[1:, None]), dim=1)
            logits = torch.full_like(logits, -math.inf).scatter(1, kept, logits.gather(1, kept))
        log_probs = logits.log_softmax(-1)
        ordered = log_probs.sort(dim=-1, descending=True, stable=True)
        values, ids = ordered.values[:, :N], ordered.indices[:, :N]
        parts.append((*first, torch.full((1, N), -1), torch.full((1, N), -math.inf)))
        parts.append(
            (
                log_probs.gather(1, tokens[1:, None])[:, 0],
                -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1),
                1 + (ordered.indices == tokens[1:, None]).int().argmax(dim=1),
                ids.masked_fill(values == -math.inf, -1),
                values,
            )
        )
    return TokenStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def on_grid(group: ProcessGroup | None, path: Path, dims: ParallelDims, **options: Any) -> list[TokenStatistics]:
    """The statistics without and with a sampling mask."""
    options |= {"dims": dims, "mesh": mesh_of(dims)} if group is not None else {}
    actor = WholeBatches(Actor.from_pretrained(path, device="cpu", max_tokens_per_micro_batch=8, **options))
    return [
        actor.token_statistics(batch_of(masked=masked), top_n=N, temperature=TEMPERATURE) for masked in (False, True)
    ]


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (ParallelDims(), {"share_prefixes": True}),
        (ParallelDims(tp=2), {}),
        (ParallelDims(cp=2), {}),
        (ParallelDims(pp=2), {}),
        pytest.param(ParallelDims(), {}, marks=pytest.mark.slow),
        pytest.param(ParallelDims(tp=4), {}, marks=pytest.mark.slow),
        pytest.param(ParallelDims(dp=2, tp=2), {}, marks=pytest.mark.slow),
        pytest.param(ParallelDims(cp=2, tp=2), {}, marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2, tp=2), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_sorted_logits(
    ranks: RankPool, tiny: Callable[..., Path], dims: ParallelDims, options: dict[str, Any]
) -> None:
    path, world = tiny("llama", num_key_value_heads=4), dims.world_size
    results = [on_grid(None, path, dims, **options)]
    if world > 1:
        results = ranks.run(on_grid, path, dims, world=world, timeout=60, **options)
    for masked in (False, True):
        for name, value in reference(path, masked=masked)._asdict().items():
            for actual in (getattr(of_rank[masked], name) for of_rank in results):
                value = value.to(actual.dtype)
                torch.testing.assert_close(actual, value, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_one_backbone_with_values_and_what_is_missing(tiny: Callable[..., Path]) -> None:
    path, batch = tiny("llama"), batch_of(masked=False)
    actor = ActorCritic.from_pretrained(path, device="cpu")
    statistics = actor.token_statistics(batch, top_n=2)
    torch.testing.assert_close(statistics.log_probs, actor.log_probs(batch).log_probs, rtol=0, atol=0)
    for top_n, message in ((0, "top_n=0 must be at least 1"), (62, r"top_n=62 must be in 1..61")):
        with pytest.raises(ValueError, match=message):
            actor.token_statistics(batch, top_n=top_n)
    for options in ({"backend": "transformers"}, {"tp_invariant": True}):
        other = Actor.from_pretrained(path, device="cpu", **options)
        with pytest.raises(ValueError, match="most likely tokens need backend='parallel' and tp_invariant=False"):
            other.token_statistics(batch)
