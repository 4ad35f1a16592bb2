"""An endpoint of the tests: a service that says what a script says, and a tokenizer with one token a byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import Request, Response
from rl_train.gateway import Gateway
from rl_train.gateway.sessions import Limits, Session
from rl_train.trajectories.recorder import Call, RecordedCall, Recorder
from rl_train.trajectories.samples import Part

from ..data.chat_families import save_tokenizer

# ChatML with tools and their calls, as Hermes and Qwen have them.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 400
QUESTION = {"role": "user", "content": "6*7?"}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = 'I ask.<tool_call>{"name": "multiply", "arguments": {"a": 6}}</tool_call>'


def codec(folder: Path) -> TextCodec:
    """Return the tokenizer, saved in a folder."""
    save_tokenizer(folder, TEMPLATE)
    return TextCodec(folder)


class Script:
    """A service: `say` maps the text of a prompt to the text of the response, which ends with `<|im_end|>`."""

    def __init__(self, tokenizer: TextCodec, say: Callable[[str], str]) -> None:
        self.codec, self.say = tokenizer, say
        self.requests, self.open = list[tuple[Request, SamplingOptions]](), list[Future[Response]]()
        self.answers = True

    def submit(self, request: Request, sampling: SamplingOptions) -> Future[Response]:
        self.requests.append((request, sampling))
        future: Future[Response] = Future()
        if not self.answers:
            self.open.append(future)
            return future
        begin, middle, end = self.codec.decode(request.prompt, special=True).rpartition("<|im_start|>assistant\n")
        whole = [*self.codec.encode(self.say(begin + middle)), self.codec.vocabulary["<|im_end|>"]]
        drawn = len(self.codec.encode(end))
        assert sampling.max_length is not None
        tokens = whole[drawn : drawn + sampling.max_length - len(request.prompt)]
        log_probs = [-(drawn + n) / 8 for n in range(len(tokens))]
        kept = [[token, 0] for token in tokens] if sampling.keep_sampling_mask else None
        future.set_result(Response(tokens, log_probs, kept, versions=[3] * len(tokens)))
        return future


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


class Recorded(NamedTuple):
    """A call and what was drawn."""

    tokens: list[int]
    part: Part
    answer: Any
    truncated: bool


class Record(Recorder):
    """Keeps the arguments of `record`, too."""

    def __init__(self, tokenizer: TextCodec, limit: int) -> None:
        super().__init__(Prompt([0], {}, 1), tokenizer, limit)
        self.recorded = list[Recorded]()

    def record(self, call: Call, part: Part, answer: Any = None, *, truncated: bool = False) -> RecordedCall:
        self.recorded.append(Recorded(call.tokens, part, answer, truncated))
        return super().record(call, part, answer, truncated=truncated)


class Endpoint:
    """A gateway over a script, with one open session."""

    def __init__(
        self,
        tokenizer: TextCodec,
        say: Callable[[str], str],
        limits: Limits | None = None,
        script: type[Script] | None = None,
        **options: Any,
    ) -> None:
        self.codec, self.script = tokenizer, (script or Script)(tokenizer, say)
        stop_ids = [tokenizer.vocabulary["<|im_end|>"]]
        sampling = SamplingOptions(max_new_tokens=200, temperature=0.5, stop_ids=stop_ids)
        options = {"context": CONTEXT, **options}
        self.gateway = Gateway(self.script, tokenizer, **options)
        self.record = Record(tokenizer, options["context"])
        self.session = self.gateway.add(Session(self.record, sampling, limits=limits or Limits()))

    def post(self, path: str, body: Any, key: str | None = None, **options: Any) -> Any:
        """Return the answer of the ASGI application to a request, in this process."""
        return self.request("POST", path, key, content=body if isinstance(body, bytes) else json.dumps(body), **options)

    def request(self, method: str, path: str, key: str | None = None, **options: Any) -> Any:
        """Return the answer to a request, or raise what uvicorn would print."""

        async def run() -> Any:
            transport = httpx2.ASGITransport(self.gateway.app())
            headers = {"authorization": f"Bearer {self.session.key if key is None else key}"}
            headers |= options.pop("headers", {})
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, headers=headers, **options)

        return asyncio.run(run())
