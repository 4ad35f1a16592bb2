"""The tokenizer and the endpoint of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_models import Actor
from rl_train.data.codec import TextCodec

if TYPE_CHECKING:
    from .endpoint import Endpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    from .endpoint import codec  # some tests of this folder run without the extra

    return codec(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def endpoint(tokenizer: TextCodec) -> Iterator[Endpoint]:
    """An endpoint on a socket, whose model calls a tool and then says the result."""
    from .endpoint import CALL, Endpoint

    endpoint = Endpoint(tokenizer, lambda prompt: CALL if "42<|im_end|>" not in prompt else "It is 42.", seconds=20.0)
    endpoint.gateway.start()
    yield endpoint
    endpoint.gateway.close()


@pytest.fixture(scope="module")
def actor(tokenizer: TextCodec, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer.vocabulary), max_position_embeddings=2000)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return Actor.from_pretrained(folder, device="cpu")


@pytest.fixture
def policy(tokenizer: TextCodec, actor: Any) -> Iterator[Endpoint]:
    """An endpoint that has not started, whose log-probs are those of `actor`."""
    from .endpoint import Endpoint, Policy

    script = type("Policy", (Policy,), {"actor": actor})
    endpoint = Endpoint(tokenizer, lambda prompt: "", script=script, context=2000, seconds=20.0)
    yield endpoint
    endpoint.gateway.close()
