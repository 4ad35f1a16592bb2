"""Engines of the tests of processes, as Ray actors."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import ray

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train import Placement, RayModelGroup
from rl_train.engines import EngineOnRay

PROMPTS = [[1, number] for number in range(2, 14)]
SAMPLING = SamplingOptions(3, n=2, seed=1)

stub: Any = importlib.import_module("packages.rl-train.tests.engines.stub")
# The nodes cannot import it.
ray.cloudpickle.register_pickle_by_value(stub)


class Case:
    """Engines that do what the file `mark` asks for; `told` says which of them were lost."""

    def __init__(
        self, group: RayModelGroup, model: Path, placement: Placement, mark: Path, silence: float = 30.0
    ) -> None:
        self.group, self.mark, self.told = group, mark, list[str]()
        self.engine = EngineOnRay(
            group, model, partial(stub.Fragile, mark), placement.share(1.0), silence=silence, bucket_bytes=8192,
            check=True, tell=self.told.append, max_responses=8,
        )  # fmt: skip

    def is_right(self, version: int = 1) -> bool:
        """Say whether the responses are in order and of the newest weights."""
        found: Batch = self.engine.generate(PROMPTS, SAMPLING)
        assert [row.tolist()[:2] for row in found.split()] == [row for row in PROMPTS for _ in range(2)]
        first = self.group.apply(lambda worker: [t.flatten()[0].clone() for _, t in worker.stream_weights()])[0][0]
        assert self.engine.version == version
        return bool((found["log_probs"][found.mask] == first).all())

    @property
    def current(self) -> list[bool]:
        return [number in self.engine._pool.current for number in range(len(self.engine._pool.engines))]
