"""The loop with an engine of a user's own, written against the interface alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_models import Actor, Batch
from rl_models.workers.whole_batches import WholeBatches
from rl_train.data.prompts import read_prompts
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.plan import Plan
from rl_train.options.options import TrainOptions
from rl_train.rollouts import NativeEngine, RolloutEngine, SamplingOptions


class TransformersEngine:
    """Responses of transformers' own `generate`, from a model that takes each version of the weights."""

    def __init__(self, folder: Path) -> None:
        self.model, self.version, self.calls = AutoModelForCausalLM.from_pretrained(folder), 0, list[int]()

    def generate(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Batch:
        self.calls.append(self.version)
        torch.manual_seed(sampling.seed)
        rows, log_probs = [], []
        for prompt in prompts:
            found = self.model.generate(
                torch.as_tensor(prompt)[None], do_sample=True, max_new_tokens=sampling.max_new_tokens, top_k=0,
                num_return_sequences=sampling.n, eos_token_id=None, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            drawn = torch.stack(found.logits, 1).log_softmax(-1)
            responses = found.sequences[:, len(prompt) :]
            of_responses = drawn.gather(-1, responses[..., None])[..., 0]
            rows += list(found.sequences)
            log_probs += [torch.cat((torch.zeros(len(prompt)), row)) for row in of_responses]
        lengths = [sampling.max_new_tokens] * len(rows)
        return Batch.from_sequences(rows, response_lengths=lengths, log_probs=log_probs)

    def generate_async(self, prompts: Sequence[Tensor | Sequence[int]], sampling: SamplingOptions) -> Future[Batch]:
        future: Future[Batch] = Future()
        future.set_result(self.generate(prompts, sampling))
        return future

    def update_weights(self, actor: Any, version: int) -> None:
        self.model.load_state_dict(dict(actor.stream_weights()), strict=False)
        self.version = version

    def sleep(self) -> None:
        self.model.to("meta")

    def wake(self) -> None:
        self.model.to_empty(device="cpu")

    def close(self) -> None:
        del self.model


def test_a_user_brings_an_engine(model: Path, prompts: Path, tmp_path: Path, in_process: Any) -> None:
    """Its log-probs are those of the policy at every step, so each version has arrived before it draws."""
    options = TrainOptions(
        model=model, prompts=prompts, reward="r:f", out=tmp_path / "run", steps=3, prompts_per_step=4, samples=2,
        max_new_tokens=4, learning_rate=0.05, save_every=0, algorithm="grpo",
    )  # fmt: skip
    options.out.mkdir()
    actor = WholeBatches(Actor.from_pretrained(model, device="cpu"))
    engine: RolloutEngine = TransformersEngine(model)
    plan = Plan(options, read_prompts(prompts, model, 99), [], (), None)
    said: list[Any] = []
    scores = itertools.cycle([0, 1])
    rewards = in_process(lambda *_: next(scores))
    Loop(plan, Models(actor), engine, rewards, lambda make: make(), True, said.append).run()
    assert engine.calls == [0, 1, 2]
    assert engine.version == 3
    differences = [values["rollout_difference"] for values in said if "rollout_difference" in values]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_a_native_engine_has_one_actor(model: Path) -> None:
    actor = Actor.from_pretrained(model, device="cpu")
    engine = NativeEngine(actor, max_sequences=2)
    sampling = SamplingOptions(5, n=3, seed=4)
    batch = engine.generate([[1, 2], [3]], sampling)
    again = engine.generate_async([[1, 2], [3]], sampling).result()
    assert torch.equal(batch.tokens, again.tokens)
    engine.update_weights(actor, 7)
    assert engine.version == 7
    with pytest.raises(ValueError, match="generates with the actor it was built with"):
        engine.update_weights(Actor.from_pretrained(model, device="cpu"), 8)
