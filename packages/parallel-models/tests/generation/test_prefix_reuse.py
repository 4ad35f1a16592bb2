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
from parallel_layers.module import rank_seed
from parallel_layers.testing import RankPool
from parallel_models import EngineOptions, GenerationOptions, Grid, MicroBatch, PipelineOptions, load_engine
from parallel_models.generation import Prompt, Responses, ResponseStream, draw_responses, end_sessions
from parallel_models.generation.decoding import CacheCounts, CacheOptions
from parallel_models.generation.prefix_reuse import Checkpoints
from parallel_models.training import ParallelEngine

NEW = 20
PROMPTS = [[1, 5, 7], [3], [9, 2, 14] * 25, [1, 5, 7], [8, 8]]


ONE_RANK = ParallelDims()


def load(path: Path, dims: ParallelDims = ONE_RANK, virtual_stages: int = 1, device: str = "cpu") -> ParallelEngine:
    mesh = dims.build_mesh(device, list(range(dims.world_size))) if dims.world_size > 1 else None
    options = EngineOptions(pipeline=PipelineOptions(virtual_stages=virtual_stages))
    return load_engine(str(path), "causal_lm", Grid.build(dims, device=device, mesh=mesh), options)


def draw(engine: ParallelEngine, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> Responses:
    rows = [Prompt(torch.tensor(prompt, device=engine.grid.device)) for prompt in prompts]
    how = {"max_new_tokens": NEW, "n": 3, "stop_ids": [4, 5, 6], "max_sequences": 4, **options}
    # By the seed of the first data-parallel rank on all of them.
    device = engine.grid.device
    generator = torch.Generator(device).manual_seed(rank_seed(how.get("seed", 0), 0))
    uniforms = torch.rand(len(rows), how["n"], NEW, generator=generator, device=device)
    return draw_responses(engine, rows, GenerationOptions(**how), 32, uniforms)


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


# In every run each model draws, and each option has one model.
DRAWS = [
    ("qwen3_next", {}),
    ("nemotron_h", {}),
    ("granitemoehybrid", {"exact": True}),
    ("qwen3_next", {"cache_gib": 4.2e-5}),
]
DRAWS += [("nemotron_h", {"exact": True}), ("nemotron_h", {"cache_gib": 4.2e-5}), ("qwen3_next", {"exact": True})]
DRAWS += [("granitemoehybrid", {}), ("granitemoehybrid", {"cache_gib": 4.2e-5}), ("kimi_linear", {})]


@pytest.mark.parametrize(
    ("hybrid", "options"),
    [*DRAWS[:4], *(pytest.param(*case, marks=pytest.mark.slow) for case in DRAWS[4:])],
    indirect=["hybrid"],
    ids=str,
)
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


# In every run one grid; a stage has linear attention alone, the other one attention alone.
GRIDS = [("qwen3_next", ParallelDims(pp=2)), ("granitemoehybrid", ParallelDims(tp=2))]
GRIDS += [("nemotron_h", ParallelDims(pp=2)), ("qwen3_next", ParallelDims(tp=2)), ("nemotron_h", ParallelDims(tp=2))]
GRIDS += [("kimi_linear", ParallelDims(pp=2)), ("kimi_linear", ParallelDims(tp=2))]
GRIDS += [
    (model, dims)
    for model in ("qwen3_next", "granitemoehybrid", "nemotron_h", "kimi_linear")
    for dims in (ParallelDims(cp=2), ParallelDims(tp=2, pp=2), ParallelDims(cp=2, pp=2))
]


def on_grids(fast: int, *further: Any) -> pytest.MarkDecorator:
    """Parametrise a test over `GRIDS`, of which all but the first ones are slow."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in GRIDS[fast:]]
    return pytest.mark.parametrize(("hybrid", "dims"), [*further, *GRIDS[:fast], *slow], indirect=["hybrid"], ids=str)


@on_grids(1, pytest.param("nemotron_h", ParallelDims(dp=2, pp=2), marks=pytest.mark.slow))
def test_grids_draw_what_one_rank_draws(ranks: RankPool, hybrid: Path, dims: ParallelDims) -> None:
    expected = draw(load(hybrid), n=1)
    for results in ranks.run(draw_on_ranks, hybrid, dims, world=dims.world_size):
        for drawn in results:
            assert_equal(drawn, expected)


def draw_on_virtual_stages(group: ProcessGroup, path: Path) -> Responses:
    return draw(load(path, ParallelDims(pp=2), virtual_stages=2), n=2)


@pytest.mark.parametrize("hybrid", ["deep"], indirect=True)
def test_virtual_stages_draw_what_one_rank_draws(ranks: RankPool, hybrid: Path) -> None:
    """Responses wait for slots, and go on from the states of their prompt in every chunk."""
    expected = draw(load(hybrid), n=2)
    for drawn in ranks.run(draw_on_virtual_stages, hybrid, world=2):
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


@on_grids(0, pytest.param("nemotron_h", ParallelDims(), marks=pytest.mark.slow), ("qwen3_next", ParallelDims()))
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


# Granite's and Nemotron-H's states are of one kind.
ONE_OF_EACH_KIND = pytest.mark.parametrize(
    "hybrid", ["qwen3_next", "nemotron_h", pytest.param("granitemoehybrid", marks=pytest.mark.slow)], indirect=True
)


@ONE_OF_EACH_KIND
def test_turns_compute_what_is_new_alone(hybrid: Path) -> None:
    draws, new = converse(load(hybrid), max_sequences=8)
    assert [sum(drawn.computed) for drawn in draws] == new


@ONE_OF_EACH_KIND
def test_responses_that_wait_go_on_from_the_prompt(hybrid: Path) -> None:
    """Three slots for five responses to each prompt; the last prompt has a cached beginning."""
    prompts = [PROMPTS[2], [*PROMPTS[2][:-1], 3, 4]]
    drawn = draw(load(hybrid), prompts, n=5, max_sequences=3)
    assert drawn.computed == [len(prompts[0]) - 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("few", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("hybrid", ["nemotron_h"], indirect=True)
def test_too_few_checkpoints_compute_again(hybrid: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for a state all tokens of a turn are computed; with room for one, conversations lose theirs."""
    engine, counts = load(hybrid), CacheOptions.counts
    expected, _ = converse(engine, keep_cache=False)

    def with_few(self: CacheOptions, *arguments: Any) -> CacheCounts:
        return counts(self, *arguments)._replace(checkpoints=few)

    monkeypatch.setattr(CacheOptions, "counts", with_few)
    turns, new = converse(engine)
    for drawn, anew in zip(turns, expected, strict=True):
        assert_equal(drawn, anew)
        assert drawn.computed == anew.computed or few
    assert new[-1] < sum(turns[-1].computed) <= sum(expected[-1].computed)


@pytest.mark.parametrize("hybrid", ["nemotron_h"], indirect=True)
def test_a_response_that_makes_room_goes_on_from_its_state(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five blocks are one too few for three responses of two blocks: one leaves its slot after 16 tokens."""
    engine, start, begun = load(hybrid), Checkpoints.start, list[int]()
    prompts = [[number, *PROMPTS[2][:46]] for number in range(1, 4)]
    expected = draw(engine, prompts, n=1, stop_ids=[])

    def record(self: Checkpoints, slot: int, numbers: Sequence[int]) -> None:
        start(self, slot, numbers)
        begun.append(self.tables.lengths[slot])

    monkeypatch.setattr(CacheOptions, "counts", lambda *_: CacheCounts(5, 8))
    monkeypatch.setattr(Checkpoints, "start", record)
    drawn = draw(engine, prompts, n=1, stop_ids=[])
    assert_equal(drawn, expected)
    assert (begun, drawn.computed) == ([0, 0, 0, 46 + 16], [46, 46, 46])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("hybrid", ["nemotron_h"], indirect=True)
def test_a_stream_goes_on_with_new_weights(hybrid: Path, recompute: bool) -> None:
    """Later responses share no state of older weights; a turn goes on from the state of a response by the newest."""
    engine = load(hybrid)
    options = GenerationOptions(max_new_tokens=40, n=2, stop_ids=[], max_sequences=3)
    stream, drawn = ResponseStream(engine, options, 300, 64, version=5), dict[int, Any]()
    prompts = [*PROMPTS[:4], PROMPTS[2]]

    def finish() -> None:
        while len(stream):
            drawn.update(stream.step()[1])

    try:
        for key, prompt in enumerate(prompts):
            stream.add(key, prompt, torch.rand(2, 40, generator=torch.Generator().manual_seed(key)), 40)
        stream.step()
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.1)
        stream.renew(6, recompute=recompute)
        finish()
        before = sum(stream.computed)
        prompts.append([*prompts[4], *drawn[4][0].tokens, *ANSWER])
        stream.add(5, prompts[5], torch.rand(1, 40), 40)
        finish()
        assert drawn[4][0].versions == [6] * 40
        # The last token of a response has not been through the model.
        assert sum(stream.computed) - before == len(ANSWER)
    finally:
        stream.close()
    mixed = list[float]()
    for key, prompt in enumerate(prompts):
        for response in drawn[key]:
            with torch.no_grad():
                tokens = torch.tensor([*prompt, *response.tokens])
                (outputs,) = engine.forward([MicroBatch(PackedSequence.from_sequences([tokens]))])
            begin = response.versions.count(5)
            difference = torch.tensor(response.log_probs) - outputs[0][len(prompt) - 1 : -1]
            if begin:
                mixed.append(float(difference[begin:].abs().max()))
            else:
                torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=1e-5)
    assert len(mixed) == 3
    assert (max(mixed) < 1e-5) == recompute


def test_steps_in_float8_change_log_probs_a_little(hybrid: Path) -> None:
    engine = load(hybrid)
    drawn = draw(engine, PROMPTS[:1], n=1, stop_ids=[], float8=True)
    with torch.no_grad():
        tokens = torch.tensor([*PROMPTS[0], *rows_of(drawn)[0]])
        (outputs,) = engine.forward([MicroBatch(PackedSequence.from_sequences([tokens]))])
    apart = (drawn.log_probs[0] - outputs[0][len(PROMPTS[0]) - 1 : -1]).abs()
    assert 1e-3 < apart.mean() < 0.3
