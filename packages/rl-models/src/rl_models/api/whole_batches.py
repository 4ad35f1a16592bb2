"""`WholeBatches`: whole batches in a program that every rank of a grid runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_models.api.worker import Worker
from rl_models.batch.batch import Batch
from rl_models.batch.visual import described
from rl_models.calls.agreement import Given, agree_on_call
from rl_models.calls.dispatch import Join, Split, methods_of, on_cpu
from rl_models.calls.tensor_digests import described_lengths, digests


class WholeBatches:
    """An actor or a critic whose methods take the whole batch on every rank, and return the whole result, on the CPU.

    A batch is split over dp into parts of about equal work; the results are exchanged over dp and joined in the batch's
    order. This covers all methods with a batch that `dispatched` declares, also those of a subclass. Other declared
    methods, attributes and `stream_weights` are those of the worker.

    Raises:
        ValueError: Ranks pass other sequences or fields to a method; on every rank alike.
        AttributeError: A method of the worker is not declared.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.kind = worker, type(worker)

    def stream_weights(self, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the worker's tensors: see `Actor.stream_weights`."""
        return self.worker.stream_weights(**options)

    def __getattr__(self, name: str) -> Any:
        method = methods_of(self.kind).get(name)
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
        grid, method = self.worker.grid, getattr(self.worker, name)
        given = inspect.signature(method).bind(*args, **kwargs)
        first, whole = next(iter(given.arguments.items()))
        parts: list[Any] = []
        join: Join = list

        def prepare() -> Given:
            nonlocal parts, join
            parts, join = split(whole, grid.dims.dp, self.worker.engine.vocab_size)
            images = "none"
            if isinstance(whole, Batch):
                lengths, tensors = whole.lengths, {"tokens": whole.tokens, "mask": whole.mask, **whole.fields}
                images = described(whole.visual)
            else:
                rows = [row for part in parts for row in part]
                lengths, tensors = tuple(map(len, rows)), {"prompt_tokens": torch.cat(rows)} if rows else {}
            found = digests(tensors)[0]
            return Given(everywhere={"sequences": described_lengths(lengths), **found, "images": images})

        agree_on_call(grid, f"WholeBatches.{name}", prepare)
        given.arguments[first] = parts[grid.rank("dp")]
        own = on_cpu(method(*given.args, **given.kwargs))
        results = [own]
        if (group := grid.group("dp")) is not None:
            results = [None] * grid.dims.dp
            dist.all_gather_object(results, own, group=group)
        return join(results)
