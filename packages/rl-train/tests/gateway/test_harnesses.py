"""A harness of the registry, `openai-agents`, whose unchanged program trains: its tools, and those of an MCP server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("uvicorn")
agents = pytest.importorskip("agents", reason="pip install openai-agents")

from openai import AsyncOpenAI  # noqa: E402

from parallel_models import SamplingOptions  # noqa: E402
from rl_models import Actor, Batch  # noqa: E402
from rl_train.data.codec import TextCodec  # noqa: E402
from rl_train.engines.interface import Request, Response  # noqa: E402
from rl_train.trajectories.episodes import batch_of_episodes  # noqa: E402

from .endpoint import Endpoint, Script  # noqa: E402

CALL = 'I ask.<tool_call>{"name": "multiply",  "arguments": {"a": 6, "b": 7}}</tool_call>'
CONTEXT = 2000


@agents.function_tool
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
    model = kind("policy", AsyncOpenAI(base_url=base_url, api_key="in the URL"))
    agent = agents.Agent(name="calculator", instructions="Use the tool.", model=model, **tools)
    result = await agents.Runner.run(agent, question, run_config=agents.RunConfig(tracing_disabled=True))
    return str(result.final_output)


class Policy(Script):
    """A script whose log-probs are those of a model."""

    actor: Any

    def submit(self, request: Request, sampling: SamplingOptions) -> Future[Response]:
        tokens = super().submit(request, sampling).result().tokens
        batch = Batch.from_sequences([request.prompt + tokens], response_lengths=[len(tokens)])
        log_probs = self.actor.log_probs(batch).log_probs[batch.mask].tolist()
        future: Future[Response] = Future()
        future.set_result(Response(tokens, log_probs, versions=[0] * len(tokens)))
        return future


@pytest.fixture(scope="module")
def actor(tokenizer: TextCodec, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer.vocabulary), max_position_embeddings=CONTEXT)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return Actor.from_pretrained(folder, device="cpu")


@pytest.fixture
def policy(tokenizer: TextCodec, actor: Any) -> Iterator[Endpoint]:
    say = lambda prompt: CALL if "\n42<|im_end|>" not in prompt else "It is 42."  # noqa: E731
    script = type("Policy", (Policy,), {"actor": actor})
    endpoint = Endpoint(tokenizer, say, script=script, context=CONTEXT, seconds=20.0)
    endpoint.gateway.start()
    yield endpoint
    endpoint.gateway.close()


@pytest.mark.parametrize("api", ["responses", "chat", pytest.param("mcp", marks=pytest.mark.slow)])
def test_an_episode_of_openai_agents(policy: Endpoint, actor: Any, tmp_path: Path, api: str) -> None:
    """Its calls are one sample, with the template's ids around the drawn ones, and the model's log-probs of these."""
    url = policy.gateway.base_url(policy.session)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel

    async def run() -> str:
        if api != "mcp":
            return await solve(url, "6 * 7?", kind, tools=[multiply])
        (tmp_path / "server.py").write_text(SERVER)
        parameters: Any = {"command": sys.executable, "args": [str(tmp_path / "server.py")]}
        async with agents.mcp.MCPServerStdio(parameters, client_session_timeout_seconds=60) as server:
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
