"""A server of vLLM reads sequences as a teacher: its log-probs beside those of transformers, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_train.engines.json_client import RefusedError
from rl_train.engines.reading_server import ReadingServer

from .server import Server

SEQUENCES = [[1, 4, 7], [3], [5, 6, 2, 9, 9, 1], [8, 2]]


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with Server(model) as server:
        yield server
        server.shutdown()


@pytest.mark.parametrize("top_k", [0, 3])
def test_log_probs_are_those_of_the_servers_model(server: Server, model: Path, top_k: int) -> None:
    reader = ReadingServer(server.url, 30, timeout=5, patience=0.2)
    for tokens, result in zip(SEQUENCES, reader.read(SEQUENCES, top_k), strict=True):
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([tokens])).logits[0, :-1]
        log_probs = logits.detach().log_softmax(-1)
        drawn = log_probs.gather(1, torch.tensor(tokens[1:]).view(-1, 1))[:, 0]
        torch.testing.assert_close(result.log_probs, torch.cat((torch.zeros(1), drawn)))
        assert result.top_ids.shape == (len(tokens), top_k + 1)
        assert result.top_ids[0].tolist() == [-1] * (top_k + 1)
        for row, ids, values in zip(log_probs, result.top_ids[1:], result.top_log_probs[1:], strict=True):
            listed = ids[ids >= 0]
            assert set(row.topk(top_k).indices.tolist()) <= set(listed.tolist())
            torch.testing.assert_close(values[ids >= 0], row[listed])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_logprobs": None}, "answers with no log-probs of a prompt"),
        ({"prompt_logprobs": [None]}, "has log-probs of 1 of 3 tokens"),
        ({"prompt_token_ids": [0, 1]}, r"has read \[0, 1\] in place of \[1, 4, 7\]"),
    ],
)
def test_an_incomplete_answer_is_refused(server: Server, change: dict[str, Any], message: str) -> None:
    reader = ReadingServer(server.url, 30, timeout=5, patience=0.2)
    server.answers["/v1/completions"] = lambda body: {"choices": [server.choices(body)[0] | change]}
    with pytest.raises(RuntimeError, match=message):
        reader.read(SEQUENCES[:1], 2)


def test_a_server_that_cannot_teach_is_refused_before_the_run(server: Server) -> None:
    reader = ReadingServer(server.url, 30, timeout=5, patience=0.2)
    reader.check(23, 4)
    with pytest.raises(ValueError, match=r"have 24 tokens, .* reads up to 23; start it with --max-model-len 25"):
        reader.check(24, 4)
    server.answers["/v1/completions"] = 400
    with pytest.raises(ValueError, match="answered 400: out of memory; start it with --max-logprobs 4, or give"):
        reader.check(23, 4)
    with pytest.raises(RefusedError, match="answered 400"):
        reader.read(SEQUENCES, 4)
    with pytest.raises(ValueError, match="has a vocabulary of 30, and the policy one of 31; take a teacher with"):
        ReadingServer(server.url, 31)
    server.answers["/v1/models"] = lambda body: {"data": []}
    with pytest.raises(ValueError, match=r"answers as no server of vLLM .*; start `vllm serve TEACHER`"):
        ReadingServer(server.url, 30)
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9/v1/models cannot be reached"):
        ReadingServer("http://127.0.0.1:9", 30, patience=0.0)
