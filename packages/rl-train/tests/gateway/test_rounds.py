"""The experts that an engine reports call by call, joined over a conversation, give the recorded log-probs again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_models import SamplingOptions
from rl_models import Actor, Batch
from rl_models.calls import ROUTING
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import Request
from rl_train.gateway.rounds import Round, RoundService
from rl_train.trajectories.episodes import batch_of_episodes
from rl_train.trajectories.recorder import Recorder
from rl_train.trajectories.samples import part_of

LAYERS, EXPERTS, VOCABULARY = 2, 4, 32
SIZES = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": LAYERS, "num_attention_heads": 4}


class Mixture:
    """An engine with keys and values of earlier calls, whose routers choose at random.

    It computes each token once, but reports new experts for all tokens of a prompt, as an engine may that computes a
    part of a prompt again. No expert of the last token is known.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor, self._draws, self._cache = actor, torch.Generator().manual_seed(0), dict[tuple[int, ...], Tensor]()

    def generate(self, round: Round) -> Batch:
        (prompt,), draws = round.prompts, self._draws
        drawn = torch.randint(VOCABULARY, (round.most,), generator=draws).tolist()
        row = prompt + drawn
        reported = torch.rand(len(row), LAYERS, EXPERTS, generator=draws).topk(2).indices.to(torch.int16)
        reported[-1] = -1
        begins = [tuple(row[: length + 1]) for length in range(len(row) - 1)]
        used = [self._cache.setdefault(begin, experts) for begin, experts in zip(begins, reported, strict=False)]
        batch = Batch.from_sequences([row], response_lengths=[len(drawn)])
        log_probs = self._actor.log_probs(batch.with_fields(**{ROUTING: torch.stack([*used, reported[-1]])})).log_probs
        return batch.with_fields(**{"log_probs": log_probs, ROUTING: reported})


def test_experts_of_all_calls_are_replayed(tmp_path: Path) -> None:
    """Three turns, each drawn in several rounds; one pass gives the log-probs of all."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, num_key_value_heads=2, initializer_range=0.2, **SIZES, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    actor = Actor.from_pretrained(tmp_path, device="cpu")
    engine, service, codec = Mixture(actor), RoundService(tokens=2), Any
    prompt = Prompt([1, 2, 3], {}, 1)
    recorder = Recorder(prompt, codec, 40)  # type: ignore[arg-type]
    tokens = prompt.tokens
    for observation in ([], [7, 8], [9]):
        call = recorder.ids([*tokens, *observation])
        future = service.submit(Request(call.tokens, 0), SamplingOptions(max_new_tokens=5))
        while not future.done():
            asked = service.wait(lambda: False)
            assert asked is not None
            service.give(engine.generate(asked), [])
        tokens = recorder.record(call, part_of(future.result())).tokens
    (sample,) = recorder.samples
    batch = batch_of_episodes([[sample]])
    assert int(batch.mask.sum()) == 15
    assert (batch[ROUTING] >= 0).all(-1).all(-1).tolist() == [True] * 20 + [False]
    recorded = batch["log_probs"][batch.mask]
    torch.testing.assert_close(actor.log_probs(batch).log_probs[batch.mask], recorded, rtol=0, atol=1e-5)
    free = actor.log_probs(replace(batch, fields={})).log_probs[batch.mask]
    assert (free - recorded).abs().max() > 0.1
