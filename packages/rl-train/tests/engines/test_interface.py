"""Engines that are not vLLM, against the interface alone; tests/test_guides.py runs a user's own."""

from pathlib import Path

import pytest
import torch

from parallel_models import SamplingOptions
from rl_models import Actor
from rl_train.engines import NativeEngine
from rl_train.engines.custom_engine import engine_of, make_engine


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


def test_an_engine_by_the_name_of_its_function() -> None:
    assert engine_of("concurrent.futures:wait")
    for name, message in (
        ("sglang", "rollouts='sglang' must be native, vllm, http://HOST:PORT, or module:function"),
        ("operator:neg", r"it takes \(a, /\); a function for rollouts takes \(actor, options\) and returns a rl_train"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_of(name)
    with pytest.raises(
        ValueError, match=r"rollouts=operator:eq returned bool, which lacks close, generate, generate_async, "
    ):
        make_engine("operator:eq", None, None)  # type: ignore[arg-type]
