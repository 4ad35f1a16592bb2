"""Whole batches on a grid whose ranks all run the same program: what `RayModelGroup` is to a program that is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_models.batch import Batch
from rl_models.losses import LossTerms
from rl_models.workers.actor import TokenLogProbs
from rl_models.workers.actor_critic import TokenEstimates
from rl_models.workers.agreement import Given, agree_on_call
from rl_models.workers.digests import described_lengths, digests
from rl_models.workers.dispatch import METHODS, Join, on_cpu
from rl_models.workers.worker import Worker

T = TypeVar("T")


class WholeBatches:
    """An actor or a critic whose methods take the whole batch on every rank, and return the whole result, on the CPU.

    A batch is split over dp in parts of about equal work, as `RayModelGroup` does; the results of the parts are
    exchanged over dp and joined in the batch's order. Other sequences on some ranks are a ValueError on all. All that
    takes no batch is the worker's own.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def log_probs(self, batch: Batch, **options: Any) -> TokenLogProbs:
        """As `Actor.log_probs`."""
        return self._call("log_probs", batch, **options)

    def values(self, batch: Batch) -> Tensor:
        """As `Critic.values`."""
        return self._call("values", batch)

    def estimate(self, batch: Batch, **options: Any) -> TokenEstimates:
        """As `ActorCritic.estimate`."""
        return self._call("estimate", batch, **options)

    def rewards(self, batch: Batch) -> Tensor:
        """As `Critic.rewards`."""
        return self._call("rewards", batch)

    def update(self, batch: Batch, loss: Callable[..., LossTerms], **options: Any) -> dict[str, float]:
        """As the worker's own `update`."""
        return self._call("update", batch, loss, **options)

    def generate(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Iterable[int] = (),
        **options: Any,
    ) -> Batch:
        """As `Actor.generate`, for all prompts; each dp rank draws from a stream of its own."""
        return self._call("generate", prompts, max_new_tokens=max_new_tokens, stop_ids=list(stop_ids), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def _call(self, name: str, whole: Any, *args: Any, **kwargs: Any) -> Any:
        grid, split = self.worker.grid, METHODS[name].split
        assert split is not None
        parts: list[Any] = []
        join: Join = list

        def prepare() -> Given:
            nonlocal parts, join
            parts, join = split(whole, grid.dims.dp, self.worker.engine.vocab_size)
            if isinstance(whole, Batch):
                lengths, tensors = whole.lengths, {"tokens": whole.tokens, "mask": whole.mask, **whole.fields}
            else:
                rows = [row for part in parts for row in part]
                lengths, tensors = tuple(map(len, rows)), {"prompt_tokens": torch.cat(rows)} if rows else {}
            return Given(everywhere={"sequences": described_lengths(lengths), **digests(tensors)[0]})

        agree_on_call(grid, f"WholeBatches.{name}", prepare)
        own = on_cpu(getattr(self.worker, name)(parts[grid.rank("dp")], *args, **kwargs))
        results = [own]
        if (group := grid.group("dp")) is not None:
            results = [None] * grid.dims.dp
            dist.all_gather_object(results, own, group=group)
        return join(results)


def from_first(make: Callable[[], T], group: ProcessGroup | None) -> T:
    """What `make` gives on the first rank, on every rank; for what may differ between them, or must run once.

    Raises:
        ValueError: what `make` raised, on every rank.
    """
    if group is None:
        return make()
    message: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            message[0] = make()
        except (ValueError, OSError) as mistake:
            message[1] = str(mistake)
    dist.broadcast_object_list(message, group_src=0, group=group)
    if message[1] is not None:
        raise ValueError(message[1])
    return message[0]
