"""Decoding steps over a pipeline: the draws of one rank, no stage that waits, and messages without logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from transformers import LlamaConfig, LlamaForCausalLM

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_models import EngineOptions, GenerationOptions, Grid, PipelineOptions, load_engine
from parallel_models.generation import (
    STEPS,
    Prompt,
    Responses,
    ResponseStream,
    continuous_batching,
    draw_responses,
)
from parallel_models.generation.continuous_batching import ContinuousBatching
from parallel_models.generation.stage_ring import StageRing
from parallel_models.training import ParallelEngine
from parallel_models.training.decoding_forward import DecodingForward

HIDDEN, TOP_K, MASK_WORDS = 32, 5, 2
PROMPTS = [[1 + (7 * place + number) % 60 for place in range(1 + 30 * number)] for number in range(4)]
# Responses that stop early and late and wait for slots; groups that are unequal or empty; one sequence.
CASES: list[tuple[int, dict[str, Any]]] = [
    (4, {"n": 3, "stop_ids": range(1, 6), "top_k": TOP_K, "keep_sampling_mask": True, "max_sequences": 9}),
    (1, {"temperature": 0.0, "max_new_tokens": 3}),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in fp32 with a layer for each of four chunks."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=61, num_key_value_heads=2, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(path: Path, dims: ParallelDims, virtual_stages: int = 1, lora: LoraOptions | None = None) -> ParallelEngine:
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    options = EngineOptions(pipeline=PipelineOptions(virtual_stages=virtual_stages), lora=lora)
    engine = load_engine(str(path), "causal_lm", Grid.build(dims, device="cpu", mesh=mesh), options)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name.endswith("lora.B"):
                parameter.fill_(0.02)
    return engine


def draw(engine: ParallelEngine, prompts: int, **options: Any) -> Responses:
    rows = [Prompt(torch.tensor(prompt)) for prompt in PROMPTS[:prompts]]
    return draw_responses(engine, rows, GenerationOptions(**{"max_new_tokens": STEPS + 2, **options}), 64)


def draw_cases(
    group: ProcessGroup, path: Path, dims: ParallelDims, virtual_stages: int, lora: LoraOptions | None, exact: bool
) -> tuple[list[Responses], list[int]]:
    """Return the draws of all cases, and the tokens of each pass over prompts."""
    engine, read, passes = load(path, dims, virtual_stages, lora), DecodingForward.__call__, list[int]()

    def counted(forward: DecodingForward, packed: PackedSequence, *arguments: Any, **options: Any) -> Any:
        result = read(forward, packed, *arguments, **options)
        assert result is None or result.shape[-1] == HIDDEN, "prompts need no logits"
        passes.append(packed.num_tokens)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodingForward, "__call__", counted)
        patch.setattr(continuous_batching, "_FEWEST_TOKENS", 8)
        return [draw(engine, prompts, exact=exact, **options) for prompts, options in CASES], passes


@pytest.mark.parametrize(
    ("dims", "virtual_stages", "lora", "exact"),
    [
        (ParallelDims(pp=2), 2, None, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (ParallelDims(pp=2), 1, None, True),
                (ParallelDims(pp=2), 1, LoraOptions(rank=4), False),
                (ParallelDims(pp=4), 1, None, False),
                (ParallelDims(pp=2, tp=2), 1, None, False),
                (ParallelDims(pp=2, tp=2), 2, None, True),
                (ParallelDims(pp=2, cp=2), 1, None, False),
            )
        ),
    ],
    ids=str,
)
def test_groups_draw_what_one_rank_draws(
    ranks: RankPool,
    llama: Path,
    dims: ParallelDims,
    virtual_stages: int,
    lora: LoraOptions | None,
    exact: bool,
) -> None:
    engine = load(llama, ParallelDims(), lora=lora)
    expected = [draw(engine, prompts, **options) for prompts, options in CASES]
    assert {1, STEPS + 2} <= {*expected[0].lengths}, "some stop at once, others never"
    arguments = llama, dims, virtual_stages, lora, exact
    for results, passes in ranks.run(draw_cases, *arguments, world=dims.world_size, timeout=60):
        share = sum(map(len, PROMPTS)) // (2 * dims.pp)
        assert max(passes) <= share + dims.tp, "stages work on several passes over prompts"
        for drawn, one in zip(results, expected, strict=True):
            assert drawn.lengths[: len(one.lengths)] == one.lengths
            for n, length in enumerate(one.lengths):
                assert drawn.tokens[n, :length].tolist() == one.tokens[n, :length].tolist()
                torch.testing.assert_close(drawn.log_probs[n, :length], one.log_probs[n, :length], rtol=0, atol=1e-5)
            if one.mask is not None and drawn.mask is not None:
                assert drawn.mask[: len(one.mask)].tolist() == one.mask.tolist()


@pytest.mark.parametrize(
    ("slots", "multiple_of", "groups", "busy", "size"),
    [(300, 1, 1, 30, 37), (300, 1, 4, 30, 40), (24, 8, 2, 3, 16), (24, 8, 2, 17, 24), (4, 1, 4, 1, 4), (1, 1, 1, 1, 1)],
)
def test_a_step_has_about_as_many_slots_as_responses(
    slots: int, multiple_of: int, groups: int, busy: int, size: int
) -> None:
    """Half the slots, as often as all responses have room, rounded up to equal groups."""
    batching: Any = SimpleNamespace(
        slots=[None] * slots, multiple_of=multiple_of, _groups=groups, _busy=lambda: [0] * busy
    )
    assert ContinuousBatching._smallest_size(batching) == size


def stream(group: ProcessGroup | None, path: Path, dims: ParallelDims, recompute: bool) -> dict[int, Any]:
    """Return responses that begin and go on while weights change."""
    engine, drawn = load(path, dims), dict[int, Any]()
    options = GenerationOptions(max_new_tokens=STEPS + 9, stop_ids=[1, 2], max_sequences=4)
    responses = ResponseStream(engine, options, 64 + 2 * STEPS, 64, version=1)
    uniforms = torch.rand(3, 2, STEPS + 9, generator=torch.Generator().manual_seed(0))
    try:
        for key, prompt in enumerate(PROMPTS[:3]):
            responses.add(key, prompt, uniforms[key], STEPS + 9)
            drawn |= dict(responses.step()[1])
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(1.05)
            responses.renew(2 + key, recompute=recompute)
        while len(responses):
            drawn |= dict(responses.step()[1])
    finally:
        responses.close()
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_between_two_looks(ranks: RankPool, llama: Path, recompute: bool) -> None:
    expected = stream(None, llama, ParallelDims(), recompute)
    assert {version for drawn in expected.values() for response in drawn for version in response.versions} >= {1, 2, 3}
    for drawn in ranks.run(stream, llama, ParallelDims(pp=2), recompute, world=2, timeout=60):
        assert drawn.keys() == expected.keys()
        for key, responses in drawn.items():
            for response, one in zip(responses, expected[key], strict=True):
                assert (response.tokens, response.versions) == (one.tokens, one.versions)
                torch.testing.assert_close(response.log_probs, one.log_probs, rtol=0, atol=1e-5)


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Record what this rank does: the messages of each exchange as (sends, bytes), visits, and anything else."""
    events, exchange, compute = list[Any](), dist.batch_isend_irecv, StageRing.compute

    def batch(operations: list[dist.P2POp]) -> Any:
        events.append([(x.op is dist.isend, x.tensor.nbytes) for x in operations])
        return exchange(operations)

    def visit(*arguments: Any) -> Any:
        events.append("visit")
        return compute(*arguments)

    def other(*_: Any, **__: Any) -> Any:
        events.append("other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", batch)
        patch.setattr(StageRing, "compute", visit)
        for name in ("send", "recv", "broadcast", "all_reduce", "all_gather", "all_gather_into_tensor"):
            patch.setattr(dist, name, other)
        yield events


def record_steps(group: ProcessGroup, path: Path, dims: ParallelDims, virtual_stages: int) -> list[Any]:
    """Return the events of the steps between two looks."""
    engine, run = load(path, dims, virtual_stages), StageRing.run
    results = list[Any]()

    def watched(ring: StageRing, *arguments: Any) -> None:
        with recorded() as events:
            run(ring, *arguments)
        results.append(events)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRing, "run", watched)
        draw(engine, 1, n=8, max_new_tokens=STEPS, top_k=TOP_K, keep_sampling_mask=True)
    return results


@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_no_stage_waits_and_no_logits_travel(ranks: RankPool, llama: Path, pp: int, virtual_stages: int) -> None:
    """N tokens of pp groups take N pp + pp - 1 ticks of each chunk; hidden states go on, draws go back."""
    rows, visits = 8 // pp, STEPS * pp * virtual_stages
    states, draws = rows * HIDDEN * 4, rows * (2 + MASK_WORDS) * 4
    results = ranks.run(record_steps, llama, ParallelDims(pp=pp), virtual_stages, world=pp)
    for rank, (events,) in enumerate(results):
        assert "other" not in events
        first = events.index("visit")
        ticks = events[first : len(events) - events[::-1].index("visit")]
        # A visit in every tick, from the rank's first one to its last one: between two of them, one exchange.
        assert [event == "visit" for event in ticks] == [True, False] * (visits - 1) + [True]
        sends = [(bytes_sent, sent) for event in events if event != "visit" for sent, bytes_sent in event]
        last = rank == pp - 1
        assert sends.count((states, True)) == visits - STEPS * pp * last
        assert sends.count((states, False)) == visits - STEPS * pp * (rank == 0)
        assert sends.count((draws, True)) == STEPS * pp * (pp - 1) * last
        assert sends.count((draws, False)) == STEPS * pp * (not last)
        assert len(sends) == sum(map(sends.count, {(states, True), (states, False), (draws, True), (draws, False)}))
