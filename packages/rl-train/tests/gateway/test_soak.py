"""Many agents for a while, some of which, with engines and processes of agents, are killed: nothing is lost or left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from parallel_models import SamplingOptions
from rl_train.agents.pool import Agents
from rl_train.agents.worker import Ended
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.engines import InFlightPool, processes
from rl_train.engines.interface import Request, Response, Step, WeightsLostError
from rl_train.gateway import Gateway, PoolService, Session
from rl_train.trajectories.recorder import Recorder
from rl_train.trajectories.samples import batch_of
from rl_train.weight_sync.sender import wait_for_all

from ..engines.test_separate import descendants

CONTEXT = 1000
# The failures that an episode may have.
FAILURES = r"raised KeyError: 'gone'|ended its process"
# Seconds of an episode that hangs by its row, and of another one, in which a request without an end shows itself.
HANGING, LONGEST = 5.0, 120.0


class Letters:
    """A `StreamingEngine` that draws a letter of each response in a step, and an end after as many as the seed says."""

    def __init__(self, letter: int, end: int) -> None:
        self._letter, self._end, self._version, self._coming = letter, end, 0, 0
        self._rows = dict[int, tuple[list[int], int]]()

    def add(self, key: int, request: Request, sampling: SamplingOptions) -> None:
        length = min(sampling.limit(len(request.prompt)), 3 + request.seed % 30)
        self._rows[key] = [], length

    def step(self) -> Step:
        time.sleep(0.002)
        begun = [(key, self._version) for key, (versions, _) in self._rows.items() if not versions]
        complete = []
        for key, (versions, length) in list(self._rows.items()):
            versions.append(self._version)
            if len(versions) == length:
                tokens, log_probs = [self._letter] * (length - 1) + [self._end], [-float(n) for n in range(length)]
                complete.append((key, [Response(tokens, log_probs, versions=versions)]))
                del self._rows[key]
        return Step(begun, complete)

    def cancel(self, key: int) -> None:
        self._rows.pop(key, None)

    def expect(self, version: int) -> None:
        self._coming = version

    def receivers(self) -> list[tuple[str, str]]:
        return [("cpu", "letters")]

    def receive(self, messages: Any) -> None:
        self._version = self._coming


class Soak:
    """Episodes, as many at a time, until a moment; kills engines and processes of agents meanwhile.

    Args:
        ends: A file for the ends of the clients' requests.

    Attributes:
        counts: What happened, by name.
        problems: What must not happen.
    """

    def __init__(self, codec: TextCodec, concurrent: int, ends: Path) -> None:
        self.codec, self._concurrent, self._ends = codec, concurrent, ends
        self.counts, self.problems = Counter[str](), list[str]()
        self._open, self._changed = set[int](), threading.Condition()
        self._stop_ids = [codec.vocabulary["<|im_end|>"]]
        make = partial(Letters, codec.vocabulary["a"], *self._stop_ids)
        self.pool = InFlightPool(processes(make, ["", ""], silence=30.0), tell=lambda text: self._count("lost engines"))
        self.service = PoolService(self.pool)
        self.gateway = Gateway(self.service, codec, context=CONTEXT, seconds=60.0)
        self.gateway.start()
        options: Any = SimpleNamespace(
            agent_function="programs:wander",
            agent_command=None,
            agents=SimpleNamespace(concurrent=concurrent, timeout=LONGEST, image=None),
            collective_timeout=60,
        )
        self.agents = Agents(options, workers=4)

    def run(self, seconds: float, kill_every: float) -> None:
        """Run episodes for so long."""
        ended, number = time.monotonic() + seconds, 0
        syncs = threading.Thread(target=self._sync, args=(lambda: time.monotonic() > ended and not self._open,))
        syncs.start()
        kill_at, draws = time.monotonic() + kill_every, random.Random(0)
        while time.monotonic() < ended:
            with self._changed:
                self._changed.wait_for(lambda: len(self._open) < self._concurrent, timeout=0.1)
                if len(self._open) >= self._concurrent:
                    continue
                self._open.add(number)
            self._begin(number)
            number += 1
            if time.monotonic() > kill_at:
                kill_at += kill_every
                # A pool gives up an engine that is lost three times without an answer in between.
                losses = self.pool.losses_in_a_row
                engines = [engine for n, engine in enumerate(self.pool.engines) if not losses[n]]
                self._kill(draws.choice([*engines, *self.agents._processes]))
        with self._changed:
            end = self._changed.wait_for(lambda: not self._open, timeout=2 * LONGEST)
            assert end, f"episodes {self._open} do not end"
        syncs.join(30)
        assert not syncs.is_alive()

    def request_ends(self) -> Counter[str]:
        """Return how the clients' requests ended, by name."""
        return Counter(self._ends.read_text().splitlines())

    def close(self) -> None:
        self.agents.close()
        self.gateway.close()
        self.service.close()
        self.pool.close()

    def _begin(self, number: int) -> None:
        session = Session(
            Recorder(Prompt([1], {}, 1), self.codec, CONTEXT),
            SamplingOptions(max_new_tokens=200, stop_ids=self._stop_ids),
            seed=number,
        )

        def begin() -> Any:
            self.gateway.add(session)
            row = {"seed": number, "hangs": hangs(number), "ends": str(self._ends)}
            run = self.agents.run_of(self.gateway.base_url(session), session.key, row)
            return run._replace(limit=HANGING) if hangs(number) else run

        self.agents.run(begin).add_done_callback(lambda end: self._ended(number, session, end.result()))

    def _ended(self, number: int, session: Session, end: Ended) -> None:
        try:
            self.gateway.end(session)
            # As a run does, look at the record after the session has ended in the thread of the endpoint.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.gateway._loop).result(30)  # type: ignore[arg-type]
            self._check(number, session, end)
        except BaseException as error:
            self.problems.append(f"episode {number}: {error!r}")
        finally:
            with self._changed:
                self._open.discard(number)
                self._changed.notify_all()

    def _check(self, number: int, session: Session, end: Ended) -> None:
        recorder, letter = session.recorder, self.codec.vocabulary["a"]
        drawn = sum(end - begin for sample in recorder.samples for begin, end, _ in sample.parts)
        batch = batch_of(recorder.samples)
        letters = int((batch.tokens[batch.mask] == letter).sum())
        self._count("episodes")
        self._count("calls", len(recorder.calls))
        if (end.reward is None) == (end.error is None):
            self.problems.append(f"episode {number} ended as {end}")
        if int(batch.mask.sum()) != drawn or sum(len(sample.parts) for sample in recorder.samples) != len(
            recorder.calls
        ):
            self.problems.append(
                f"episode {number}: {drawn} tokens, {len(recorder.calls)} calls, other numbers in masks"
            )
        if end.error is not None:
            self._count(re.sub(r"[\d(].*", "", end.error).strip())
            if not re.search(f"{FAILURES}|took longer than" if hangs(number) else FAILURES, end.error):
                self.problems.append(f"episode {number}: {end.error}")
        elif end.reward is not None and letters < end.reward:
            self.problems.append(f"episode {number} got {end.reward} letters, and {letters} are recorded")
        elif end.reward is not None:
            self._count("answers that a client left", letters > end.reward)

    def _sync(self, ended: Callable[[], bool]) -> None:
        """Bring weights every second, and where requests wait for them."""

        def send(engines: Any) -> None:
            wait_for_all([engine.submit("load", []) for engine in engines])

        while not ended():
            for _ in range(10):
                if self.service.lost or ended():
                    break
                time.sleep(0.1)
            self.pool.version += 1
            with suppress(WeightsLostError):
                self.pool.load_by(send)
                self.service.resume()
                self._count("weight syncs")

    def _kill(self, process: Any) -> None:
        self._count("kills")
        if (transport := process._transport) is not None:
            worker = descendants(transport.pid)[-1:] or [transport.pid]
            with suppress(ProcessLookupError):
                os.kill(worker[0], signal.SIGKILL)

    def _count(self, name: str, number: int = 1) -> None:
        with self._changed:
            self.counts[name] += number


def hangs(number: int) -> bool:
    """Say whether the agent of an episode does not end by itself."""
    return number % 20 == 7


def memory() -> float:
    """Return the resident MB of this process."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


def settles(value: Callable[[], Any], expected: Any) -> None:
    deadline = time.monotonic() + 20
    while value() != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert value() == expected


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    ("concurrent", "seconds", "kill_every"),
    [pytest.param(16, 10.0, 2.0, marks=pytest.mark.slow), pytest.param(200, 300.0, 5.0, marks=pytest.mark.slow)],
)
def test_nothing_is_lost_or_left(
    tokenizer: TextCodec, tmp_path: Path, concurrent: int, seconds: float, kill_every: float
) -> None:
    children = set(descendants(os.getpid()))
    soak = Soak(tokenizer, concurrent, tmp_path / "ends")
    try:
        soak.run(seconds / 5, kill_every)
        gc.collect()
        begun, files = memory(), len(os.listdir("/proc/self/fd"))
        soak.run(seconds, kill_every)
        gc.collect()
        grown, left = memory() - begun, len(os.listdir("/proc/self/fd")) - files
        ends = soak.request_ends()
        print(f"{dict(soak.counts)}; requests: {dict(ends)}")
        print(f"{begun:.0f} MB and {grown:+.0f} MB, {files} files and {left:+d}")
        assert not soak.problems, soak.problems[:5]
        assert soak.counts["episodes"] < ends["answer"] <= soak.counts["calls"]
        # An episode that hangs may reach its limit in a request; that ends by an error with the status 403.
        assert not [end for end in ends if end != "answer" and "403" not in end], ends
        assert soak.counts["episodes"] > concurrent
        assert soak.counts["kills"] >= 2
        assert not soak.gateway._sessions
        assert not soak.service.lost
        settles(lambda: len(asyncio.all_tasks(soak.gateway._loop)), 1)  # type: ignore[arg-type]
        settles(lambda: [len(engine._calls) for engine in soak.pool.engines], [0, 0])
        gc.collect()
        assert not [drawing for drawing in soak.pool.drawings if not drawing.done()]
        assert grown < 100
        assert left < 20
    finally:
        soak.close()
    settles(lambda: set(descendants(os.getpid())) - children, set())
