"""A server of vLLM as an engine: what it draws, its weights, its errors, and a run with it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from parallel_models import SamplingOptions
from rl_models import Actor
from rl_train.cli.commands import app
from rl_train.engines import Native, json_client, vllm_server
from rl_train.engines.interface import Request, WeightsLostError
from rl_train.engines.json_client import JsonClient, RefusedError
from rl_train.engines.vllm_server import VllmServer, server_facts
from rl_train.weight_sync.transport import BucketMissed

from ..loop.test_train import arguments, lines
from .server import Server
from .test_separate import GREEDY, PROMPTS, REQUESTS, changed, rows_of


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with Server(model) as server:
        yield server
        server.shutdown()


@pytest.fixture
def engine(server: Server, model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    engine = VllmServer(server.url, tmp_path / "weights", timeout=5, patience=0.2)
    engine.load(Actor.from_pretrained(model, device="cpu").stream_weights())
    server.calls.clear()
    yield engine
    engine.close()


def test_it_draws_with_the_weights_that_the_server_loads_from_the_folder(
    server: Server, engine: VllmServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_FILE_BYTES", 5000)
    actor = changed(model)
    engine.load(actor.stream_weights())
    paths = [path.partition("?")[0] for path, _ in server.calls]
    assert [path for path in paths if path not in ("/server_info", "/v1/models")] == [
        "/v1/completions", "/pause", "/collective_rpc", "/reset_prefix_cache", "/resume",
    ]  # fmt: skip
    weights = dict(actor.stream_weights())
    assert weights.keys() == server.weights.keys()
    assert all(torch.equal(weights[name], server.weights[name]) for name in weights)
    assert not (tmp_path / "weights").exists()

    answers = engine.begin(REQUESTS, GREEDY)()
    expected = actor.generate(PROMPTS, max_new_tokens=5, temperature=0.0)
    assert [answer[0].tokens for answer in answers] == rows_of(expected)
    log_probs = torch.tensor([answer[0].log_probs for answer in answers]).flatten()
    torch.testing.assert_close(log_probs, expected["log_probs"][expected.mask])


def test_workers_with_the_extension_receive_the_weights(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers, in groups that stay; and again after the server has started again."""
    server.parallel["worker_extension_cls"] = vllm_server._EXTENSION
    actor = changed(model)
    weights = dict(actor.stream_weights())
    engine = VllmServer(server.url, tmp_path / "weights", timeout=20, patience=0.2)
    for process, receivers in (("one", 1), ("one", 1), ("two", 2)):
        server.process = process
        server.weights = {}
        engine.load(actor.stream_weights())
        assert weights.keys() == server.weights.keys()
        assert all(torch.equal(weights[name], server.weights[name]) for name in weights)
        methods = [body["method"] for path, body in server.calls if path == "/collective_rpc"]
        assert methods.count("weight_receiver") == receivers
        assert not server.paused
    sync = "receive_weights_as_text"
    assert methods == ["weight_receiver", sync, sync, "weight_receiver", sync]
    assert not (tmp_path / "weights").exists()
    answers = engine.begin(REQUESTS, GREEDY)()
    assert [a[0].tokens for a in answers] == rows_of(actor.generate(PROMPTS, max_new_tokens=5, temperature=0.0))

    def fails(named_tensors: Any) -> None:
        raise ValueError(f"no such parameter: {next(iter(named_tensors))[0]}")

    with monkeypatch.context() as patch:
        patch.setattr(server.workers[1], "load", fails)
        with pytest.raises(RuntimeError, match=r"worker of the server .* \(ValueError: no such parameter: .*\)"):
            engine.load(actor.stream_weights())
    assert server.paused
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.begin(REQUESTS, GREEDY)
    engine.load(actor.stream_weights())
    assert engine.begin(REQUESTS, GREEDY)() == answers

    def restarts(body: dict[str, Any]) -> Any:
        server.process = "three"
        for worker in server.workers:
            worker._weight_receiver.close()
        raise ConnectionError

    server.answers["/collective_rpc"] = restarts
    with pytest.raises(WeightsLostError, match="has started again"):
        engine.load(actor.stream_weights())
    engine.close()


def test_the_worker_with_a_cause_is_named(engine: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others miss its buckets."""
    answers = [["BucketMissed", "late"], [], ["ValueError", "w is too long"]]
    monkeypatch.setattr(engine._workers, "call", lambda *_: {"results": answers})
    with pytest.raises(RuntimeError, match=r"does not take the weights \(ValueError: w is too long\)"):
        engine.receive([])
    answers[2] = []
    with pytest.raises(BucketMissed, match=r"does not take the weights \(BucketMissed: late\)"):
        engine.receive([])


def test_data_parallel_servers_load_a_folder(server: Server, engine: VllmServer, model: Path) -> None:
    server.parallel |= {"worker_extension_cls": vllm_server._EXTENSION, "data_parallel_size": 2}
    engine.load(changed(model).stream_weights())
    assert [body["method"] for path, body in server.calls if path == "/collective_rpc"] == ["reload_weights"]


def test_each_request_has_its_seed_and_states_all_options(server: Server, engine: VllmServer) -> None:
    sampling = SamplingOptions(5, n=3, temperature=0.7, stop_ids=[4])
    answers = engine.begin(REQUESTS, sampling)()
    alone = engine.begin(REQUESTS[2:3], sampling)()
    assert alone == answers[2:3] == server.engine.begin(REQUESTS[2:3], sampling)()
    assert len({tuple(response.tokens) for answer in answers for response in answer}) > len(REQUESTS)
    bodies = [body for path, body in server.calls if path == "/v1/completions"][: len(REQUESTS)]
    assert sorted(body["seed"] for body in bodies) == list(range(len(REQUESTS)))
    further = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "top_k": 0}
    for body in bodies:
        assert body.items() >= further.items()
        assert body["ignore_eos"]
        assert not body["add_special_tokens"]
    greedy = SamplingOptions(5, n=3, temperature=0.0)
    assert engine.begin(REQUESTS[:1], greedy)()[0][1:] == engine.begin(REQUESTS[:1], GREEDY)()[0] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1]}, "5 log-probs for 1 tokens"),
        ({"prompt_token_ids": [0, 1]}, r"continued \[0, 1\] in place of"),
        ({"finish_reason": "abort"}, "ended a response with 'abort'"),
        ({"logprobs": {"token_logprobs": [-1.0, *[-9999.0] * 4]}}, "token 2 of a response .* -9999.0, NaN or infinite"),
        ({"logprobs": None}, "no token ids or log-probs"),
    ],
)
def test_an_incomplete_answer_is_refused(
    server: Server, engine: VllmServer, change: dict[str, Any], message: str
) -> None:
    server.answers["/v1/completions"] = lambda body: {"choices": [server.choices(body)[0] | change]}
    with pytest.raises(RuntimeError, match=message):
        engine.begin(REQUESTS, GREEDY)()


def test_errors_name_the_server_and_end_the_other_requests(server: Server, engine: VllmServer) -> None:
    server.answers["/v1/completions"] = 500
    with pytest.raises(RefusedError, match=rf"{server.url}/v1/completions answered 500: out of memory"):
        engine.begin(REQUESTS, GREEDY)()

    def slow(body: dict[str, Any]) -> Any:
        if body["prompt"] == PROMPTS[3]:
            return {"choices": []}
        time.sleep(3)

    server.answers["/v1/completions"] = slow
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="0 responses instead of 1"):
        engine.begin(REQUESTS, GREEDY)()
    assert time.monotonic() - begin < 2
    server.answers["/v1/completions"] = 0
    with pytest.raises(RuntimeError, match=rf"{server.url}/v1/completions cannot be reached .*; start the server"):
        engine.begin(REQUESTS, GREEDY)()


def test_a_failed_request_ends_the_requests_behind_it(server: Server, model: Path, tmp_path: Path) -> None:
    engine = VllmServer(server.url, tmp_path / "weights", timeout=5, patience=1, max_sequences=1)
    engine.load(Actor.from_pretrained(model, device="cpu").stream_weights())
    server.calls.clear()

    def slow(body: dict[str, Any]) -> Any:
        time.sleep(0.05)
        return {"choices": [] if body["prompt"] == PROMPTS[0] else server.choices(body)}

    server.answers["/v1/completions"] = slow
    with pytest.raises(RuntimeError, match="0 responses instead of 1"):
        engine.begin(REQUESTS, GREEDY)()
    time.sleep(0.3)
    assert sum(path == "/v1/completions" for path, _ in server.calls) <= 2


def test_a_lost_connection_is_repeated_and_a_slow_answer_is_awaited(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_client, "_CONNECT", 0.1)
    engine = VllmServer(server.url, tmp_path / "weights", timeout=5, patience=60)
    engine.load(Actor.from_pretrained(model, device="cpu").stream_weights())
    expected = engine.begin(REQUESTS, GREEDY)()
    server.answers["/v1/completions"] = 0
    waiting = engine.begin(REQUESTS, GREEDY)
    time.sleep(0.1)
    server.answers["/v1/completions"] = lambda body: time.sleep(0.2) or {"choices": server.choices(body)}
    assert waiting() == expected
    engine.close()


def test_a_server_that_started_again_needs_its_weights(server: Server, engine: VllmServer, model: Path) -> None:
    waiting = engine.begin(REQUESTS, GREEDY)
    server.process = "two"
    with pytest.raises(WeightsLostError, match="has started again"):
        waiting()
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.begin(REQUESTS, GREEDY)
    engine.load(Actor.from_pretrained(model, device="cpu").stream_weights())
    assert len(engine.begin(REQUESTS, GREEDY)()) == len(REQUESTS)

    def restarts(body: dict[str, Any]) -> Any:
        server.process = "three"
        return {"status": "ok"}

    server.answers["/resume"] = restarts
    with pytest.raises(WeightsLostError, match="has started again"):
        engine.load(Actor.from_pretrained(model, device="cpu").stream_weights())


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/collective_rpc", 500, "must be the same folder on its machine.* answered 500: out of memory"),
        ("/reset_prefix_cache", lambda body: {"success": False}, "has not emptied its prefix cache"),
        ("/pause", 500, "/pause.* answered 500"),
    ],
)
def test_a_weight_sync_that_fails_leaves_the_engine_refusing(
    server: Server, engine: VllmServer, model: Path, tmp_path: Path, path: str, answer: Any, message: str
) -> None:
    server.answers[path] = answer
    with pytest.raises(RuntimeError, match=message):
        engine.load(changed(model).stream_weights())
    assert not (tmp_path / "weights").exists()
    assert ("/resume", {}) not in server.calls
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.begin(REQUESTS, GREEDY)


@pytest.mark.parametrize(
    ("log_probs", "sampling", "message"),
    [
        ("processed_logprobs", {"temperature": 0.7}, ""),
        ("processed_logprobs", {"top_k": 4}, "after top_k=4 and top_p=1.0; leave both out"),
        ("processed_logprobs", {"top_p": 0.9}, "after top_k=None and top_p=0.9"),
        ("processed_logprobs", {"top_p": 0.9, "log_probs": False}, ""),
        ("processed_logprobs", {"top_k": 19, "keep_sampling_mask": True}, ""),
        ("processed_logprobs", {"top_k": 20, "keep_sampling_mask": True}, "reports 20 log-probs .* --max-logprobs -1"),
        ("processed_logprobs", {"top_p": 0.9, "keep_sampling_mask": True}, "need top_k, which bounds"),
        ("raw_logprobs", {"top_k": 4, "keep_sampling_mask": True}, "log-probs after the truncation; start it with"),
        ("raw_logprobs", {"top_p": 0.9}, ""),
        ("raw_logprobs", {"temperature": 0.7}, "not at temperature=0.7; start it with"),
        ("raw_logits", {}, "start it with --logprobs-mode processed_logprobs"),
    ],
)
def test_log_probs_are_those_at_the_temperature_or_refused(
    server: Server, log_probs: str, sampling: dict[str, Any], message: str
) -> None:
    server.settings["logprobs_mode"] = log_probs
    facts = server_facts(JsonClient(server.url))
    if not message:
        facts.check(server.url, 30, 24, SamplingOptions(5, **sampling))
        return
    with pytest.raises(ValueError, match=rf"{server.url} has --logprobs-mode {log_probs}: .*{message}"):
        facts.check(server.url, 30, 24, SamplingOptions(5, **sampling))


@pytest.mark.parametrize("kind", [{"top_k": 3}, {"top_k": 9, "top_p": 0.5}])
def test_sampling_masks_are_the_tokens_with_a_log_prob(
    server: Server, engine: VllmServer, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """Also where the first answer is too short to show that no kept token is missing."""
    monkeypatch.setattr(vllm_server, "_MORE_LOG_PROBS", -2 * kind["top_k"] + 2)
    sampling = SamplingOptions(5, n=2, temperature=0.7, keep_sampling_mask=True, **kind)
    answers = engine.begin(REQUESTS, sampling)()
    assert answers == [server.engine.begin([request], sampling)()[0] for request in REQUESTS]
    widths = {body["logprobs"] for path, body in server.calls if path == "/v1/completions"}
    assert widths >= {2, 8}
    server.settings["max_logprobs"] = 4
    monkeypatch.setattr(vllm_server, "_MORE_LOG_PROBS", -4)
    engine.load(dict(server.weights).items())
    server.answers["/v1/completions"] = lambda body: {"choices": server.choices(body | {"top_k": 8, "top_p": 1.0})}
    with pytest.raises(RuntimeError, match="kept more than 4 tokens; start it with --max-logprobs -1"):
        engine.begin(REQUESTS, SamplingOptions(5, top_k=3, keep_sampling_mask=True))()


def test_an_evaluation_with_top_p_needs_no_log_probs(server: Server, engine: VllmServer) -> None:
    sampling = SamplingOptions(5, top_p=0.6, log_probs=False)
    answers = engine.begin(REQUESTS, sampling)()
    assert [a[0].tokens for a in answers] == [a[0].tokens for a in server.engine.begin(REQUESTS, sampling)()]
    assert all(math.isnan(value) for answer in answers for value in answer[0].log_probs)
    plain = replace(sampling, top_p=1.0)
    assert not any(math.isnan(value) for answer in engine.begin(REQUESTS, plain)() for value in answer[0].log_probs)


def test_the_engine_refuses_what_does_not_fit(engine: VllmServer) -> None:
    with pytest.raises(ValueError, match=r"25 tokens, more than .* 24; start it with --max-model-len 25"):
        engine.begin(REQUESTS, SamplingOptions(22))
    with pytest.raises(ValueError, match="images do not go over HTTP"):
        engine.begin([Request([1], 0, ("image",), [1])], GREEDY)
    with pytest.raises(ValueError, match="sampling masks need top_k"):
        engine.begin(REQUESTS, SamplingOptions(5, top_p=0.5, keep_sampling_mask=True))


@pytest.mark.usefixtures("folder_of_rewards")
def test_a_run_with_a_server_that_starts_again(server: Server, model: Path, prompts: Path, tmp_path: Path) -> None:
    initial = Native(model, device="cpu")

    def restarts(body: dict[str, Any]) -> Any:
        reloads = sum(path == "/collective_rpc" for path, _ in server.calls)
        if reloads == 2 and server.process == "one":  # in step 2, with the weights of step 1
            server.process, server.engine = "two", initial
        return {"choices": server.choices(body)}

    server.answers["/v1/completions"] = restarts
    small = {"steps": 2, "prompts_per_step": 2, "samples": 2, "max_new_tokens": 3}
    given = arguments(model, prompts, tmp_path / "run", rollouts=server.url, **small)
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert [record["rollout_difference"] < 1e-5 for record in lines(tmp_path / "run")] == [True, True]
    # At the start, after each step, and after the server has started again.
    assert sum(path == "/collective_rpc" for path, _ in server.calls) == 4
    trained = load_file(tmp_path / "run" / "actor" / "model.safetensors")
    assert trained.keys() == server.weights.keys()
    assert all(torch.equal(trained[name], server.weights[name]) for name in trained)
    assert not (tmp_path / "run" / "weights-for-server").exists()


@pytest.mark.usefixtures("folder_of_rewards")
def test_a_server_that_does_not_fit_is_refused_before_the_run(
    server: Server, model: Path, prompts: Path, tmp_path: Path
) -> None:
    for vocab_size, change, message in (
        (31, {}, "has a vocabulary of 31, and the policy one of 30"),
        (30, {"max_model_len": 4}, "more than the longest sequence of the server"),
        (30, {"logprobs_mode": "raw_logits"}, "start it with --logprobs-mode processed_logprobs"),
    ):
        before, server.vocab_size = dict(server.settings), vocab_size
        server.settings |= change
        result = CliRunner().invoke(app, arguments(model, prompts, tmp_path / "run", rollouts=server.url))
        server.settings = before
        assert result.exit_code != 0
        assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (404, "answered 404: .*; start it with VLLM_SERVER_DEV_MODE=1"),
        (401, "answered 401: .*; set VLLM_API_KEY"),
        (lambda body: {}, "answers as no server of vLLM"),
        (0, "cannot be reached"),
    ],
)
def test_a_server_that_cannot_serve_is_named_with_the_fix(server: Server, answer: Any, message: str) -> None:
    server.answers["/server_info"] = answer
    with pytest.raises(ValueError, match=f"{server.url}.* {message}|{server.url} {message}"):
        server_facts(JsonClient(server.url, patience=0))
