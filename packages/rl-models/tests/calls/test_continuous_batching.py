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
from rl_models import Actor, Batch, Critic
from rl_models.calls import PROMPT_TOKENS_COMPUTED
from rl_models.losses import LossTerms

# DeepSeek-V3 with a dense first layer: latents are the cache's keys and values.
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 256,
}  # fmt: skip


BLOCK = 64
# Two turns of conversations: prompts of several blocks, and answers.
PROMPTS = [[1 + (3 * place + number) % 60 for place in range(BLOCK * (1 + number) + 7)] for number in range(4)]
ANSWER = list(range(9, 60))


def converse(group: ProcessGroup | None, path: Path, dims: ParallelDims) -> tuple[list[Batch], Batch]:
    """Return two turns with kept keys and values, and the second without; each with the log-probs of scoring."""
    mesh = mesh_of(dims) if dims.world_size > 1 else None
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu")
    prompts = PROMPTS[actor.grid.rank("dp") :: dims.dp]
    how = {"max_new_tokens": 12, "max_length": 512, "stop_ids": [4], "seed": 1}
    first = actor.generate(prompts, keep_cache=True, **how)
    second = [row.tolist() + ANSWER for row in first.split()]
    turns = [first, actor.generate(second, keep_cache=True, **how)]
    turns = [turn.with_fields(computed=actor.log_probs(turn).log_probs) for turn in turns]
    return turns, actor.generate(second, **how)


@pytest.mark.parametrize(
    ("model", "dims"),
    [
        ("latent", ParallelDims()),
        *(pytest.param(name, ParallelDims(), marks=pytest.mark.slow) for name in ("qwen2", "gpt-oss", "gemma4-e2b")),
        ("mixture", ParallelDims(dp=2, ep=2)),
        *(
            pytest.param("mixture", dims, marks=pytest.mark.slow)
            for dims in (ParallelDims(tp=2, ep=2), ParallelDims(cp=2, ep=2), ParallelDims(dp=2, pp=2, ep=2))
        ),
        *(
            pytest.param(name, ParallelDims(pp=2), marks=pytest.mark.slow)
            for name in ("latent", "gpt-oss", "gemma4-e2b")
        ),
    ],
    ids=str,
)
def test_a_second_turn_computes_what_is_new_and_draws_the_same(
    ranks: RankPool, tiny: Callable[..., Path], model: str, dims: ParallelDims
) -> None:
    """Windows, sinks, shared keys, latents and experts; ranks that share experts have conversations of their own."""
    sizes = {**LATENT, "max_position_embeddings": 512}
    path = tiny("deepseek", **sizes) if model == "latent" else tiny(model, max_position_embeddings=512)
    alone = dims.world_size == 1
    results = [converse(None, path, dims)] if alone else ranks.run(converse, path, dims, world=dims.world_size)
    for (first, second), anew in results:
        assert torch.equal(second.tokens, anew.tokens)
        for batch in (first, second):
            expected = torch.where(batch.mask, batch["computed"], 0)
            torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
        computed = second[PROMPT_TOKENS_COMPUTED]
        assert (computed[computed > 0] < BLOCK + len(ANSWER) + 1).all()
        assert computed.sum() < second.num_tokens / 2
        assert PROMPT_TOKENS_COMPUTED not in anew.fields


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_calls_between_two_draws_end_what_is_kept(tiny: Callable[..., Path], backend: str) -> None:
    """A session ends before the memory is needed, also by another model of the process; other backends keep nothing."""
    path = tiny("llama", max_position_embeddings=512)
    actor, critic = (kind.from_pretrained(path, backend=backend, device="cpu") for kind in (Actor, Critic))
    batch = Batch.from_sequences(PROMPTS[:1])
    calls: list[Callable[[], Any]] = [
        lambda: actor.log_probs(batch), lambda: critic.values(batch),
        lambda: actor.update(batch, lambda inputs: LossTerms(-inputs.log_probs)),
        lambda: list(actor.stream_weights()), lambda: actor.generate([[1]], max_new_tokens=1),
    ]  # fmt: skip
    for call in calls:
        for _ in range(2):
            drawn = actor.generate(PROMPTS[:1], max_new_tokens=3, keep_cache=True)
            assert (actor.engine.session is not None) is (backend == "parallel")
        assert drawn[PROMPT_TOKENS_COMPUTED].sum() == (6 if backend == "parallel" else len(PROMPTS[0]) - 1)
        call()
        assert actor.engine.session is None


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
