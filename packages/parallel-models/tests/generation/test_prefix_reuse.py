"""Models with linear attention draw what the whole model says, on every grid and from every checkpoint of states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import EngineOptions, GenerationOptions, Grid, MicroBatch, load_engine
from parallel_models.generation import Prompt, Responses, draw_responses, end_sessions
from parallel_models.training import ParallelEngine

NEW = 20
PROMPTS = [[1, 5, 7], [3], [9, 2, 14] * 25, [1, 5, 7], [8, 8]]


def load(path: Path, dims: ParallelDims = ParallelDims(), device: str = "cpu") -> ParallelEngine:  # noqa: B008
    mesh = dims.build_mesh(device, list(range(dims.world_size))) if dims.world_size > 1 else None
    return load_engine(str(path), "causal_lm", Grid.build(dims, device=device, mesh=mesh), EngineOptions())


def draw(engine: ParallelEngine, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> Responses:
    rows = [Prompt(torch.tensor(prompt, device=engine.grid.device)) for prompt in prompts]
    how = {"max_new_tokens": NEW, "n": 3, "stop_ids": [4, 5, 6], "max_sequences": 4, **options}
    return draw_responses(engine, rows, GenerationOptions(**how), 32)


def rows_of(drawn: Responses) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(drawn.tokens, drawn.lengths, strict=True)]


def assert_log_probs(engine: ParallelEngine, prompts: Sequence[Sequence[int]], drawn: Responses) -> None:
    """Compare the log-probs of draws with those of the whole model."""
    for number, row in enumerate(rows_of(drawn)):
        prompt = prompts[number * len(prompts) // len(drawn.lengths)]
        with torch.no_grad():
            (outputs,) = engine.forward([MicroBatch(PackedSequence.from_sequences([torch.tensor([*prompt, *row])]))])
        expected = outputs[0][len(prompt) - 1 : -1]
        torch.testing.assert_close(drawn.log_probs[number, : len(row)], expected, rtol=0, atol=1e-5)


def assert_equal(drawn: Responses, expected: Responses) -> None:
    count = len(expected.lengths)
    assert rows_of(drawn)[:count] == rows_of(expected)
    for row, other, length in zip(drawn.log_probs, expected.log_probs, expected.lengths, strict=False):
        torch.testing.assert_close(row[:length], other[:length], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"cache_gib": 4.2e-5}], ids=str)
def test_draws_have_the_log_probs_of_the_model(hybrid: Path, options: dict[str, Any]) -> None:
    """Responses wait for slots that others have left, stop at different tokens, and wait for blocks."""
    engine = load(hybrid)
    drawn = draw(engine, **options)
    assert {2, NEW} < {*drawn.lengths}, "some stop early, others never"
    assert_log_probs(engine, PROMPTS, drawn)
    assert_equal(draw(engine, max_sequences=16), drawn)


@pytest.mark.gpu
def test_graphs_on_a_gpu_draw_what_the_cpu_draws(hybrid: Path) -> None:
    engine = load(hybrid, device="cuda")
    drawn, expected = (draw(each, temperature=0.0) for each in (engine, load(hybrid)))
    assert rows_of(drawn) == rows_of(expected)
    for row, other, length in zip(drawn.log_probs.cpu(), expected.log_probs, expected.lengths, strict=True):
        torch.testing.assert_close(row[:length], other[:length], rtol=0, atol=1e-4)
    assert_equal(draw(engine, temperature=0.0, exact=True), drawn)
    turns, new = converse(engine, max_sequences=8)
    assert [sum(turn.computed) for turn in turns] == new


def draw_on_ranks(group: ProcessGroup, path: Path, dims: ParallelDims) -> list[Responses]:
    engine = load(path, dims)
    return [draw(engine, n=1, **options) for options in ({}, {"cache_gib": 4.2e-5})]


# In every run each grid has one model; a stage has linear attention alone, the other one attention alone.
GRIDS = [("granitemoehybrid", ParallelDims(tp=2)), ("qwen3_next", ParallelDims(pp=2))]
GRIDS += [("nemotron_h", ParallelDims(pp=2)), ("qwen3_next", ParallelDims(tp=2)), ("nemotron_h", ParallelDims(tp=2))]
GRIDS += [
    (model, dims)
    for model in ("qwen3_next", "granitemoehybrid", "nemotron_h")
    for dims in (ParallelDims(cp=2), ParallelDims(tp=2, pp=2), ParallelDims(cp=2, pp=2))
]


def on_grids(fast: int, *further: Any) -> pytest.MarkDecorator:
    """Parametrise a test over `GRIDS`, of which all but the first ones are slow."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in GRIDS[fast:]]
    return pytest.mark.parametrize(("hybrid", "dims"), [*further, *GRIDS[:fast], *slow], indirect=["hybrid"], ids=str)


@on_grids(2)
def test_grids_draw_what_one_rank_draws(ranks: RankPool, hybrid: Path, dims: ParallelDims) -> None:
    expected = draw(load(hybrid), n=1)
    for results in ranks.run(draw_on_ranks, hybrid, dims, world=dims.world_size):
        for drawn in results:
            assert_equal(drawn, expected)


def draw_with_experts(
    group: ProcessGroup, path: Path, dims: ParallelDims, experts: str
) -> tuple[list[list[int]], Responses]:
    """Return the prompts and draws of a rank; ranks have different numbers of responses."""
    engine = load(path, dims)
    prompts = PROMPTS[engine.grid.rank("dp") * 2 :]
    return prompts, draw(engine, prompts, experts=experts)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["exchange", "gather"])
@pytest.mark.parametrize("dims", [ParallelDims(dp=2, ep=2), ParallelDims(tp=2, ep=2)], ids=str)
def test_ranks_with_a_part_of_the_experts_draw_what_one_rank_draws(
    ranks: RankPool, dims: ParallelDims, experts: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
        **{"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 6, "full_attention_interval": 2},
    )
    model = transformers.Qwen3NextForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    one = load(tmp_path)
    for prompts, drawn in ranks.run(draw_with_experts, tmp_path, dims, experts, world=2):
        assert_log_probs(one, prompts, drawn)


ANSWER = [7, 8, 9] * 11


def converse(engine: ParallelEngine, **options: Any) -> tuple[list[Responses], list[int]]:
    """Return the draws of three turns of five conversations, and the tokens of each turn that are new."""
    prompts, draws, new = PROMPTS, list[Responses](), [sum(len(prompt) - 1 for prompt in PROMPTS) - 2]
    for turn in range(3):
        draws.append(draw(engine, prompts, **{"n": 1, "seed": turn, "keep_cache": True, "max_length": 300, **options}))
        # The last token of a response has not been through the model.
        new.append(len(prompts) * len(ANSWER))
        prompts = [[*prompt, *row, *ANSWER] for prompt, row in zip(prompts, rows_of(draws[-1]), strict=False)]
    end_sessions()
    return draws, new[:3]


def converse_on_ranks(group: ProcessGroup | None, path: Path, dims: ParallelDims) -> list[list[Responses]]:
    engine = load(path, dims)
    # Room for four of five conversations, and so few blocks that checkpoints give theirs back.
    return [converse(engine, cache_gib=gib)[0] for gib in (None, 7e-5)]


@on_grids(0, ("nemotron_h", ParallelDims()), ("qwen3_next", ParallelDims()))
def test_turns_go_on_from_checkpoints_as_if_they_were_computed_anew(
    ranks: RankPool, hybrid: Path, dims: ParallelDims
) -> None:
    expected, _ = converse(load(hybrid), keep_cache=False)
    alone = dims.world_size == 1
    results = (
        [converse_on_ranks(None, hybrid, dims)]
        if alone
        else ranks.run(converse_on_ranks, hybrid, dims, world=dims.world_size)
    )
    for of_memory in results:
        computed = []
        for turns in of_memory:
            for drawn, anew in zip(turns, expected, strict=True):
                assert_equal(drawn, anew)
            computed.append(sum(turns[-1].computed))
        assert computed[0] <= computed[1] <= sum(expected[-1].computed)
        assert computed[0] < sum(expected[-1].computed) / 2 or dims.cp > 1
        assert not alone or computed[0] < computed[1]


def test_turns_compute_what_is_new_alone(hybrid: Path) -> None:
    draws, new = converse(load(hybrid), max_sequences=8)
    assert [sum(drawn.computed) for drawn in draws] == new


def test_responses_that_wait_go_on_from_the_prompt(hybrid: Path) -> None:
    """Three slots for five responses to each prompt; the last prompt has a cached beginning."""
    prompts = [PROMPTS[2], [*PROMPTS[2][:-1], 3, 4]]
    drawn = draw(load(hybrid), prompts, n=5, max_sequences=3)
    assert drawn.computed == [len(prompts[0]) - 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
