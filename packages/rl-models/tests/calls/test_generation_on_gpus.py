"""Generation on GPUs, by CUDA graphs where possible: greedy tokens as on a CPU, log-probs as `log_probs` has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DeviceMesh, ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch
from rl_models.calls import PROMPT_TOKENS_COMPUTED

PROMPTS = [[1 + (3 * place + number) % 60 for place in range(1 + 5 * number)] for number in range(6)]
CASES: list[dict[str, Any]] = [
    {"max_new_tokens": 40, "temperature": 0.0},
    {"max_new_tokens": 40, "n": 3, "temperature": 0.8, "seed": 3, "stop_ids": [4, 8, *range(1000, 1300)]},
    {"max_new_tokens": 40, "n": 2, "top_k": 9, "top_p": 0.9, "max_sequences": 8},
]
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "mixture": HEADS,
    "deepseek": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


@cache
def mesh_of(dims: ParallelDims) -> DeviceMesh | None:
    """The mesh of a grid, formed once by each rank."""
    return dims.build_mesh("cuda") if dims.world_size > 1 else None


def generate(
    group: ProcessGroup | None, path: Path, dims: ParallelDims, device: str, dtype: torch.dtype, exact: bool
) -> list[Batch]:
    """Return what an actor draws in each case, on the CPU, with the log-probs that training computes."""
    mesh = mesh_of(dims) if device == "cuda" else None
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh, device=device, dtype=dtype)
    first = 0 if mesh is None else actor.grid.rank("dp")
    prompts = PROMPTS[first :: dims.dp]
    batches = []
    for options in CASES:
        batch = actor.generate(prompts, exact=exact, **options)
        computed = actor.log_probs(batch, temperature=options.get("temperature") or 1.0).log_probs
        batches.append(batch.with_fields(computed=computed).to("cpu"))
    return batches


def check(found: list[Batch], greedy: Batch) -> None:
    """Compare greedy tokens, and the sampler's log-probs with those of training."""
    assert [row.tolist() for row in found[0].split()] == [row.tolist() for row in greedy.split()]
    for batch in found:
        drawn = torch.where(batch.mask, batch["computed"], 0)
        torch.testing.assert_close(batch["log_probs"], drawn, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_one_gpu(tiny: Callable[..., Path], model: str) -> None:
    path = tiny(model, **MODELS[model])
    greedy = generate(None, path, ParallelDims(), "cpu", torch.float32, exact=True)[0]
    for exact in (False, True):
        check(generate(None, path, ParallelDims(), "cuda", torch.float32, exact), greedy)
    for batch in generate(None, path, ParallelDims(), "cuda", torch.bfloat16, exact=False):
        apart = (batch["log_probs"] - batch["computed"])[batch.mask].abs()
        assert apart.mean() < 0.05, apart.max()


def converse(group: ProcessGroup | None, path: Path, dims: ParallelDims, dtype: torch.dtype) -> None:
    """Draw three turns that share graphs and blocks, and compare their log-probs with those of training."""
    actor = Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cuda", dtype=dtype)
    prompts = [prompt * 9 for prompt in PROMPTS[1:]] * 6
    how: dict[str, Any] = {"max_length": 700, "stop_ids": range(1, 4), "keep_cache": True}
    turns, graphs = list[Batch](), dict[Any, Any]()
    for seed in range(3):
        turns.append(actor.generate(prompts, max_new_tokens=70, seed=seed, **how))
        assert actor.engine.session is not None
        captured = {part: graph for part, graph in actor.engine.session._graphs.items() if graph is not None}
        assert captured
        assert captured.items() >= graphs.items()
        graphs = captured
        prompts = [row.tolist() + [9] * 20 for row in turns[-1].split()]
    for turn in turns[1:]:
        assert turn[PROMPT_TOKENS_COMPUTED].sum() < 64 * len(turn) + 20 * len(turn)
    for turn in turns:
        apart = (turn["log_probs"] - actor.log_probs(turn).log_probs)[turn.mask].abs()
        assert (apart.max() if dtype == torch.float32 else 2e-3 * apart.mean()) < 1e-4, apart.max()


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_graphs_and_blocks_serve_later_calls(tiny: Callable[..., Path], model: str) -> None:
    """Later turns replay the graphs of the first one, at all sizes, over blocks of earlier turns.

    Experts have no grouped GEMM in fp32, and without it no graphs.
    """
    dtype = torch.float32 if model == "llama" else torch.bfloat16
    converse(None, tiny(model, **MODELS[model]), ParallelDims(), dtype)


@pytest.mark.gpu(2)
def test_stages_replay_graphs(nccl_ranks: RankPool, tiny: Callable[..., Path]) -> None:
    nccl_ranks.run(converse, tiny("llama", **MODELS["llama"]), ParallelDims(pp=2), torch.float32)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("model", "dims"),
    [
        ("llama", ParallelDims(tp=2)),
        ("llama", ParallelDims(dp=2)),
        ("llama", ParallelDims(cp=2)),
        ("llama", ParallelDims(pp=2)),
        ("mixture", ParallelDims(pp=2)),
        ("mixture", ParallelDims(tp=2)),
        ("mixture", ParallelDims(dp=2, ep=2)),
        ("deepseek", ParallelDims(tp=2)),
    ],
    ids=str,
)
def test_two_gpus(nccl_ranks: RankPool, tiny: Callable[..., Path], model: str, dims: ParallelDims) -> None:
    path = tiny(model, **MODELS[model])
    greedy = generate(None, path, ParallelDims(), "cpu", torch.float32, exact=True)[0]
    for exact in (False, True):
        for rank, batches in enumerate(nccl_ranks.run(generate, path, dims, "cuda", torch.float32, exact)):
            check(batches, greedy.select(range(rank, len(PROMPTS), 2)) if dims.dp == 2 else greedy)
