"""`run_recipe`: run the loop of a recipe in the folder of a run, on ranks of this machine, or of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from ckpt import Checkpoint
from ckpt.files import lock_file
from parallel_layers import ParallelDims
from rl_models.api import ModelCalls, WholeBatches, Worker
from rl_train.cluster.fork_server import prepare
from rl_train.cluster.launch import Devices, from_first, run_on_ranks
from rl_train.cluster.machines import Machines
from rl_train.loop.checked_models import dtype_message
from rl_train.loop.folder import MARK, check_folder, locked, saves_cleaned, write_options
from rl_train.loop.loop import Loop
from rl_train.loop.model_swapper import ModelSwapper
from rl_train.loop.recipe import STOP, Recipe, Tell
from rl_train.loop.run_store import RunStore
from rl_train.loop.throughput import Throughput
from rl_train.options.derived import engine_options, optimizer_options
from rl_train.options.run_options import RunOptions
from rl_train.report.html_report import write_page
from rl_train.report.terminal import Counts

Kind = TypeVar("Kind", bound=RunOptions, covariant=True)


class Checked(Protocol[Kind]):
    """A checked run of any recipe; see `rl_train.loop.checked_run.CheckedRun`."""

    @property
    def options(self) -> Kind: ...  # noqa: D102
    @property
    def options_as_given(self) -> Kind | None: ...  # noqa: D102
    @property
    def inputs(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def changes(self) -> Sequence[str]: ...  # noqa: D102


Run = TypeVar("Run", bound=Checked[RunOptions])
# (class, checkpoint folder, arguments of `from_pretrained`) -> one model of a run.
Make = Callable[[type[Worker], Path, dict[str, Any]], ModelCalls]


def run_recipe(
    checked_run: Run, on_event: Tell, run: Callable[[Run, Tell], dict[str, float]], *, lock: bool = True
) -> dict[str, float]:
    """Call `run` in the folder of the run, and write the options before it and the page during and after it.

    Args:
        checked_run: The run.
        on_event: Called with the events of the run.
        run: Runs the loop with a function for events, and returns the metrics of the last step.
        lock: Whether to lock the folder, and check it again; False if the caller holds the lock.

    Under torchrun, its first command writes these files; the others check that they run the same in the same folder.
    """
    options, machines = checked_run.options, Machines.here()
    options_as_given = checked_run.options_as_given or options
    facts = options_as_given.to_json() | {f"digest of {name}": value for name, value in checked_run.inputs.items()}
    mark, seconds = lock_file(options.out / MARK), options.collective_timeout
    if not machines.first:
        machines.agree(facts, mark, seconds)
        return run(checked_run, on_event)
    with ExitStack() as stack:
        if lock:
            stack.enter_context(locked(options.out, on_event))
            check_folder(options_as_given)  # another run may have ended there meanwhile
        (options.out / STOP).unlink(missing_ok=True)
        machines.agree(facts, mark, seconds)
        write_options(options_as_given, checked_run.inputs)
        for change in checked_run.changes:
            on_event({"message": f"going on with other inputs: {change}"})

        store = RunStore.of(options.out)
        push = on_event if store is None else stack.enter_context(store.pushed(on_event))

        def follow(event: Mapping[str, Any]) -> None:
            on_event(event)
            if store is not None:
                push(event)
            if any(name.startswith("eval/") for name in event):
                write_page(options.out)

        stack.enter_context(saves_cleaned(options))
        stack.callback(write_page, options.out)
        return run(checked_run, follow)


class LocalRank(Generic[Run]):
    """One of the ranks that run a recipe.

    Attributes:
        checked_run: The run.
        stack: Closes what the recipe opens when the run ends.
        first: Whether this is the first rank, which writes and tells.
        tell: Tells of events; on other ranks it does nothing.
        counts: Tells of counts.
        workers: The models that `make` has made.
        throughput: Counts the FLOPs of the models.
    """

    def __init__(self, checked_run: Run, stack: ExitStack, send: Tell) -> None:
        self.checked_run, self.stack, self.first = checked_run, stack, dist.get_rank() == 0
        self.tell: Tell = send if self.first else lambda event: None
        self.counts, self.workers = Counts(self.tell), list[Worker]()
        self._device = Devices.find(checked_run.options.device).current
        self.throughput = Throughput(checked_run.options, self.tell)

    def make(self, kind: type[Worker], path: Path, arguments: dict[str, Any]) -> WholeBatches:
        """Load a model."""
        return self.add(kind.from_pretrained(path, device=self._device, **arguments))

    def add(self, worker: Worker) -> WholeBatches:
        """Return calls of a model with whole batches; its progress is told."""
        self.workers.append(worker)
        worker.engine.progress = self.counts
        return WholeBatches(worker)

    def run(self, recipe: Recipe) -> dict[str, float]:
        """Run the loop of a recipe, and return the metrics of the last step."""
        options = self.checked_run.options
        return Loop(options, self.checked_run.options_as_given or options, recipe, self.throughput).run()

    @cached_property
    def once(self) -> Callable[[Callable[[], Any]], Any]:
        """Return a function that calls another one on the first rank alone, and returns its value on all."""
        return partial(from_first, group=self.workers[0].grid.everyone)


def on_ranks(
    checked_run: Run, on_event: Tell, *, work: Callable[[LocalRank[Run]], dict[str, float]]
) -> dict[str, float]:
    """Call `work` on all ranks, and return the metrics that it returns on the first one; {} on other machines."""
    options = checked_run.options
    prepare(work.__module__)
    devices = Devices.find(options.device)
    on_event({"phase": "starting", "accelerator": devices.type != "cpu"})
    if message := dtype_message(options.engine, devices):
        on_event({"message": message})
    result: dict[str, float] | None = run_on_ranks(
        _on_rank,
        options.grid.world_size,
        checked_run,
        work,
        devices=devices,
        on_event=on_event,
        collective_timeout=options.collective_timeout,
    )
    return result or {}


def _on_rank(send: Tell, checked_run: Run, work: Callable[[LocalRank[Run]], dict[str, float]]) -> dict[str, float]:
    with ExitStack() as stack:
        return work(LocalRank(checked_run, stack, send))


class ModelMaker:
    """Makes the models of a run with the options of its engine; `offload` keeps one of them on the devices.

    `throughput` counts their FLOPs.
    """

    def __init__(self, options: RunOptions, make: Make, throughput: Throughput | None = None) -> None:
        self._options, self._make, self._swapper, self._throughput = options, make, ModelSwapper(), throughput

    def __call__(
        self, kind: type[Worker], path: Path, grid: ParallelDims, learning_rate: float, **changes: Any
    ) -> ModelCalls:
        """Make a model; `changes` replace options of its engine."""
        options = self._options
        arguments = {
            **vars(engine_options(options, grid, kind.role)),
            **changes,
            "backend": options.backend,
            "dims": grid,
            "max_tokens_per_micro_batch": options.max_tokens,
            "optimizer": optimizer_options(options, learning_rate),
        }
        model = self._make(kind, path, arguments)
        if options.offload:
            model = self._swapper.add(model)
        if self._throughput is None:
            return model
        return self._throughput.counted(model, Checkpoint(path), kind.role, arguments["lora"])
