"""The tokenizer and the endpoint of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

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
