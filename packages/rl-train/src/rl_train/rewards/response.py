"""`Response`: the text of a response, with further properties that a reward may read."""

from __future__ import annotations

from collections.abc import Sequence


class Response(str):
    """The text of a response as a reader sees it, without special tokens: a `str`.

    Attributes:
        raw: The text with its special tokens, such as `<|im_end|>`.
        tokens: The token ids.
        finish_reason: "stop" after a token that ends a response, "length" where a limit cut it off.
        environment_reward: The sum of the rewards that an environment of several turns gave; else 0.

    The response of a conversation is the text of all turns of the policy; `raw` has the environment's messages, too.
    """

    def __new__(
        cls,
        text: str,
        raw: str = "",
        tokens: Sequence[int] = (),
        finish_reason: str = "stop",
        environment_reward: float = 0.0,
    ) -> Response:
        """Return the text with the attributes of the class."""
        response = super().__new__(cls, text)
        response.raw, response.tokens, response.finish_reason = raw, list(tokens), finish_reason
        response.environment_reward = environment_reward
        return response

    raw: str
    tokens: list[int]
    finish_reason: str
    environment_reward: float
