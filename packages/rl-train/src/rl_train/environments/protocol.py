"""`Environment`: one conversation with the policy, as a user writes it; and `Step`, its answer to a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_train.rewards.response import Response

# The messages of a chat, or the text of one message of the user.
Messages = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Step:
    """The answer of an environment to a response.

    Attributes:
        messages: The next messages; without any the conversation ends.
        reward: Added to the reward of the conversation.
    """

    messages: Messages = ()
    reward: float = 0.0


class Environment:
    """One conversation with the policy; made without arguments for each sample. A subclass overrides its methods.

    All methods and tools may be `async`. Those that are not run in threads, one thread at a time for an environment. A
    call may take `--rewards.timeout` seconds.

    Attributes:
        tools: Functions that the policy may call, the same ones in all environments of the class; also methods, set in
            `__init__`. The chat template gets their JSON schemas, from signature and docstring
            (`transformers.utils.get_json_schema`).
        tool_format: How the policy writes calls, a key of `rl_train.environments.tools.FORMATS`.
    """

    tools: Sequence[Callable[..., Any]] = ()
    tool_format: str = "hermes"

    def reset(self, row: Mapping[str, Any]) -> Messages | Awaitable[Messages | None] | None:
        """Begin a conversation about a row; return its first messages (None: the row's own "messages")."""
        return None

    def step(self, response: Response) -> Step | Awaitable[Step]:
        """Answer a response without calls of tools, or the last response that the limits allow."""
        return Step()

    def close(self) -> Awaitable[None] | None:
        """Release the resources of the environment; called once, after the last step."""
