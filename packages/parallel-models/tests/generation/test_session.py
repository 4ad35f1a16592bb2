"""Generation sessions: turns of conversations compute what is new alone, and no draw sees keys of other weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_models import (
    EngineOptions,
    GenerationOptions,
    Grid,
    MicroBatch,
    OptimizerOptions,
    load_engine,
)
from parallel_models.generation import Prompt, Responses, draw_responses, end_sessions
from parallel_models.generation.continuous_batching import ContinuousBatching
from parallel_models.generation.decoding import CacheOptions, Decoding
from parallel_models.generation.session import GenerationSession
from parallel_models.training import ParallelEngine, TrainedModel

BLOCK = 64
LENGTHS = (3 * BLOCK + 5, BLOCK, 2 * BLOCK + 1, 9)
NEW, ANSWER = 8, 33


def load(path: Path, dims: ParallelDims = ParallelDims(), **options: Any) -> ParallelEngine:  # noqa: B008
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    return load_engine(str(path), "causal_lm", Grid.build(dims, device="cpu", mesh=mesh), EngineOptions(**options))


def tokens(length: int, seed: int) -> Tensor:
    return torch.randint(1, 61, (length,), generator=torch.Generator().manual_seed(seed))


def draw(engine: ParallelEngine, prompts: Sequence[Tensor], **options: Any) -> Responses:
    options = {"max_new_tokens": NEW, "max_length": 600, "keep_cache": True, "temperature": 0.7, **options}
    return draw_responses(engine, [Prompt(prompt) for prompt in prompts], GenerationOptions(**options), 96)


def converse(engine: ParallelEngine, turns: int = 2, **options: Any) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return the conversations of some turns, the log-probs of each turn, and the computed tokens of each turn."""
    prompts = [tokens(length, number) for number, length in enumerate(LENGTHS)]
    log_probs, computed = [], []
    for turn in range(turns):
        drawn = draw(engine, prompts, seed=turn, **options)
        log_probs.append(drawn.log_probs)
        computed.append(sum(drawn.computed))
        rows = [row[:length] for row, length in zip(drawn.tokens, drawn.lengths, strict=False)]
        answer = tokens(ANSWER, turn)
        prompts = [torch.cat((prompt, row, answer)) for prompt, row in zip(prompts, rows, strict=True)]
        prompts = prompts[1:] + prompts[:1]  # a part of them on another context-parallel rank
    end_sessions()
    return prompts, log_probs, computed


def compare(engine: ParallelEngine, turns: int = 2, **options: Any) -> tuple[list[int], list[int]]:
    """Compare conversations with and without a session; return the computed tokens of the turns."""
    kept, log_probs, computed = converse(engine, turns, **options)
    anew, expected, computed_anew = converse(engine, turns, **options, keep_cache=False)
    assert [row.tolist() for row in kept] == [row.tolist() for row in anew]
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    return computed, computed_anew


@pytest.mark.parametrize(
    "options",
    [
        {"stop_ids": range(1, 9), "top_k": 9, "keep_sampling_mask": True, "max_sequences": 2},
        pytest.param({"exact": True, "turns": 4}, marks=pytest.mark.slow),
        pytest.param({"turns": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_turns_compute_what_follows_full_blocks(llama: Path, options: dict[str, Any]) -> None:
    computed, anew = compare(load(llama), **options)
    assert computed[0] == anew[0] == sum(length - 1 for length in LENGTHS)
    for new, whole in zip(computed[1:], anew[1:], strict=True):
        assert new < len(LENGTHS) * (NEW + ANSWER + BLOCK) < whole


def test_a_small_pool_gives_cached_blocks_up_and_puts_responses_off(llama: Path) -> None:
    """Conversations of 14 blocks in a pool of 7 or 12: the draws stay, and some blocks are found again."""
    engine = load(llama)
    block = 2 * 2 * 2 * 8 * 4 * BLOCK  # layers, keys and values, heads, size of a head, bytes
    totals = []
    for blocks in (7, 12):
        computed, anew = compare(engine, 3, max_length=400, cache_gib=(blocks + 1.5) * block / 2**30)
        assert sum(computed) < sum(anew)
        totals.append(sum(computed))
    assert totals[1] < totals[0]


def test_the_shortest_response_waits_when_the_pool_is_full(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the fewest tokens to compute again. The last prompt begins when the first one's response has ended."""
    engine, put_off = load(llama), list[list[int]]()
    leave = ContinuousBatching._leave

    def spy(batching: ContinuousBatching, slots: Collection[int]) -> None:
        lengths = {slot: batching.drawn[response] for slot, response in batching._busy()}
        put_off.extend([lengths[slot], *lengths.values()] for slot in slots if batching.session.active[slot])
        leave(batching, slots)

    monkeypatch.setattr(ContinuousBatching, "_leave", spy)
    block = 2 * 2 * 2 * 8 * 4 * BLOCK
    options: dict[str, Any] = {"max_length": 4 * BLOCK, "max_new_tokens": 2 * BLOCK + 8, "max_sequences": 3}
    prompts = [tokens(length, length) for length in (230, 8, 9, 1)]
    draw(engine, prompts, cache_gib=8.5 * block / 2**30, **options)
    assert all(length == min(lengths) for length, *lengths in put_off)
    assert any(0 < length < max(lengths) for length, *lengths in put_off)
    end_sessions()


def test_a_group_is_computed_once_over_calls(llama: Path) -> None:
    engine, prompt = load(llama), tokens(2 * BLOCK + 3, 0)
    assert sum(draw(engine, [prompt], n=3).computed) == 2 * BLOCK + 2
    assert sum(draw(engine, [prompt, prompt.clone()], n=3).computed) == 2 * 2, "three at a time"
    end_sessions()
    assert draw(engine, [prompt, prompt.clone()]).computed == [2 * BLOCK + 2, 0], "equal prompts"
    end_sessions()


def test_memory_and_slots_stay_over_calls(llama: Path) -> None:
    """Steps of a later call read and write the same memory, so that a graph of the first call serves it."""
    engine, prompts = load(llama), [tokens(9, number) for number in range(8)]
    draw(engine, prompts)
    session = engine.session
    assert session is not None

    def addresses() -> dict[str | int, int]:
        tensors = {name: x for name, x in vars(session).items() if isinstance(x, Tensor)}
        return {name: x.data_ptr() for name, x in (*tensors.items(), *enumerate(session.draws))}

    before = addresses()
    draw(engine, [tokens(70, 9)], max_new_tokens=3, seed=9)
    assert engine.session is session
    assert addresses() == before
    for options in ({"max_length": 700}, {"max_sequences": 4}, {"exact": True}, {"float8": True}, {"cache_gib": 1.0}):
        draw(engine, prompts)
        session = engine.session
        draw(engine, prompts, **options)
        assert engine.session is not session, options
    draw(engine, prompts, keep_cache=False)
    assert engine.session is None


def test_memory_of_a_session_is_freed_before_the_next_one(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, caches, alive = load(llama), list[weakref.ref[object]](), list[int]()
    plain = ParallelEngine.decoding

    @contextmanager
    def decoding(engine: ParallelEngine, options: CacheOptions) -> Iterator[Decoding]:
        alive.append(sum(cache() is not None for cache in caches))
        with plain(engine, options) as entered:
            caches.extend(weakref.ref(cache) for cache in entered.caches)
            yield entered

    monkeypatch.setattr(ParallelEngine, "decoding", decoding)
    gc.disable()
    try:
        for keep, length in ((False, 600), (False, 600), (True, 600), (True, 1200)):
            draw(engine, [tokens(5, 0)], keep_cache=keep, max_length=length)
    finally:
        gc.enable()
    end_sessions()
    assert alive == [0] * 4


def test_the_device_has_all_that_a_graph_of_a_step_reads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are brought together when others stop, in a later call with sizes of steps that an earlier call had."""
    run_steps, sizes = GenerationSession.run_steps, list[int]()

    def checked(session: GenerationSession, count: int, size: int) -> None:
        assert not any(cache._stale for cache in session.decoding.caches)
        sizes.append(size)
        run_steps(session, count, size)

    monkeypatch.setattr(GenerationSession, "run_steps", checked)
    engine = load(llama)
    for seed in range(2):
        draw(engine, [tokens(9, number) for number in range(20)], seed=seed, max_new_tokens=50, stop_ids=range(1, 4))
        assert {10, 20} <= set(sizes)
        sizes.clear()
    end_sessions()


def loss(micro_batch: MicroBatch, outputs: tuple[Tensor, ...]) -> Tensor:
    return -outputs[0].sum()


def step(model: TrainedModel, path: Path) -> None:
    model.engine.forward_backward([MicroBatch(PackedSequence.from_sequences([tokens(30, 5)]))], loss)
    model.optimizer.step(0.05)


def write(model: TrainedModel, path: Path) -> None:
    with torch.no_grad():
        for parameter in model.engine.shards().parameters.values():
            parameter.mul_(1.5)


def resume(model: TrainedModel, path: Path) -> None:
    other = TrainedModel(load(path), OptimizerOptions())
    step(other, path)
    other.save_training(path / "training")
    draw(model.engine, [tokens(9, 0)])
    model.load_training(path / "training")


def move(model: TrainedModel, path: Path) -> None:
    model.offload(optimizer=False)
    assert model.engine.session is None
    model.onload()


def another_draws(model: TrainedModel, path: Path) -> None:
    draw(load(path), [tokens(9, 0)])


CHANGES: list[Callable[[TrainedModel, Path], None]] = [step, write, resume, move, another_draws]


@pytest.mark.parametrize("change", CHANGES)
def test_a_session_ends_when_weights_change_or_memory_is_needed(
    llama: Path, change: Callable[[TrainedModel, Path], None]
) -> None:
    """The next draw computes all tokens, with the new weights, as a model without a session does."""
    model, prompts = TrainedModel(load(llama), OptimizerOptions()), [tokens(2 * BLOCK + 3, 0)]
    draw(model.engine, prompts)
    before = model.engine.session
    assert before is not None
    change(model, llama)
    # Whatever wrote without a call of ours is seen at the next draw.
    assert model.engine.session is (before if change is write else None)
    drawn = draw(model.engine, prompts)
    assert model.engine.session is not before
    assert drawn.computed == [2 * BLOCK + 2]
    expected = draw(model.engine, prompts, keep_cache=False)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn.log_probs, expected.log_probs)
    end_sessions()


def test_the_base_alone_has_no_keys_of_its_adapters(llama: Path) -> None:
    engine, prompts = load(llama, lora=LoraOptions(rank=4)), [tokens(2 * BLOCK + 3, 0)]
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name.endswith("lora.B"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    computed, _ = compare(engine)
    assert computed[1] < computed[0]
    adapted = draw(engine, prompts)
    with engine.without_adapters():
        base = draw(engine, prompts)
    again = draw(engine, prompts)
    assert [base.computed, again.computed] == [adapted.computed] * 2
    assert torch.equal(again.log_probs, adapted.log_probs)
    assert not torch.equal(base.log_probs, adapted.log_probs)
    end_sessions()


def test_weights_that_change_within_a_draw_leave_nothing_in_the_cache(llama: Path) -> None:
    """A session that ends between two looks serves its draw to the end, and no other; a response that waited, too."""
    engine, first = load(llama), tokens(2 * BLOCK + 3, 0)
    prompts = [first, tokens(2 * BLOCK + 3, 1), torch.cat((first, first))]
    assert draw(engine, prompts, max_sequences=2).computed[2] == len(first) + 2

    def progress(unit: str, count: int, total: int) -> None:
        if unit == "tokens" and not ended:
            ended.append(count)
            write(TrainedModel(engine, None), llama)
            end_sessions()

    end_sessions()
    ended: list[int] = []
    engine.progress = progress
    for _ in range(2):
        assert draw(engine, prompts, max_sequences=2).computed[2] == 2 * len(first) - 1
        assert ended.pop() > 0
        assert engine.session is None


def test_a_draw_that_fails_ends_its_session(llama: Path) -> None:
    engine = load(llama)

    def fail(unit: str, count: int, total: int) -> None:
        raise KeyboardInterrupt

    engine.progress = fail
    with pytest.raises(KeyboardInterrupt):
        draw(engine, [tokens(9, 0)])
    assert engine.session is None


def converse_on_ranks(group: ProcessGroup, path: Path, dims: ParallelDims) -> tuple[list[int], list[int]]:
    engine = load(path, dims)
    computed = compare(engine)
    # Ranks that have lost their session do not wait for the others, and divide prompts as the others do.
    prompts = [tokens(BLOCK + number, number) for number in range(3)]
    first = draw(engine, prompts)
    turns = [torch.cat((prompt, row)) for prompt, row in zip(prompts, first.tokens, strict=True)][::-1]
    if group.rank() == dims.world_size - 1:
        end_sessions()
    drawn = draw(engine, turns, n=2)
    assert [count for count in drawn.computed if count] == [len(turn) - 1 for turn in turns]
    further = [torch.cat((turns[number], drawn.tokens[2 * number])) for number in (2, 0, 1)]
    again = draw(engine, further, n=2)
    # Each turn is at the rank that has drawn the one before.
    assert [count for count in again.computed if count] == [len(turn) - 1 - BLOCK for turn in further]
    for asked, responses in ((turns, drawn), (further, again)):
        assert torch.equal(responses.tokens, draw(engine, asked, n=2, keep_cache=False).tokens)
    return computed


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pp=2),
        ParallelDims(cp=2),
        *(
            pytest.param(dims, marks=pytest.mark.slow)
            for dims in (ParallelDims(tp=2), ParallelDims(dp=2), ParallelDims(dp=2, tp=2), ParallelDims(cp=2, pp=2))
        ),
    ],
    ids=str,
)
def test_ranks_reuse_the_same_blocks(ranks: RankPool, llama: Path, dims: ParallelDims) -> None:
    for computed, anew in ranks.run(converse_on_ranks, llama, dims, world=dims.world_size):
        assert computed[0] == anew[0]
        assert computed[1] < len(LENGTHS) * (NEW + ANSWER + BLOCK) < anew[1]
