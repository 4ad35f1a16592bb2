"""A taskset of the package verifiers, and a harness of one reply: `--environment verifiers:sums,taskset.file=FILE`.

The file has the questions that `task.make_task` writes.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf


class Question(vf.TaskData):
    """A sum, with its result."""

    answer: int


class Sum(vf.Task[Question]):
    """Give 1 for a reply whose last number is the result, else 0."""

    @vf.reward
    async def right(self, trace: Any) -> float:
        """Return the reward of a reply."""
        numbers = re.findall(r"-?\d+", trace.assistant_messages[-1].content or "")
        return float(numbers[-1:] == [str(self.data.answer)])


class Config(vf.TasksetConfig):
    """The options of the taskset."""

    file: str = "prompts.jsonl"


class Sums(vf.Taskset[Sum, Config]):
    """The questions of a file."""

    def load(self) -> Iterator[Sum]:
        """Yield the tasks."""
        for number, line in enumerate(Path(self.config.file).read_text().splitlines(), start=1):
            row = json.loads(line)
            prompt = f"Answer with a number. {row['messages'][0]['content']}"
            yield Sum(Question(prompt=prompt, answer=row["answer"], name=f"line {number}"), self.config.task)


class OneReply(vf.Harness[vf.HarnessConfig]):
    """Ask once, in the process of the episodes: harnesses of verifiers start a process for each episode."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Question
    ) -> vf.ProgramResult:
        """Send the question."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=600) as client:
            reply = await client.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(int(reply.status_code != 200), "", reply.text)


__all__ = ["OneReply", "Sums"]
