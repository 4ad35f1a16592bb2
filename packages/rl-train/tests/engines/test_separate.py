"""The native engine apart from the actor: its draws, its weights, and a run with it."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from parallel_layers import ParallelDims
from parallel_models import SamplingOptions
from parallel_models.generation import draw_responses
from rl_models import Actor, Batch, OptimizerOptions
from rl_models.losses import LossTerms
from rl_train.cli.commands import app
from rl_train.engines import EnginePool, Native, SeparateEngine, processes
from rl_train.engines.interface import Request, WeightsLostError
from rl_train.engines.native_ranks import NativeRanks, _results
from rl_train.weight_sync import shard_sender
from rl_train.weight_sync.shard_exchange import exchange_shards
from rl_train.weight_sync.transport import BucketMissed

from ..loop.test_train import arguments, lines

PROMPTS = [[1, number, 3] for number in range(2, 8)]
REQUESTS = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
GREEDY = SamplingOptions(max_new_tokens=5, temperature=0.0)


def changed(model: Path) -> Actor:
    """Return an actor after an update that changes what it draws."""
    actor = Actor.from_pretrained(model, device="cpu", optimizer=OptimizerOptions(learning_rate=0.05))
    actor.update(Batch.from_sequences([[1, 5, 5, 5, 5]]), lambda inputs: LossTerms(-inputs.log_probs))
    return actor


def rows_of(batch: Batch) -> list[list[int]]:
    return [row.tolist() for row in batch.responses()]


def test_it_draws_what_the_actor_draws_with_its_first_and_its_new_weights(model: Path) -> None:
    engine = Native(model, device="cpu")
    for actor in (Actor.from_pretrained(model, device="cpu"), changed(model)):
        engine.load(actor.stream_weights())
        answers = engine.begin(REQUESTS, GREEDY)()
        expected = actor.generate(PROMPTS, max_new_tokens=5, temperature=0.0)
        assert [answer[0].tokens for answer in answers] == rows_of(expected)
        scored = expected["log_probs"][expected.mask]
        torch.testing.assert_close(torch.tensor([answer[0].log_probs for answer in answers]).flatten(), scored)


def test_log_probs_have_the_bits_of_an_invariant_actor(model: Path) -> None:
    """In bf16, where others differ by rounding."""
    how: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16, "tp_invariant": True}
    actor = Actor.from_pretrained(model, **how)
    answers = Native(model, **how).begin(REQUESTS, SamplingOptions(max_new_tokens=9, n=2))()
    rows = [
        (request.prompt, response) for request, answer in zip(REQUESTS, answers, strict=True) for response in answer
    ]
    batch = Batch.from_sequences([prompt + response.tokens for prompt, response in rows], response_lengths=[9] * 12)
    drawn = torch.tensor([response.log_probs for _, response in rows]).flatten()
    assert torch.equal(actor.log_probs(batch).log_probs[batch.mask], drawn)


def test_a_response_depends_on_its_own_seed_alone(model: Path) -> None:
    engine = Native(model, device="cpu", max_sequences=3)
    sampling = SamplingOptions(max_new_tokens=6, n=2, top_k=4, keep_sampling_mask=True, stop_ids=[4])
    together = engine.begin(REQUESTS, sampling)()
    (alone,), (other,) = (engine.begin([REQUESTS[3]._replace(seed=seed)], sampling)() for seed in (3, 99))
    assert [response._replace(log_probs=[]) for response in alone] == [
        response._replace(log_probs=[]) for response in together[3]
    ]
    assert [response.tokens for response in other] != [response.tokens for response in alone]
    for response, same in zip(alone, together[3], strict=True):
        torch.testing.assert_close(torch.tensor(response.log_probs), torch.tensor(same.log_probs))
    for response in (response for answer in together for response in answer):
        assert response.kept is not None
        assert len(response.tokens) == len(response.log_probs) == len(response.kept) <= 6
        assert all(token in kept and len(kept) <= 4 for token, kept in zip(response.tokens, response.kept, strict=True))


def test_turns_are_computed_once_until_the_weights_change_or_leave(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts of two blocks; a load that breaks off has changed weights, too."""
    computed = list[list[int]]()

    def counted(*arguments: Any) -> Any:
        drawn = draw_responses(*arguments)
        computed.append(drawn.computed)
        return drawn

    monkeypatch.setattr("rl_train.engines.native.draw_responses", counted)
    engine, weights = Native(model, device="cpu"), list(changed(model).stream_weights())
    requests = [Request([number, *[5] * 130], number) for number in range(2, 5)]

    def load_some() -> None:
        with pytest.raises(ValueError, match="the stream ended without"):
            engine.load(iter(weights[:5]))

    def nap() -> None:
        engine.sleep()
        assert engine._engine.session is None  # its memory is given back
        engine.wake()

    for change in (load_some, nap, lambda: engine.load(iter(weights))):
        first, again = (engine.begin(requests, GREEDY)() for _ in range(2))
        assert [answer[0].tokens for answer in again] == [answer[0].tokens for answer in first]
        assert computed == [[130] * 3, [2] * 3]
        computed.clear()
        change()
        assert engine._engine.session is None


def test_images_are_refused_and_sleep_gives_the_weights_back_as_they_were(model: Path) -> None:
    engine = Native(model, device="cpu")
    before = engine.begin(REQUESTS, GREEDY)()
    engine.sleep()
    engine.wake()
    assert engine.begin(REQUESTS, GREEDY)() == before
    with pytest.raises(ValueError, match="computes text alone"):
        engine.begin([REQUESTS[0]._replace(images=("picture",))], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2)], ids=str)
def test_engines_in_processes_of_their_own_take_each_version(model: Path, dims: ParallelDims) -> None:
    """Two engines of one device, or one engine of two."""
    actor = changed(model)
    engine = SeparateEngine(actor, model, devices=["", ""], dims=dims, check=True)
    try:
        first = Actor.from_pretrained(model, device="cpu")
        assert rows_of(engine.generate(PROMPTS, GREEDY)) == rows_of(
            first.generate(PROMPTS, max_new_tokens=5, temperature=0.0)
        )
        engine.update_weights(actor, 1)
        batch = engine.generate(PROMPTS, SamplingOptions(max_new_tokens=5, n=2, seed=3))
        expected: Tensor = torch.where(batch.mask, actor.log_probs(batch).log_probs, 0)
        torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
    finally:
        engine.close()


@pytest.mark.slow
def test_an_engine_that_ends_in_any_phase_of_a_weight_sync_of_shards(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine gets the weights and answers all prompts; the next weight sync reaches both."""
    actor, told = changed(model), list[str]()
    engine = SeparateEngine(actor, model, devices=["", ""], bucket_bytes=2048, timeout=60.0)
    pool = engine._local
    assert isinstance(pool, EnginePool)
    pool._tell = told.append
    expected = rows_of(actor.generate(PROMPTS, max_new_tokens=5, temperature=0.0))

    def ending_at(share: float, pid: int) -> Any:
        """An exchange of shards in which a process ends when this share of the copies has been packed."""
        packed = itertools.count()

        def exchange(peer: Any, plan: Any, read: Any, **options: Any) -> None:
            copies = sum(map(len, plan.rounds))
            assert copies > 20

            def ending(copy: Any, buffer: Tensor) -> None:
                if next(packed) == int(share * (copies - 1)):
                    os.kill(pid, signal.SIGKILL)
                read(copy, buffer)

            exchange_shards(peer, plan, ending, **options)

        return exchange

    try:
        for version, phase in enumerate(("before", 0.0, 0.5, 1.0, "after"), start=1):
            pid = pool.engines[version % 2]._transport.pid  # type: ignore[union-attr]
            if phase == "before":
                os.kill(pid, signal.SIGKILL)
            with monkeypatch.context() as patch:
                if isinstance(phase, float):
                    patch.setattr(shard_sender, "exchange_shards", ending_at(phase, pid))
                engine.update_weights(actor, version)
            if phase == "after":
                os.kill(pid, signal.SIGKILL)
            assert rows_of(engine.generate(PROMPTS, GREEDY)) == expected
            assert (len(told), len(pool.current)) == (version, 1)
            engine.update_weights(actor, version)
            assert (len(told), pool.current) == (version, {0, 1})
            assert rows_of(engine.generate(PROMPTS, GREEDY)) == expected
            pool.losses_in_a_row.clear()
    finally:
        engine.close()


class Wrong(Native):
    """Refuses the second tensor."""

    def load(self, named_tensors: Any) -> None:
        assert next(named_tensors)
        raise ValueError(f"{next(named_tensors)[0]} is refused")


@pytest.mark.slow
def test_a_lost_rank_is_replaced_with_its_engine(model: Path) -> None:
    actor, told = Actor.from_pretrained(model, device="cpu"), list[str]()
    make = partial(NativeRanks, str(model), dims=ParallelDims(pp=2), seconds=60.0)
    pool = EnginePool(processes(make, [""], silence=30.0), tell=told.append)
    try:
        pool.load(actor.stream_weights())
        first = pool.begin(REQUESTS, GREEDY)()
        ranks = [
            pid
            for pid in descendants(pool.engines[0]._transport.pid)
            if b"native_ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert ranks
        os.kill(ranks[-1], signal.SIGKILL)
        with pytest.raises(WeightsLostError):
            pool.begin(REQUESTS, GREEDY)()
        assert len(told) == 1
        pool.load(actor.stream_weights())
        assert pool.begin(REQUESTS, GREEDY)() == first
    finally:
        pool.close()


def descendants(process: int) -> list[int]:
    """Return the processes below a process, the newest last."""
    found, below = [], [process]
    while below:
        parent = below.pop()
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):
                lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
                if int(lines["PPid"]) == parent:
                    found.append(int(status.parent.name))
                    below.append(found[-1])
    return sorted(found)


@pytest.mark.slow
def test_a_refused_tensor_is_named_and_the_next_weights_are_taken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = changed(model)
    engine = NativeRanks(model, dims=ParallelDims(tp=2), device="cpu", seconds=60.0)
    try:
        monkeypatch.setattr(engine._first, "load", partial(Wrong.load, engine._first))
        with pytest.raises(ValueError, match="is refused"):
            engine.load(actor.stream_weights())
        monkeypatch.undo()
        with pytest.raises(ValueError, match="not a tensor of the model"):
            engine.load(iter([("x", Tensor([1]))]))
        engine.load(actor.stream_weights())
        expected = actor.generate(PROMPTS, max_new_tokens=5, temperature=0.0)
        assert [answer[0].tokens for answer in engine.begin(REQUESTS, GREEDY)()] == rows_of(expected)
    finally:
        engine.close()
        dist.destroy_process_group()


@pytest.mark.slow
def test_an_engine_that_does_not_start_names_the_reason_and_leaves_no_rank(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    with pytest.raises(ValueError, match="missing"):
        NativeRanks(tmp_path / "missing", dims=ParallelDims(tp=2), device="cpu", seconds=60.0)
    dist.destroy_process_group()
    assert set(descendants(os.getpid())) <= set(before)


def test_the_rank_with_a_cause_is_named() -> None:
    """The others miss its buckets."""

    def late() -> None:
        raise BucketMissed("late")

    errors = None, ValueError("w is too long")
    calls: list[Any] = [SimpleNamespace(exception=lambda *_, error=error: error) for error in errors]
    with pytest.raises(ValueError, match="w is too long"):
        _results(calls, late)
    with pytest.raises(BucketMissed, match="late"):
        _results([SimpleNamespace(exception=lambda *_: None)], late)  # type: ignore[list-item]


def test_a_grid_of_several_models_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="one model on tp, pp and ep"):
        NativeRanks(model, dims=ParallelDims(dp=2))


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staleness": 1},
        {"rollouts.devices": "cpu,cpu", "rollouts.dims": "tp=2"},
        {"dtype": "bfloat16"},  # with --engine.tp-invariant
    ],
    ids=str,
)
@pytest.mark.slow  # `test_in_flight` has a run whose engine is apart
def test_a_run_learns_from_what_it_draws(model: Path, prompts: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    given = {"algorithm": "grpo", "steps": 3, "samples": 2, "rollouts.devices": "cpu", **options}
    flags = ["--json", *["--engine.tp-invariant"] * ("dtype" in options)]
    result = CliRunner().invoke(app, [*arguments(model, prompts, tmp_path / "run", **given), *flags])
    assert result.exit_code == 0, result.output
    records = [record for record in lines(tmp_path / "run") if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3]
    difference = [record["rollout_difference"] for record in records]
    # Drawn with weights that are a step old, log-probs differ.
    assert all(value < 1e-5 for value in (difference[:1] if "staleness" in options else difference))
    assert "dtype" not in options or difference == [0.0] * 3
    assert [record.get("staleness", 0) for record in records] == ([0, 1, 1] if "staleness" in options else [0, 0, 0])
