"""`WholeBatches`: whole batches in a program that every rank of a grid runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl_models.api.worker import Worker
from rl_models.batch.batch import Batch
from rl_models.calls.agreement import CallArguments, agree_on_call
from rl_models.calls.dispatch import Join, Split, methods_of, on_cpu
from rl_models.calls.tensor_digests import described_sequences


class WholeBatches:
    """An actor or a critic whose methods take the whole batch on every rank, and return the whole result, on the CPU.

    A batch is split over dp into parts of about equal work; the results are exchanged over dp and joined in the batch's
    order. This covers all methods with a batch that `dispatched` declares, also in a subclass. Other declared methods,
    attributes and `stream_weights` come from the worker unchanged.

    Raises:
        ValueError: Ranks pass other sequences, or fields of other shapes or integers, to a method; on every rank alike.
        AttributeError: A method of the worker is not declared.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.worker_class = worker, type(worker)

    def stream_weights(self, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the worker's tensors: see `Actor.stream_weights`."""
        return self.worker.stream_weights(**options)

    def __getattr__(self, name: str) -> Any:
        method = methods_of(self.worker_class).get(name)
        if method is not None and method.split is not None:
            return partial(self._call, name, method.split)
        value = getattr(self.worker, name)
        if method is None and inspect.ismethod(value):
            raise AttributeError(
                f"{type(self.worker).__name__}.{name} does not say how its arguments are divided over dp; declare it "
                f"with @dispatched(...) of rl_models.calls.dispatch, or call worker.{name} with this rank's part"
            )
        return value

    def _call(self, name: str, split: Split, *args: Any, **kwargs: Any) -> Any:
        worker, method = self.worker, getattr(self.worker, name)
        bound = inspect.signature(method).bind(*args, **kwargs)
        argument_name, argument = next(iter(bound.arguments.items()))
        parts: list[Any] = []
        join: Join = list

        def divide() -> CallArguments:
            nonlocal parts, join
            parts, join = split(argument, worker.grid.dims.dp, worker.engine.vocab_size)
            sequences = argument if isinstance(argument, Batch) else [row for part in parts for row in part]
            return CallArguments(everywhere=described_sequences(sequences))

        agree_on_call(worker.grid, f"WholeBatches.{name}", divide)
        bound.arguments[argument_name] = parts[worker.grid.rank("dp")]
        results = [on_cpu(method(*bound.args, **bound.kwargs))]
        if (group := worker.grid.group("dp")) is not None:
            gathered: list[Any] = [None] * worker.grid.dims.dp
            dist.all_gather_object(gathered, results[0], group=group)
            results = gathered
        return join(results)
