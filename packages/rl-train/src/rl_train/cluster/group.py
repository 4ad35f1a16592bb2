"""`RayModelGroup`: an actor or a critic whose ranks are processes of a Ray cluster."""

from __future__ import annotations

import operator
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch

from parallel_layers import ParallelDims
from parallel_models import Grid
from parallel_models.engine import is_name
from parallel_models.generation import PrefixAffinity
from rl_models.api import ModelCalls, Worker
from rl_models.calls import Join, Method, methods_of
from rl_train.cluster.future import Future
from rl_train.cluster.host import Seat
from rl_train.cluster.placement import Placement, Share, node_runs
from rl_train.cluster.ranks import Ranks
from rl_train.cluster.resources import Resources, import_ray
from rl_train.processes.errors import RankFailed

# The calls of a group besides the methods of the worker.
GROUP_METHODS = {
    "apply": Method(gather=lambda results: list(map(pickle.loads, results)), changes=True),
    "load": Method(gather=list, changes=True),
}


class RayModelGroup(ModelCalls):
    """Run an `Actor` or `Critic` on a grid of Ray actors, one on each device; the calling program is no rank.

    Args:
        kind: `Actor`, `Critic` or a subclass.
        dims: The sizes of the grid.
        path: The checkpoint folder, or a model's name on a hub. Every node must see this folder, and
            the folders of later saves.
        resources: The resources of each rank (default: `Resources()`); or `Placement.share(...)`, a share of the
            devices of a placement that other groups use, too.
        name: The name in error messages (default: the kind's).
        wait: Return only when the model is loaded. With False, `ready()` or the first call waits for the model.
        collective_timeout: Seconds after which a collective fails that some ranks have not reached.
        **options: Further arguments of `Worker.from_pretrained`, such as `backend`, `dtype` and `optimizer`.

    Methods take the whole batch, which the group splits over dp into parts of about equal work; results are returned on
    the CPU, in the order of the batch. With `submit(name, ...)` in place of a method, several groups work at the same
    time. A loss travels by cloudpickle: a lambda, a nested function, or a function that the nodes can import.
    Use a group as a context manager, or call `shutdown`.

    Raises:
        ValueError: Ray is not installed, an option is wrong, or the cluster has no room.
        Exception: The exception of `from_pretrained` on the ranks.
        RankFailed: The processes do not start.
    """

    def __init__(
        self,
        kind: type[Worker],
        dims: ParallelDims,
        path: str | os.PathLike[str],
        *,
        resources: Resources | Share | None = None,
        name: str | None = None,
        wait: bool = True,
        collective_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        if fixed := options.keys() & {"device", "mesh"}:
            raise ValueError(
                f"{' and '.join(sorted(fixed))}: the group sets this; choose a device with Resources(device=...)"
            )
        self.worker_class, self.dims, self.name = kind, dims, name or kind.__name__
        self.grid = Grid(ParallelDims(), torch.device("cpu"))  # the calling program alone
        self._path, self._options = os.fspath(path) if is_name(path) else os.path.abspath(path), options
        self._collective_timeout = collective_timeout
        self._owns_placement = not isinstance(resources, Share)
        self._share = resources if isinstance(resources, Share) else Placement(dims.world_size, resources).share(1.0)
        self.placement = self._share.placement
        self._ranks: Ranks | None = None
        self._bundles: list[int] = []
        self._checkpoint: str | None = None
        self._methods = methods_of(kind) | GROUP_METHODS
        self._updated, self._affinity = False, PrefixAffinity()
        try:
            self._bundles = self._share.take(dims.world_size, node_runs(dims))
            self._start()
            if wait:
                self.ready()
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def seats(self) -> list[Seat]:
        """Return the node, address and device of each rank, by rank."""
        return self._running().seats

    def ready(self, timeout: float | None = None) -> None:
        """Wait until the model is loaded; raise its error, or TimeoutError after `timeout` seconds."""
        self._running()
        loaded = self._loading.result(timeout)
        devices = sorted({device.partition(":")[0] for _, device in loaded})
        if len(devices) > 1:
            raise ValueError(f"the ranks found different devices, {devices}; ask for one with Resources(device=...)")
        self._vocab_size: int = loaded[0][0]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a method of the actor or critic on the ranks; the calls of one group run one after the other.

        `method` is "apply", or a method of the kind that `dispatched` declares. Its arguments follow: first the whole
        batch, or all prompts, if the method takes them.

        Raises:
            ValueError: The kind has no such method, or the method refuses the batch.
            RankFailed: See `Ranks.send`; `restart` helps.
        """
        offered = methods_of(self.worker_class) | {"apply": GROUP_METHODS["apply"]}
        if method not in offered:
            raise ValueError(
                f"{self.worker_class.__name__} has no method {method!r} for groups; it has {', '.join(offered)}; "
                "declare a method with @dispatched of rl_models.calls.dispatch, or call a function by apply"
            )
        self.ready()
        self._updated |= method in ("update", "step")
        if method not in ("save_pretrained", "save_adapter", "save_training", "load_training"):
            return self._send(method, args, kwargs)
        if not args:
            raise ValueError(f"{method} takes the checkpoint's folder as its first argument")
        path = os.path.abspath(args[0])
        # After all ranks have finished the save or load, `restart` loads this training checkpoint.
        done = partial(setattr, self, "_checkpoint", path) if method.endswith("_training") else None
        return self._send(method, (path, *args[1:]), kwargs, done=done)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on the ranks, and wait for its result; see `submit`."""
        return self.submit(method, *args, **kwargs).result()

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the result of `function(worker, *args, **kwargs)` on each rank, by rank, with tensors on the CPU."""
        return self.submit("apply", function, *args, **kwargs).result()

    def restart(self, checkpoint: str | os.PathLike[str] | None = None) -> Any:
        """End the remaining ranks, start new ranks in the same placement, and load a training checkpoint.

        Ray replaces a lost node of the placement. Futures of the old ranks fail.

        Args:
            checkpoint: The folder of `save_training` (default: the last folder that this group saved to or loaded
                from). A group that was never updated needs none, and None is returned.

        Raises:
            ValueError: The group has been updated and has no training checkpoint; or see `Placement.wait`.
        """
        checkpoint = checkpoint or self._checkpoint
        if checkpoint is None and self._updated:
            raise ValueError(
                f"{self.name} has been updated and has no training checkpoint; call save_training(path) regularly, "
                "pass restart(checkpoint), or make a new RayModelGroup to start over"
            )
        self._running().end()
        deadline = time.monotonic() + self.placement.resources.timeout
        while True:
            self.placement.wait()
            try:
                self._start()
                break
            except RankFailed:
                # Ray may have noticed a lost node of the placement only now.
                if time.monotonic() > deadline:
                    raise
        self.ready()
        return None if checkpoint is None else self.load_training(checkpoint)

    def shutdown(self) -> None:
        """End the ranks and give their devices back. Safe to call twice."""
        if self._ranks is not None:
            self._ranks.end()
        self._share.give_back(self._bundles)
        if self._owns_placement:
            self.placement.remove()
        self._ranks, self._bundles = None, []

    def _start(self) -> None:
        share, bundles, runs = self._share, self._bundles, node_runs(self.dims)
        self._ranks = Ranks(self.name, share, bundles, runs, self._collective_timeout, self._methods)
        self._loading = self._send("load", (self.worker_class, self._path), {"dims": self.dims, **self._options})

    def _running(self) -> Ranks:
        if self._ranks is None:
            raise ValueError(f"{self.name} has been shut down; make a new RayModelGroup")
        return self._ranks

    def _send(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Future[Any]:
        ray, method = import_ray(), self._methods[name]
        places = [_place(self.dims, rank) for rank in range(self.dims.world_size)]
        # For each dp coordinate, the first rank of the last pipeline stage: it has the results.
        replies = [rank for rank, (pp, _, inner) in enumerate(places) if pp == self.dims.pp - 1 and inner == 0]
        batch_parts: list[Any] | None = None
        join: Join = operator.itemgetter(0)
        split = method.split_of(kwargs, self._affinity)
        if method.gather is not None:
            replies, join = list(range(len(places))), method.gather
        elif split is not None:
            if not args:
                raise ValueError(f"{name} takes the whole batch, or all prompts, as its first argument")
            divided, join = split(args[0], self.dims.dp, self._vocab_size)
            references = [ray.put(batch_part) for batch_part in divided]
            batch_parts, args = [references[dp] for _, dp, _ in places], args[1:]

        def result(answers: list[Any]) -> Any:
            value = join([answers[rank] for rank in replies])
            if done is not None:
                done()
            return value

        return self._running().send(name, ray.cloudpickle.dumps((args, kwargs)), batch_parts, replies, result)


def _place(dims: ParallelDims, rank: int) -> tuple[int, int, int]:
    """Return the coordinates of a rank of `dims.build_mesh`: pp, dp, and its number inside cp * tp."""
    stage, inner = divmod(rank, dims.cp * dims.tp)
    return (*divmod(stage, dims.dp), inner)
