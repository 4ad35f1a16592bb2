"""Engines that need no vLLM: they keep what arrives, and answer with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from parallel_models import SamplingOptions
from rl_train.engines.interface import Request, Response, Responses, SequenceLogProbs
from rl_train.weight_sync.buckets import NamedTensors


class Stub:
    """A `LocalEngine` whose responses tell the seed, and whose log-probs tell the weights."""

    def __init__(self, keep: bool = True) -> None:
        self.keep, self.weights, self.asleep = keep, dict[str, Tensor](), False
        self.peak = 0

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        assert not self.asleep
        first = next(iter(self.weights.values()), torch.zeros(1)).flatten()[0]
        length = sampling.max_new_tokens
        answers = [
            [
                Response(
                    [(request.seed + i) % 7] * length, [float(first)] * length, [[9, (request.seed + i) % 7]] * length
                )
                for i in range(sampling.n)
            ]
            for request in requests
        ]
        return lambda: answers

    def load(self, named_tensors: NamedTensors) -> None:
        self.weights = {name: tensor.clone() if self.keep else tensor for name, tensor in named_tensors}

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        rows = [[{}, *({token: -1.0, -1 - token: -2.0} for token in row[1:])] for row in sequences]
        return [SequenceLogProbs.of(tokens, row, top_k) for tokens, row in zip(sequences, rows, strict=True)]

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        pass


class Fragile(Stub):
    """Does what the file `mark` asks for at the next call of a method.

    "begin 9" sends signal 9 to this process, "load refuse" raises, and "begin wait" waits until there is no file.
    """

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        time.sleep(0.05)
        self._fail("begin")
        return super().begin(requests, sampling)

    def load(self, named_tensors: NamedTensors) -> None:
        received = {}
        for number, (name, tensor) in enumerate(named_tensors):
            received[name] = tensor.clone()
            if number == 5:
                self._fail("load")
        self.weights = received

    def _fail(self, method: str) -> None:
        with suppress(FileNotFoundError):
            asked, what = self.mark.read_text().split()
            if asked != method:
                return
            if what == "wait":
                deadline = time.monotonic() + 20
                while self.mark.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                return
            self.mark.unlink()
            if what == "refuse":
                raise ValueError("no room for the sixth tensor")
            os.kill(os.getpid(), int(what))
            time.sleep(60)


class Refusing(Stub):
    """Refuses the tensors after the third while `mark` exists."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def load(self, named_tensors: NamedTensors) -> None:
        received = {}
        for number, (name, tensor) in enumerate(named_tensors):
            if number == 3 and self.mark.exists():
                raise ValueError("no room for the fourth tensor")
            received[name] = tensor.clone()
        self.weights = received
