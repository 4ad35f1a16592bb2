"""Sampling masks: the kept tokens are those of transformers' logits, and log-probs are normalised over them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.head import SamplingMask
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, LossInputs, OptimizerOptions
from rl_models.api.whole_batches import WholeBatches
from rl_models.losses import LossTerms

PROMPTS = [[1, 5, 7], [3], [9, 9, 9, 9, 2]]
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_k": 7, "top_p": 0.9, "n": 2, "seed": 5, "stop_ids": [4, 8]}
TEMPERATURE = SAMPLING["temperature"]


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.batch.tokens % 3) * inputs.log_probs + 0.1 * inputs.entropy)


def draw(group: ProcessGroup, path: Path, dims: ParallelDims, backend: str) -> tuple[Batch, dict[str, Any]]:
    """Draw responses, score them on micro-batches of a few tokens, and learn from them once."""
    options: dict[str, Any] = {"optimizer": OptimizerOptions(max_grad_norm=1e9), "max_tokens_per_micro_batch": 24}
    mesh = mesh_of(dims)
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        return drawn(
            WholeBatches(Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu", **options))
        )


def drawn(actor: WholeBatches) -> tuple[Batch, dict[str, Any]]:
    batch = actor.generate(PROMPTS, max_new_tokens=9, keep_sampling_mask=True, **SAMPLING)
    plain = actor.generate(PROMPTS, max_new_tokens=9, **SAMPLING)
    found = actor.log_probs(batch, temperature=TEMPERATURE)
    metrics = actor.update(batch, loss, temperature=TEMPERATURE)
    return batch.with_fields(computed=found.log_probs, entropy=found.entropy), {"plain": plain, **metrics}


def kept_by_transformers(path: Path, tokens: Tensor) -> list[Tensor]:
    """The log-probs of each token's choices, -inf for those that the truncation drops, in fp32."""
    logits = AutoModelForCausalLM.from_pretrained(path).eval()(tokens[None]).logits[0].detach() / TEMPERATURE
    rows = []
    for row in logits[:-1]:
        order = row.argsort(descending=True)[: SAMPLING["top_k"]]
        probability = row[order].softmax(0)
        order = order[probability.cumsum(0) - probability < SAMPLING["top_p"]]
        rows.append(torch.full_like(row, -torch.inf).scatter(0, order, row[order].log_softmax(0)))
    return rows


PLACES: list[tuple[str, ParallelDims]] = [
    ("parallel", ParallelDims(tp=2)),
    ("megatron", ParallelDims(tp=2)),
]
MORE_PLACES: list[tuple[str, ParallelDims]] = [
    ("transformers", ParallelDims(cp=2)),
    ("parallel", ParallelDims()),
    ("parallel", ParallelDims(pp=2)),
    ("parallel", ParallelDims(tp=2, cp=2)),
    ("parallel", ParallelDims(dp=2)),
    ("transformers", ParallelDims(dp=2)),
    ("megatron", ParallelDims(cp=2)),
    ("megatron", ParallelDims(pp=2)),
]


@pytest.mark.parametrize(
    ("backend", "dims"),
    [*PLACES, *(pytest.param(*place, marks=pytest.mark.slow) for place in MORE_PLACES)],
    ids=str,
)
def test_masks_are_those_of_transformers(
    ranks: RankPool, tiny: Callable[..., Path], backend: str, dims: ParallelDims
) -> None:
    path = tiny("llama", initializer_range=0.3)
    found = ranks.run(draw, path, dims, backend, world=dims.world_size)
    (batch, metrics), *_ = found
    assert len({metrics["loss"] for _, metrics in found}) == 1
    assert torch.equal(batch.tokens, metrics["plain"].tokens), "asking for the mask changes no draw"
    smaller = 0
    # The field follows its sequences.
    order = [5, 0, 3]
    chosen = Batch.concatenate([batch.select(order), batch]).select(range(3))
    names = ("log_probs", "computed", "entropy")
    assert chosen.sampling_mask is not None
    rows = (mask.tolist() for mask in chosen.sampling_mask.split(chosen.lengths))
    for number, tokens, ids, *fields in zip(order, chosen.split(), rows, *map(chosen.split, names), strict=True):
        assert torch.equal(tokens, batch.split()[number])
        prompt = len(PROMPTS[number // 2])
        assert not any(ids[:prompt])
        assert not torch.stack([field[:prompt] for field in fields]).any()
        expected = kept_by_transformers(path, tokens)
        for place in range(prompt, len(tokens)):
            numbers = [field[place] for field in fields]
            row = expected[place - 1]
            kept = torch.nonzero(row > -torch.inf).flatten()
            assert ids[place] == kept.tolist()
            smaller += len(kept) < SAMPLING["top_k"]
            truth = [row[tokens[place]]] * 2 + [-(row[kept].exp() * row[kept]).sum()]
            torch.testing.assert_close(torch.stack(numbers), torch.stack(truth), rtol=0, atol=1e-5)
    assert smaller > 5, "top-p has an effect"


@pytest.mark.slow
def test_all_grids_and_backends_learn_alike(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", initializer_range=0.3)
    places = [*PLACES, ("parallel", ParallelDims(pp=2)), ("parallel", ParallelDims(tp=2, cp=2))]
    first, *others = [ranks.run(draw, path, dims, backend, world=dims.world_size)[0][1] for backend, dims in places]
    for other in others:
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(first[name], rel=1e-4)


def test_mistakes_are_refused(tiny: Callable[..., Path]) -> None:
    actor = Actor.from_pretrained(tiny("llama"), device="cpu")
    for options in ({}, {"top_k": 3, "temperature": 0.0}):
        with pytest.raises(
            ValueError, match="keep_sampling_mask needs top_k, top_p or min_p, log_probs, and a temperature"
        ):
            actor.generate(PROMPTS, max_new_tokens=2, keep_sampling_mask=True, **options)
    for rows, message in (
        ([[], [5, 9], [7, 61]], r"lacks the labels of 0 rows, and has 1 ids outside 0\.\.60, such as row 2"),
        ([[], [5, 9], [8]], "lacks the labels of 1 rows, .* row 2 with label 7"),
        ([[], [5, 9], []], "lacks 1 tokens of the batch's mask"),
    ):
        batch = Batch.from_sequences([[1, 5, 7]], sampling_mask=SamplingMask.from_rows(rows))
        with pytest.raises(ValueError, match=message):
            actor.log_probs(batch)
    with pytest.raises(ValueError, match="sampling_mask must have 3 rows, one for each token, not 2"):
        Batch.from_sequences([[1, 5, 7]], sampling_mask=SamplingMask.from_rows([[5], [7]]))


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_ratios_of_truncated_draws(tiny: Callable[..., Path], truncation: dict[str, Any]) -> None:
    """In fp32 the log-probs of training are those of the draw, within fp32's bound; the rows differ in length."""
    actor = Actor.from_pretrained(tiny("llama", initializer_range=0.3), device="cpu")
    batch = actor.generate(
        PROMPTS, max_new_tokens=6, keep_sampling_mask=True, exact=True, temperature=0.8, **truncation
    )
    assert batch.sampling_mask is not None
    counts = batch.sampling_mask.counts[batch.mask]
    assert counts.unique().numel() > 2
    found = actor.log_probs(batch, temperature=0.8)
    torch.testing.assert_close(found.log_probs, batch["log_probs"], rtol=0, atol=1e-5)
    assert (found.entropy[batch.mask] <= counts.log() + 1e-5).all()


def test_ratios_of_a_mixture_with_replay(tiny: Callable[..., Path]) -> None:
    """Experts that another precision chose are replayed, over the tokens that it kept: the rest is rounding."""
    path = tiny("mixture", initializer_range=0.3)
    sampler = Actor.from_pretrained(path, device="cpu", dtype=torch.bfloat16)
    batch = sampler.generate(PROMPTS, max_new_tokens=6, keep_sampling_mask=True, temperature=0.8, top_p=0.9)
    batch = batch.with_fields(routing=sampler.predict(batch, record_routing=True)["routing"])
    actor = Actor.from_pretrained(path, device="cpu", max_tokens_per_micro_batch=24)
    old = actor.log_probs(batch, temperature=0.8).log_probs
    parts = [actor.log_probs(batch.select([n]), temperature=0.8).log_probs for n in range(len(batch))]
    torch.testing.assert_close(torch.cat(parts), old, rtol=0, atol=1e-5)
    difference = (old - batch["log_probs"])[batch.mask].abs().max()
    whole = actor.log_probs(replace(batch, sampling_mask=None), temperature=0.8).log_probs
    assert difference < 0.1 < (whole - batch["log_probs"])[batch.mask].abs().max()


def invariant_log_probs(group: ProcessGroup, path: Path, dims: ParallelDims, batch: Batch) -> Tensor:
    options: dict[str, Any] = {"tp_invariant": True, "dtype": torch.bfloat16, "max_tokens_per_micro_batch": 24}
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu", **options)
    return WholeBatches(actor).log_probs(batch, temperature=TEMPERATURE).log_probs


def test_invariant_ratios_are_one(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    """In bf16 the log-probs have the same bits at tp 1 and 2, and in other micro-batches: all ratios are exactly 1."""
    path = tiny("llama", initializer_range=0.3)
    actor = Actor.from_pretrained(path, device="cpu", tp_invariant=True, dtype=torch.bfloat16)
    batch = actor.generate(PROMPTS, max_new_tokens=6, keep_sampling_mask=True, **SAMPLING)
    old = actor.log_probs(batch, temperature=TEMPERATURE).log_probs
    for new in ranks.run(invariant_log_probs, path, ParallelDims(tp=2), batch, world=2):
        assert torch.equal(new, old)


def test_a_shared_backbone_has_log_probs_within_the_mask(tiny: Callable[..., Path]) -> None:
    actor = ActorCritic.from_pretrained(tiny("llama", initializer_range=0.3), device="cpu")
    batch = actor.generate(PROMPTS, max_new_tokens=5, keep_sampling_mask=True, **SAMPLING)
    found = actor.predict(batch, temperature=TEMPERATURE)
    torch.testing.assert_close(found["log_probs"], batch["log_probs"], rtol=0, atol=1e-5)
