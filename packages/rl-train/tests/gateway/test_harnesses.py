"""A harness of the registry, `openai-agents`, whose unchanged program trains: its tools, and those of an MCP server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")

from rl_train.trajectories.episodes import batch_of_episodes

from .endpoint import Endpoint


def agents() -> Any:
    """Return the package, which takes a second or two to import."""
    return pytest.importorskip("agents", reason="pip install openai-agents")


def openai() -> Any:
    """Return the package, which takes a second or two to import."""
    return pytest.importorskip("openai", reason="pip install openai")


CALL = 'I ask.<tool_call>{"name": "multiply",  "arguments": {"a": 6, "b": 7}}</tool_call>'


def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


SERVER = '''
from mcp.server import MCPServer

server = MCPServer("calculator")

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b

server.run()
'''


async def solve(base_url: str, question: str, kind: type[Any], **tools: Any) -> str:
    """A program as its users have it."""
    model = kind("policy", openai().AsyncOpenAI(base_url=base_url, api_key="in the URL"))
    agent = agents().Agent(name="calculator", instructions="Use the tool.", model=model, **tools)
    result = await agents().Runner.run(agent, question, run_config=agents().RunConfig(tracing_disabled=True))
    return str(result.final_output)


@pytest.mark.parametrize("api", ["responses", "chat", pytest.param("mcp", marks=pytest.mark.slow)])
def test_an_episode_of_openai_agents(policy: Endpoint, actor: Any, tmp_path: Path, api: str) -> None:
    """Its calls are one sample, with the template's ids around the drawn ones, and the model's log-probs of these."""
    policy.script.say = lambda prompt: CALL if "\n42<|im_end|>" not in prompt else "It is 42."
    policy.gateway.start()
    url = policy.gateway.base_url(policy.session)
    kind = agents().OpenAIChatCompletionsModel if api == "chat" else agents().OpenAIResponsesModel

    async def run() -> str:
        if api != "mcp":
            return await solve(url, "6 * 7?", kind, tools=[agents().function_tool(multiply)])
        (tmp_path / "server.py").write_text(SERVER)
        parameters: Any = {"command": sys.executable, "args": [str(tmp_path / "server.py")]}
        async with agents().mcp.MCPServerStdio(parameters, client_session_timeout_seconds=60) as server:
            return await solve(url, "6 * 7?", kind, mcp_servers=[server])

    assert asyncio.run(run()) == "It is 42."
    first, second = policy.record.recorded
    (sample,) = policy.record.samples
    codec, end = policy.codec, "<|im_end|>"
    shown = codec.decode(sample.tokens, special=True)
    prompt = codec.decode(first.tokens, special=True)
    assert '"name": "multiply"' in prompt
    assert prompt.endswith(f"system\nUse the tool.{end}\n<|im_start|>user\n6 * 7?{end}\n<|im_start|>assistant\n")
    result = f"\n<|im_start|>tool\n42{end}\n<|im_start|>assistant\n"
    assert shown == f"{prompt}{CALL}{end}{result}It is 42.{end}"
    assert second.tokens == first.tokens + first.part.tokens + codec.encode(result)
    batch = batch_of_episodes([[sample]])
    assert batch.tokens[batch.mask].tolist() == first.part.tokens + second.part.tokens
    expected = torch.where(batch.mask, actor.log_probs(batch).log_probs, 0)
    torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
