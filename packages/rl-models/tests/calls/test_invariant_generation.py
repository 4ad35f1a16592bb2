"""`tp_invariant`: log-probs of drawn tokens are the bits of `log_probs`, on every grid and whatever is drawn beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch
from rl_models.api.whole_batches import WholeBatches

PROMPTS = [[1, 5, 7], [3], [9, 9, 9, 9, 2], [2, 4, 6, 8, 10, 12, 14]]
TEMPERATURE = 0.7
SAMPLING: dict[str, Any] = {"max_new_tokens": 7, "temperature": TEMPERATURE, "n": 2, "seed": 5, "stop_ids": [4, 8]}
INVARIANT: dict[str, Any] = {"tp_invariant": True, "device": "cpu"}
# Further fields of the configs of `tiny`.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mixture": {},
    "gpt-oss": {},
    "deepseek": {
        "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
}  # fmt: skip


def folder(tiny: Callable[..., Path], name: str) -> Path:
    return tiny(name, initializer_range=0.3, **CHANGES[name])


def trained(actor: Actor | WholeBatches, batch: Batch) -> Tensor:
    """Return the log-probs of the drawn tokens that training computes."""
    return actor.log_probs(batch, temperature=TEMPERATURE).log_probs[batch.mask]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) == ("gpt-oss", torch.bfloat16) else pytest.mark.slow)
        for name in CHANGES
        for dtype in (torch.bfloat16, torch.float32)
    ],
    ids=str,
)
def test_draws_have_the_bits_of_log_probs(tiny: Callable[..., Path], name: str, dtype: torch.dtype) -> None:
    actor = Actor.from_pretrained(folder(tiny, name), dtype=dtype, **INVARIANT)
    batch = actor.generate(PROMPTS, **SAMPLING)
    assert batch.mask.sum() > 20
    assert torch.equal(batch["log_probs"][batch.mask], trained(actor, batch))
    few = actor.generate(PROMPTS, **SAMPLING, max_sequences=2)
    assert torch.equal(few.tokens, batch.tokens)
    assert torch.equal(few["log_probs"], batch["log_probs"])


# Sizes that the kernels of a GPU take.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.1}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHANGES)
def test_draws_by_cuda_graphs_have_the_bits_of_log_probs(tiny: Callable[..., Path], name: str) -> None:
    sizes = {"mixture": {"moe_intermediate_size": 128}, "deepseek": {"moe_intermediate_size": 128, **LATENT}}
    path = tiny(name, **{**CHANGES[name], **WIDE, **sizes.get(name, {})})
    actor = Actor.from_pretrained(path, dtype=torch.bfloat16, tp_invariant=True, device="cuda")
    how = {**SAMPLING, "max_new_tokens": 70, "stop_ids": [], "top_p": 0.9, "keep_sampling_mask": True}
    batch = actor.generate(PROMPTS, **how)
    assert torch.equal(batch["log_probs"][batch.mask], trained(actor, batch))
    few = actor.generate(PROMPTS, **how, max_sequences=3)
    assert torch.equal(few["log_probs"], batch["log_probs"])


def score_and_draw(
    group: ProcessGroup, path: Path, dims: ParallelDims, options: dict[str, Any], batch: Batch
) -> tuple[Tensor, Batch]:
    """Return the log-probs of the batch on a grid, in small micro-batches, and draws with masks and routes."""
    actor = WholeBatches(Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), **INVARIANT, **options))
    draws = actor.generate(PROMPTS, top_p=0.9, keep_sampling_mask=True, **SAMPLING)
    if actor.engine.routed_layers:
        draws = draws.with_fields(routing=actor.predict(draws, record_routing=True)["routing"])
    return trained(actor, batch), draws


TP2, EP2 = ParallelDims(tp=2), ParallelDims(dp=2, ep=2)
GRIDS = [
    ("mixture", TP2),
    ("mixture", EP2),
    ("mixture", ParallelDims(dp=2, tp=2, ep=2)),
    ("mixture", ParallelDims(tp=4)),
    ("mixture", ParallelDims(tp=2, ep=2)),
    ("mixture", ParallelDims(pp=2)),
    ("gpt-oss", TP2),
    ("gpt-oss", EP2),
    ("gpt-oss", ParallelDims(tp=4)),
    ("deepseek", TP2),
    ("deepseek", EP2),
    ("deepseek", ParallelDims(tp=4)),
    ("deepseek", ParallelDims(dp=2, tp=2, ep=2)),
    ("llama", TP2),
    ("llama", ParallelDims(cp=2)),
]


@pytest.mark.parametrize(
    ("name", "dims"),
    [pytest.param(*case, marks=[] if case in GRIDS[:1] else pytest.mark.slow) for case in GRIDS],
    ids=str,
)
def test_every_grid_draws_and_scores_the_same_bits(
    ranks: RankPool, tiny: Callable[..., Path], name: str, dims: ParallelDims
) -> None:
    path = folder(tiny, name)
    for dtype in (torch.bfloat16, torch.float32):
        actor = Actor.from_pretrained(path, dtype=dtype, **INVARIANT)
        batch = actor.generate(PROMPTS, **SAMPLING)
        options = {"dtype": dtype, "max_tokens_per_micro_batch": 24}
        for scores, draws in ranks.run(score_and_draw, path, dims, options, batch, world=dims.world_size):
            assert torch.equal(scores, batch["log_probs"][batch.mask])
            assert torch.equal(draws["log_probs"][draws.mask], trained(actor, draws))


def draw_with_mask(group: ProcessGroup, path: Path, dims: ParallelDims) -> None:
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), **INVARIANT)
    actor.generate([[1, 5], [3]], max_new_tokens=1, top_k=3, keep_sampling_mask=True)


@pytest.mark.parametrize("dims", [ParallelDims(pp=2), pytest.param(TP2, marks=pytest.mark.slow)], ids=str)
def test_a_diverged_head_is_named_though_masks_lack_the_tokens(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path, dims: ParallelDims
) -> None:
    """A row with a single NaN keeps other tokens, and its own token is arbitrary."""
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model.get_output_embeddings().weight.data[7] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"NaN or infinite logits after 0 tokens .* \[\(0, 0\), \(1, 0\)\]"):
        ranks.run(draw_with_mask, tmp_path, dims, world=2, timeout=20)
