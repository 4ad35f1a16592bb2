"""Generation of mixtures of experts and of latent attention: the log-probs of the draws are those of `log_probs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch

# DeepSeek-V3 with a dense first layer: latents are the cache's keys and values.
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 256,
}  # fmt: skip


def generate(group: ProcessGroup, path: Path, dims: ParallelDims) -> Batch:
    """Return draws with the log-probs that scoring gives them; dp ranks have unlike numbers of prompts."""
    mesh = mesh_of(dims)
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu")
    prompts = [[1, 5, 7], [3], [9, 9, 9, 9, 2]][: 1 + 2 * actor.grid.rank("dp")]
    batch = actor.generate(prompts, max_new_tokens=20, n=2, seed=3, stop_ids=[4, 8], max_sequences=4)
    return batch.with_fields(computed=actor.log_probs(batch).log_probs)


@pytest.mark.parametrize(
    ("model", "dims"),
    [
        pytest.param("mixture", ParallelDims(tp=2), marks=pytest.mark.slow),
        ("mixture", ParallelDims(dp=2, ep=2)),
        ("mixture", ParallelDims(tp=2, ep=2)),
        *(
            pytest.param("mixture", dims, marks=pytest.mark.slow)
            for dims in (
                ParallelDims(cp=2, ep=2),
                ParallelDims(tp=4, ep=2),
                ParallelDims(dp=2, tp=2, ep=2),
                ParallelDims(dp=2, tp=2, ep=4),
                ParallelDims(dp=2, pp=2, ep=2),
                ParallelDims(pp=2, tp=2),
            )
        ),
        pytest.param("latent", ParallelDims(tp=2), marks=pytest.mark.slow),
        ("latent", ParallelDims(pp=2)),
    ],
    ids=str,
)
def test_draws_have_the_log_probs_of_scoring(
    ranks: RankPool, tiny: Callable[..., Path], model: str, dims: ParallelDims
) -> None:
    path = tiny("mixture") if model == "mixture" else tiny("deepseek", **LATENT)
    for batch in ranks.run(generate, path, dims, world=dims.world_size):
        assert len(batch) > 0
        expected = torch.where(batch.mask, batch["computed"], 0)
        torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("max_sequences", "seed"),
    [(7, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(7, 1), (32, 0), (32, 1)])],
)
def test_responses_of_several_blocks_that_stop_anywhere(
    tiny: Callable[..., Path], max_sequences: int, seed: int
) -> None:
    """Places are refilled and brought together, with blocks that are reserved and not yet written."""
    actor = Actor.from_pretrained(tiny("llama", max_position_embeddings=256), device="cpu")
    prompts = [[1 + (3 * place + number) % 60 for place in range(1 + 12 * number)] for number in range(8)]
    options = {"n": 4, "seed": seed, "stop_ids": [4, 8], "max_sequences": max_sequences}
    batch = actor.generate(prompts, max_new_tokens=100, **options)
    assert max(batch.lengths) > 128
    expected = torch.where(batch.mask, actor.log_probs(batch).log_probs, 0)
    torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
