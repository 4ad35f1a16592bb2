"""`WholeBatches`: whole batches in a program that every rank of a grid runs."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from parallel_models import Engine
from parallel_models.generation import PrefixAffinity
from rl_models.api.model_calls import ModelCalls
from rl_models.api.worker import Worker
from rl_models.batch.batch import Batch
from rl_models.calls.agreement import CallArguments, agree_on_call
from rl_models.calls.dispatch import Join, Split, methods_of, on_cpu
from rl_models.calls.tensor_digests import described_sequences


class WholeBatches(ModelCalls):
    """An actor or a critic whose methods take the whole batch on every rank, and return the whole result, on the CPU.

    A batch is split over dp into parts of about equal work; the results are exchanged over dp and joined in the batch's
    order. This covers all methods with a batch that `dispatched` declares. Other declared methods, `stream_weights`
    and `held_weights` come from the worker unchanged.

    Raises:
        ValueError: Ranks pass other sequences, or fields of other shapes or integers, to a method; on every rank alike.
        AttributeError: A method of the worker is not declared.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.worker_class, self.grid = worker, type(worker), worker.grid
        self._affinity = PrefixAffinity()

    @property
    def engine(self) -> Engine:
        """Return the worker's engine."""
        return self.worker.engine

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, with this rank's part of its batch or prompts."""
        declared = methods_of(self.worker_class).get(method)
        if declared is None and method not in ("stream_weights", "held_weights"):
            raise AttributeError(
                f"{self.worker_class.__name__}.{method} does not say how its arguments are divided over dp; declare it "
                f"with @dispatched(...) of rl_models.calls.dispatch, or call worker.{method} with this rank's part"
            )
        if declared is None or (split := declared.split_of(kwargs, self._affinity)) is None:
            return getattr(self.worker, method)(*args, **kwargs)
        return self._call(method, split, *args, **kwargs)

    def _call(self, name: str, split: Split, *args: Any, **kwargs: Any) -> Any:
        worker, method = self.worker, getattr(self.worker, name)
        bound = inspect.signature(method).bind(*args, **kwargs)
        argument_name, argument = next(iter(bound.arguments.items()))
        parts: list[Any] = []
        join: Join = list

        def divide() -> CallArguments:
            nonlocal parts, join
            parts, join = split(argument, worker.grid.dims.dp, worker.engine.vocab_size)
            sequences = argument if isinstance(argument, Batch) else [row for rows in parts for row in rows]
            return CallArguments(everywhere=described_sequences(sequences))

        agree_on_call(worker.grid, f"WholeBatches.{name}", divide)
        bound.arguments[argument_name] = parts[worker.grid.rank("dp")]
        results = [on_cpu(method(*bound.args, **bound.kwargs))]
        if (group := worker.grid.group("dp")) is not None:
            gathered: list[Any] = [None] * worker.grid.dims.dp
            dist.all_gather_object(gathered, results[0], group=group)
            results = gathered
        return join(results)
