"""`Judge`: a reward from the replies of a model that judges (Zheng et al. 2023, arXiv:2306.05685).

The model of a `ServerJudge` is at a server.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckpt.files import room_for
from rl_train.data.sources import parse_json
from rl_train.engines.json_client import JsonClient, RefusedError
from rl_train.rewards.rubric import Rubric
from rl_train.rewards.worker import Item, Outcome

# The file of a run's judgements, in its folder.
JUDGEMENTS = "judgements.jsonl"
_PORTS = {"http": 80, "https": 443}
# Answers after which the same request may succeed: timeout, conflict, too many requests; and all of 500 and above.
_PASSING = (408, 409, 429)
# Seconds before the second attempt; each further pause is twice as long.
_PAUSE = 1.0


class Judgements:
    """The judgements of a run by their request, also those before it was resumed.

    Args:
        file: Lines of JSON, one for each judgement; read here, and written to by `add`.

    Raises:
        ValueError: A line is no judgement.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._lock, self._outcomes = file, threading.Lock(), dict[str, Outcome]()
        # A kill may cut the last line short; its request is sent again.
        *lines, rest = file.read_bytes().split(b"\n") if file.is_file() else [b""]
        for number, line in enumerate(lines, start=1):
            try:
                record = parse_json(line)
                self._outcomes[record["request"]] = Outcome(float(record["reward"]), record["error"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}, line {number}: not a judgement; remove the line") from None
        if rest:
            with open(file, "r+b") as lines_of_file:
                lines_of_file.truncate(file.stat().st_size - len(rest))

    def get(self, request: str) -> Outcome | None:
        """Return the judgement of a request; None before the first one."""
        return self._outcomes.get(request)

    def add(self, request: str, reply: str, outcome: Outcome) -> None:
        """Keep a judgement."""
        values = {"request": request, "reward": outcome.reward, "error": outcome.error, "reply": reply}
        line = json.dumps(values) + "\n"
        with self._lock:
            self._outcomes[request] = outcome
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with room_for(len(line), self._file), open(self._file, "a", encoding="utf-8") as file:
                file.write(line)


class Judge(ABC):
    """Judges responses by a rubric; the same request is answered once in a run. A subclass has the model.

    Args:
        rubric: The rubric.
        judgements: Judgements of earlier requests.
    """

    def __init__(self, rubric: Rubric, judgements: Judgements) -> None:
        self._rubric, self._judgements = rubric, judgements
        self._lock, self._costs = threading.Lock(), Counter[str]()

    @abstractmethod
    def judged(self, body: str, places: Sequence[int]) -> Future[dict[int, Outcome]]:
        """Start on a request of the responses at these places, JSON; the future has an outcome for each."""

    @abstractmethod
    def close(self) -> None:
        """End all calls."""

    def begin(self, items: Sequence[Item]) -> list[Future[dict[int, Outcome]]]:
        """Start on the items; the futures together have an outcome for each place in `items`."""
        places = dict[str, list[int]]()
        failures: Future[dict[int, Outcome]] = Future()
        failed = dict[int, Outcome]()
        for place, item in enumerate(items):
            try:
                places.setdefault(json.dumps(self._rubric.body(*item)), []).append(place)
            except ValueError as error:
                failed[place] = not_judged(error)
        failures.set_result(failed)
        return [*(self.judged(*request) for request in places.items()), failures]

    def costs(self) -> dict[str, float]:
        """Return what judgements have cost since the last call; see docs/guides/metrics.md."""
        with self._lock:
            costs, self._costs = self._costs, Counter()
        return {
            "judge_calls": costs["calls"],
            "judge_tokens": costs["tokens"],
            "judge_seconds": costs["seconds"],
            "judge_cached": costs["cached"],
            "judge_unreadable": costs["unreadable"],
        }

    def earlier(self, body: str, places: Sequence[int]) -> dict[int, Outcome] | None:
        """Return the outcomes of a request that was answered before; else None."""
        outcome = self._judgements.get(self._digest(body))
        return None if outcome is None else self._outcomes(outcome, places, cached=len(places))

    def conclude(self, body: str, places: Sequence[int], reply: str) -> dict[int, Outcome]:
        """Return the outcomes of a request by the model's reply, and keep the judgement."""
        outcome = self._rubric.outcome(reply)
        self._judgements.add(self._digest(body), reply, outcome)
        return self._outcomes(outcome, places, cached=len(places) - 1)

    def count(self, **costs: float) -> None:
        """Add to the costs."""
        with self._lock:
            self._costs.update(costs)

    def _outcomes(self, outcome: Outcome, places: Sequence[int], cached: int) -> dict[int, Outcome]:
        self.count(cached=cached, unreadable=len(places) if outcome.error is not None else 0)
        return dict.fromkeys(places, outcome)

    def _digest(self, body: str) -> str:
        rubric = self._rubric
        form = [rubric.url, rubric.score, rubric.range, rubric.values, body]
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()


class ServerJudge(Judge):
    """A `Judge` whose model is at a server. Calls wait in threads.

    Args:
        rubric, judgements: See `Judge`; the rubric has a `url`.
        limit: Seconds for each judgement, all its attempts together.
    """

    def __init__(self, rubric: Rubric, judgements: Judgements, *, limit: float) -> None:
        super().__init__(rubric, judgements)
        parts, self._limit = urlsplit(str(rubric.url)), limit
        port = "" if parts.port else f":{_PORTS[parts.scheme]}"
        server = f"{parts.scheme}://{parts.netloc}{port}"
        self._client = JsonClient(server, key=rubric.key, timeout=limit, patience=0.0)
        self._path = f"{parts.path.rstrip('/')}/chat/completions"
        self._threads, self._closed = ThreadPoolExecutor(rubric.concurrent, "judge"), threading.Event()

    def judged(self, body: str, places: Sequence[int]) -> Future[dict[int, Outcome]]:
        """See `Judge`."""
        return self._threads.submit(self._judged, body, places)

    def close(self) -> None:
        """See `Judge`."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _judged(self, body: str, places: Sequence[int]) -> dict[int, Outcome]:
        if (outcomes := self.earlier(body, places)) is not None:
            return outcomes
        try:
            reply = self._ask(json.loads(body))
        except ValueError as error:
            return dict.fromkeys(places, not_judged(error))
        return self.conclude(body, places, reply)

    def _ask(self, body: dict[str, Any]) -> str:
        """Return the judge's reply; ValueError after the last attempt."""
        end, attempt = time.monotonic() + self._limit, 0
        while True:
            began, attempt = time.monotonic(), attempt + 1
            try:
                return self._reply(self._client.call(self._path, body, end=end))
            except RuntimeError as error:
                passes = not isinstance(error, RefusedError) or error.status in _PASSING or error.status >= 500
                pause = _PAUSE * 2 ** (attempt - 1)
                if not passes or attempt >= self._rubric.attempts or time.monotonic() + pause > end:
                    raise ValueError(f"{error} (attempt {attempt})") from error
            finally:
                self.count(calls=1, seconds=time.monotonic() - began)
            if self._closed.wait(pause):
                raise ValueError("the run has ended")

    def _reply(self, answer: Any) -> str:
        """Return the text of an answer; empty where a judge that thinks has used all its tokens."""
        try:
            usage, text = answer.get("usage") or {}, answer["choices"][0]["message"]["content"]
            self.count(tokens=usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0))
            return str(text or "")
        except (LookupError, TypeError, AttributeError) as error:
            shown = f"{json.dumps(answer):.200}"
            raise ValueError(f"the answer has no choices[0].message.content ({error!r}): {shown}") from error


def not_judged(error: ValueError) -> Outcome:
    """Return the outcome of a response without a judgement."""
    return Outcome(0.0, f"was not judged: {error}")
