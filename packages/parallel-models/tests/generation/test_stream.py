"""Responses to prompts that arrive meanwhile, with weights that change: against whole calls, and the log-probs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from parallel_layers import PackedSequence, ParallelDims
from parallel_models import CacheOptions, Engine, EngineOptions, GenerationOptions, Grid, load_engine
from parallel_models.engine.engine import MicroBatch
from parallel_models.generation import Prompt, ResponseStream, draw_responses

LONGEST = 24
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 64  # keys and values of 2 layers, 2 heads of 8, fp32, 64 tokens
PROMPTS = [[1, 2, 3], [4, 5], [6] * 20, [7, 8, 9, 10]]


@pytest.fixture(scope="module")
def engine(llama: Path) -> Engine:
    return load_engine(llama, "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())


def options_of(**changes: Any) -> GenerationOptions:
    return GenerationOptions(**{"max_new_tokens": LONGEST, "n": 2, "stop_ids": [11], "max_sequences": 3, **changes})


def numbers(n: int = 2) -> Tensor:
    """The uniforms of all prompts, `[prompts, n, L]`."""
    return torch.rand(len(PROMPTS), n, LONGEST, generator=torch.Generator().manual_seed(3))


def stream_of(engine: Engine, options: GenerationOptions) -> ResponseStream:
    return ResponseStream(engine, options, 20 + LONGEST, 64, version=5)


def log_probs(engine: Engine, tokens: list[int]) -> Tensor:
    """The log-prob of each token after the first, by the engine's weights of this moment."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        (outputs,) = engine.forward([MicroBatch(PackedSequence.from_sequences([ids]))])
    return outputs[0][:-1]


def change_weights(engine: Engine, stream: ResponseStream, *, recompute: bool) -> None:
    """Change all weights, and give them version 6."""
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.1)
    stream.renew(6, recompute=recompute)


def rest_of(stream: ResponseStream) -> dict[int, Any]:
    """Step until all responses are complete, and return those of the steps."""
    drawn = dict[int, Any]()
    while len(stream):
        drawn |= dict(stream.step()[1])
    return drawn


def test_prompts_that_arrive_meanwhile_get_the_responses_of_one_call(engine: Engine) -> None:
    options = options_of(top_k=5, keep_sampling_mask=True)
    rows = [Prompt(torch.tensor(prompt)) for prompt in PROMPTS]
    expected = draw_responses(engine, rows, options, 64, numbers())
    assert expected.mask is not None
    masks = expected.mask.split(expected.lengths)
    stream, drawn = stream_of(engine, options), dict[int, Any]()
    try:
        for key, (prompt, uniforms) in enumerate(zip(PROMPTS, numbers(), strict=True)):
            stream.add(key, prompt, uniforms, LONGEST)
            drawn |= dict(stream.step()[1])
        drawn |= rest_of(stream)
    finally:
        stream.close()
    assert sorted(drawn) == [0, 1, 2, 3]
    for number, response in enumerate(response for key in sorted(drawn) for response in drawn[key]):
        length = expected.lengths[number]
        assert response.tokens == expected.tokens[number, :length].tolist()
        torch.testing.assert_close(torch.tensor(response.log_probs), expected.log_probs[number, :length])
        assert response.versions == [5] * length
        assert response.kept == masks[number].tolist()


@pytest.mark.parametrize(
    ("recompute", "sequences", "blocks"),
    [
        pytest.param(False, 3, 99, id="keep"),
        pytest.param(True, 3, 99, id="recompute"),
        pytest.param(False, 4, 3, id="full", marks=pytest.mark.slow),
    ],
)
def test_weights_change_between_two_looks(llama: Path, recompute: bool, sequences: int, blocks: int) -> None:
    """The tokens so far stay; with `recompute` later log-probs are those of the new weights on all tokens.

    The fourth response waits for a slot or for blocks, and begins beside a response to the same prompt.
    """
    engine = load_engine(llama, "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())
    gib = (1 + blocks) * BLOCK_BYTES / 2**30
    stream = stream_of(engine, options_of(stop_ids=[], max_sequences=sequences, cache_gib=gib))
    drawn, before = dict[int, Any](), dict[int, list[float]]()
    try:
        for key, (prompt, uniforms) in enumerate(zip(PROMPTS, numbers(), strict=True)):
            stream.add(key, prompt, uniforms, 20 if key == 0 else LONGEST)
        drawn |= dict(stream.step()[1])
        change_weights(engine, stream, recompute=recompute)
        drawn |= rest_of(stream)
    finally:
        stream.close()
    differences = list[float]()
    for key, prompt in enumerate(PROMPTS):
        for response in drawn[key]:
            assert response.versions == sorted(response.versions)
            assert set(response.versions) == ({5, 6} if key == 0 or (key == 1 and 5 in response.versions) else {6})
            newest = log_probs(engine, prompt + response.tokens)[len(prompt) - 1 :]
            begin = response.versions.count(5)
            assert begin in (0, 16)
            differences.append(float((torch.tensor(response.log_probs) - newest)[begin:].abs().max()))
            if begin:
                before[key] = response.log_probs[:begin]
                assert float((torch.tensor(before[key]) - newest[:begin]).abs().max()) > 1e-3
            else:
                assert differences[-1] < 1e-5, "new responses share no keys of older weights"
    assert before
    assert (max(differences) < 1e-5) == recompute


def test_a_response_that_begins_beside_one_of_older_weights_shares_no_keys(llama: Path) -> None:
    """The second response to the prompt waits until the weights have changed."""
    engine = load_engine(llama, "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())
    # With room for copies of shared blocks.
    stream = ResponseStream(engine, options_of(stop_ids=[], max_sequences=2), 200, 64, version=5)
    drawn = dict[int, Any]()
    try:
        stream.add(0, PROMPTS[0], numbers(1)[0], 16)
        stream.add(1, PROMPTS[2], numbers()[2], LONGEST)
        assert [key for key, _ in stream.step()[1]] == [0]
        change_weights(engine, stream, recompute=False)
        drawn |= rest_of(stream)
    finally:
        stream.close()
    first, second = drawn[1]
    assert (first.versions, second.versions) == ([5] * 16 + [6] * 8, [6] * LONGEST)
    expected = log_probs(engine, PROMPTS[2] + second.tokens)[len(PROMPTS[2]) - 1 :]
    torch.testing.assert_close(torch.tensor(second.log_probs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_masks_stay_as_they_were_drawn(llama: Path, recompute: bool) -> None:
    """The first 16 tokens keep the masks of the older weights. The other tokens have masks of the new weights."""
    engine = load_engine(llama, "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())
    options = options_of(stop_ids=[], top_k=5, keep_sampling_mask=True)
    older = draw_responses(engine, [Prompt(torch.tensor(PROMPTS[0]))], options, 64, numbers()[:1])
    assert older.mask is not None
    stream = stream_of(engine, options)
    try:
        stream.add(0, PROMPTS[0], numbers()[0], LONGEST)
        assert stream.step() == ([0], [])
        change_weights(engine, stream, recompute=recompute)
        ((_, responses),) = stream.step()[1]
    finally:
        stream.close()
    for response, mask in zip(responses, older.mask.split(older.lengths), strict=True):
        assert response.versions == [5] * 16 + [6] * 8
        assert response.kept[:16] == mask.tolist()[:16]
        assert all(token in ids and len(ids) == 5 for token, ids in zip(response.tokens, response.kept, strict=True))


def test_keys_that_are_given_up_leave_no_trace(engine: Engine) -> None:
    """At work, waiting for a slot, waiting for a row, and complete."""
    stream, drawn = stream_of(engine, options_of(stop_ids=[], max_sequences=4)), dict[int, Any]()
    expected = draw_responses(engine, [Prompt(torch.tensor(PROMPTS[3]))], options_of(stop_ids=[]), 64, numbers()[3:])
    try:
        for key, (prompt, uniforms) in enumerate(zip(PROMPTS, numbers(), strict=True)):
            stream.add(key, prompt, uniforms, LONGEST)
        assert stream.step() == ([0, 1], [])
        stream.cancel(1)
        assert {row for _, row in stream._busy()} == stream._places.keys()
        stream.renew(6, recompute=True)
        for key in (0, 2):
            stream.cancel(key)
        assert stream.step()[0] == [3]
        drawn |= rest_of(stream)
        stream.cancel(3)
        assert not any((stream.waiting, stream._busy(), stream._places, stream._asked))
        assert stream.tables.num_free == stream.tables.num_blocks
    finally:
        stream.close()
    assert drawn.keys() == {3}
    assert [response.tokens for response in drawn[3]] == expected.tokens.tolist()


def test_the_options_of_a_stream_are_those_of_its_session(engine: Engine) -> None:
    stream = stream_of(engine, options_of(exact=True, float8_cache=True, cache_gib=0.25))
    assert stream.session.options == CacheOptions(
        3, 20 + LONGEST, 0.25, exact=True, float8_cache=True, experts="exchange"
    )
    stream.close()


@pytest.mark.parametrize(
    "recompute", [pytest.param(False, id="keep"), pytest.param(True, id="recompute", marks=pytest.mark.slow)]
)
def test_turns_compute_what_is_new_until_the_weights_change(llama: Path, recompute: bool) -> None:
    """Equal prompts and earlier turns share blocks of one version; a response over two versions is shared by none."""
    engine = load_engine(llama, "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())
    stream = ResponseStream(engine, options_of(stop_ids=[]), 300, 64, version=5)
    keys, answer = itertools.count(), [9] * 20

    def draw(*prompts: list[int], steps: int = 99) -> tuple[list[list[int]], int]:
        """Draw 20 tokens behind each prompt; return the sequences, and the number of tokens that were computed."""
        before, drawn = sum(stream.computed), dict[int, Any]()
        asked = dict(zip(keys, prompts, strict=False))
        for key, prompt in asked.items():
            stream.add(key, prompt, numbers(1)[0], 20)
        for _ in range(steps):
            drawn |= dict(stream.step()[1]) if len(stream) else {}
        for key in drawn.keys() & asked.keys():
            (response,) = drawn[key]
            if response.versions[0] == response.versions[-1]:
                expected = log_probs(engine, asked[key] + response.tokens)[len(asked[key]) - 1 :]
                torch.testing.assert_close(torch.tensor(response.log_probs), expected, rtol=0, atol=1e-5)
        sequences = [asked.get(key, early) + drawn[key][0].tokens for key in sorted(drawn)]
        return sequences, sum(stream.computed) - before

    try:
        first, early = [1 + place % 50 for place in range(130)], [3 + place % 40 for place in range(100)]
        (turn, same), computed = draw(first, list(first))
        assert (turn, computed) == (same, 129), "equal prompts"
        turn += answer
        (second,), computed = draw(turn)
        assert computed == len(turn) - 1 - 128
        assert draw(early, steps=1) == ([], 99)
        change_weights(engine, stream, recompute=recompute)
        (mixed, third, _), computed = draw(second + answer, early)
        assert computed == len(second + answer) - 1 + 99 + recompute * (len(early) + 15)
        _, computed = draw(mixed + answer)
        assert computed == len(mixed + answer) - 1 - 64, "the prompt's first block, of the new weights"
        _, computed = draw(third + answer)
        assert computed == len(third + answer) - 1 - 192, "blocks of the new weights"
    finally:
        stream.close()


def test_logits_that_are_not_finite_are_refused(llama: Path) -> None:
    engine = load_engine(llama, "causal_lm", Grid.build(ParallelDims(), device="cpu"), EngineOptions())
    stream = stream_of(engine, options_of())
    stream.add(0, PROMPTS[0], numbers()[0], LONGEST)
    with torch.no_grad():
        next(engine.module.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite logits after 1 tokens"):
        stream.step()
    stream.close()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 4 * BLOCK_BYTES / 2**30]))
def test_each_key_is_answered_once_whatever_arrives_and_changes(
    engine: Engine, seed: int, recompute: bool, cache_gib: float | None
) -> None:
    """Also where the cache is too small for all responses at work; versions never decrease along a response."""
    chance, version, left = random.Random(seed), 5, list(range(8))
    stream = stream_of(engine, options_of(cache_gib=cache_gib, max_sequences=4))
    drawn = dict[int, Any]()
    began = dict[int, int]()
    try:
        while left or len(stream):
            if left and (not len(stream) or chance.random() < 0.5):
                key = left.pop(0)
                limit, n = chance.randint(1, LONGEST), chance.randint(1, 3)
                stream.add(key, PROMPTS[key % 4], torch.rand(n, LONGEST), limit)
                began[key] = version
            if chance.random() < 0.3:
                version += 1
                stream.renew(version, recompute=recompute)
            for key, responses in stream.step()[1]:
                assert key not in drawn
                drawn[key] = responses
                for response in responses:
                    assert len(response.tokens) == len(response.log_probs) == len(response.versions) > 0
                    assert response.versions == sorted(response.versions)
                    assert began[key] <= response.versions[0] <= response.versions[-1] <= version
    finally:
        stream.close()
    assert sorted(drawn) == list(range(8))
