"""Engines of the tests of weight syncs: they check what arrives, and end where a test asks for it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rl_train.engines import process
from rl_train.weight_sync.buckets import NamedTensors

from ..engines.stub import Stub

NAMES = [f"w{number}" for number in range(12)]


def tensors(version: int, most: int = len(NAMES), device: str = "cpu") -> NamedTensors:
    """Yield tensors that tell the version and their number; the fifth one is larger than a bucket of 8192 bytes."""
    for number, name in enumerate(NAMES[:most]):
        yield name, torch.full((700, 9 if number == 4 else 1), version + number / 16, device=device)


class Watchful(Stub):
    """Checks the tensors of a version, and ends in the phase of a weight sync that the file `mark` names.

    "first", "middle" and "last" are tensors; "after" is when all have been taken. `pause` makes it slow, in seconds.
    """

    def __init__(self, mark: Path, pause: float = 0.0, device_id: str = "") -> None:
        super().__init__()
        self.mark, self.pause, self.asked = mark, pause, ""
        if device_id:
            process.device_id = lambda: device_id

    def load(self, named_tensors: NamedTensors) -> None:
        with suppress(FileNotFoundError):
            self.asked = self.mark.read_text()
        received = []
        for name, tensor in named_tensors:
            time.sleep(self.pause)
            received.append((name, tensor.clone().cpu()))
            self.end_if({1: "first", 6: "middle", len(NAMES): "last"}.get(len(received), "none"))
        self.end_if("after")
        version = int(received[0][1][0, 0])
        for (name, tensor), (expected_name, expected) in zip(received, tensors(version), strict=True):
            if name != expected_name or not torch.equal(tensor, expected):
                raise ValueError(f"{name} is wrong in version {version}: {tensor.flatten()[:3].tolist()}")
        self.weights = dict(received)

    def end_if(self, phase: str) -> None:
        with suppress(FileNotFoundError):
            if self.asked == phase:
                self.mark.unlink()  # the other engine goes on
                os.kill(os.getpid(), 9)
                time.sleep(60)


def in_file(path: str, size: int) -> Tensor:
    """Return bytes of a file that processes share."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
