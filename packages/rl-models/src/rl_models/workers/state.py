"""`WorkerState`: weights and optimizer state of an engine: made, saved, resumed, streamed and offloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_models.engines import Engine
from rl_models.engines.offload import Offload
from rl_models.engines.optimizer import Optimizer, OptimizerOptions
from rl_models.grid import Grid
from rl_models.workers import checkpoint
from rl_models.workers.agreement import Given, agree_on_call
from rl_models.workers.checkpoint import Resumed
from rl_models.workers.dispatch import dispatched

if TYPE_CHECKING:
    from ckpt import PendingSave  # training checkpoints take as long to import as torch


class WorkerState:
    """The weights and optimizer state of a worker: saved, resumed, streamed and offloaded.

    Attributes:
        engine: The model on its grid.
        options: The optimizer's options.
        steps: The optimizer steps taken so far; the learning rate follows from this number.
        skipped_steps: The steps skipped because fp16 overflowed under the loss scale.
    """

    def __init__(self, engine: Engine, options: OptimizerOptions | None) -> None:
        self.engine = engine
        self.options = options or OptimizerOptions()
        self.steps = 0
        self.skipped_steps = 0
        self._memory = Offload(engine.module, self._optimizer_state)
        self._background: dist.ProcessGroup | None = None
        self._saving: PendingSave | None = None

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, made when first needed: a reference model has no use for fp32 masters."""
        return self.engine.build_optimizer(self.options)

    def _optimizer_state(self) -> Iterator[Tensor]:
        if "optimizer" in self.__dict__:
            yield from self.optimizer.tensors()

    def _agree(
        self, method: str, check: Callable[[], None] = lambda: None, *, optimizer: bool = False, **everywhere: object
    ) -> None:
        """Begin a call that every rank makes: see `agree_on_call`. With `optimizer` it needs the optimizer's state."""

        def prepare() -> Given:
            self._memory.require(method, optimizer=optimizer)
            check()
            return Given()

        agree_on_call(self.grid, f"{type(self).__name__}.{method}", prepare, **everywhere)

    @property
    def grid(self) -> Grid:
        """The grid of the model."""
        return self.engine.grid

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.engine.grid.device

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.options.learning_rate_at(self.steps)

    @dispatched()
    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint with the config and tokenizer files of the one that was loaded.

        Every rank calls it. The folder appears in one step when it is complete; what was there is kept until then.
        """
        self._agree("save_pretrained", path=os.path.abspath(path))
        self.engine.save(path)

    @dispatched(needs="optimizer")
    def save_training(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Write `path/step-NNNNNNNN`: weights, optimizer state, steps taken and random-number states.

        Every rank calls it and writes its own part. When the checkpoint is complete it appears in one step, and
        `path/latest` names it; a kill before that leaves the ones that were there.

        Args:
            path: the run's folder; an actor and a critic each need their own.
            step: a number for the checkpoint; default the steps of the optimizer.
            keep: how many checkpoints to keep, the newest; None: all.
            extra: JSON values to find again, the same on every rank (rank 0's are kept).
            asynchronous: return once all is copied to host memory, and write in the background. The next save, a load,
                and `wait_for_save` wait for the end; call that before the process group is destroyed.

        Raises:
            ValueError, OSError: this save, or the one before in the background, went wrong; on every rank.
            RuntimeError: weights or optimizer state are offloaded.
        """
        self._agree("save_training", optimizer=True, path=os.path.abspath(path), step=step, keep=keep)
        self.wait_for_save()
        group = self.grid.everyone
        if asynchronous:
            # Of its own: the collectives of the save run beside those of the next steps.
            self._background = group = self._background or checkpoint.background_group(self.grid)
        self._saving = checkpoint.save_training(
            self.engine,
            self.optimizer,
            path,
            self.steps if step is None else step,
            extra={
                "steps": self.steps,
                "skipped_steps": self.skipped_steps,
                "loss_scale": self.optimizer.loss_scale_state,
                "extra": dict(extra or {}),
            },
            keep=keep,
            group=group,
            asynchronous=asynchronous,
        )

    @dispatched(needs="nothing")
    def wait_for_save(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            ValueError, OSError: what went wrong with it, on every rank, once.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    @dispatched(changes=True, needs="optimizer")
    def load_training(self, path: str | os.PathLike[str], *, step: int | None = None) -> Resumed:
        """Go on from a training checkpoint, whatever grid it was saved on; every rank calls it.

        Weights, optimizer state, steps taken and (for a rank of the same number) random-number states are those of the
        checkpoint; options, such as the learning rate and its schedule, stay as this worker was made with.

        Args:
            path: the folder given to `save_training`.
            step: which checkpoint; None: the latest.

        Raises:
            ValueError: there is none, it is broken, or it is of another model; on every rank alike.
            RuntimeError: weights or optimizer state are offloaded.
        """
        self._agree("load_training", optimizer=True, path=os.path.abspath(path), step=step)
        self.wait_for_save()
        state = checkpoint.load_training(self.engine, self.optimizer, path, step)
        self.steps = int(state.extra["steps"])
        self.skipped_steps = int(state.extra.get("skipped_steps", 0))
        if self.optimizer.loss_scale_state is not None and state.extra.get("loss_scale") is not None:
            self.optimizer.loss_scale_state = state.extra["loss_scale"]
        return Resumed(state.step, state.extra["extra"])

    def stream_weights(
        self,
        *,
        to: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        bucket_bytes: int = 64 << 20,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of everything `save_pretrained` would write, for an inference engine.

        Every rank iterates to the end. Memory: the tensors of one bucket, and as much again for the exchange; what
        FSDP2 has divided is gathered one tensor at a time.

        Args:
            to: ranks of the grid that receive; on the others nothing is yielded. None: all.
            dtype: cast floating-point tensors to it.
            device: where the tensors are; None: where the parameters are. "cpu" under a GPU: pinned memory; clone a
                tensor to keep it.
            bucket_bytes: how much is exchanged at once; at least one tensor.
        """

        def check() -> None:
            ranks = 1 if self.grid.everyone is None else self.grid.everyone.size()
            if to is None:
                return
            if isinstance(to, str) or not isinstance(to, Sequence) or any(rank not in range(ranks) for rank in to):
                raise ValueError(
                    f"to={to!r} must be ranks of the grid, 0 to {ranks - 1}, such as [0]; hand the tensors that these "
                    "ranks receive to an inference engine yourself"
                )

        self._agree("stream_weights", check, to=to, dtype=dtype, bucket_bytes=bucket_bytes)
        return checkpoint.stream_weights(self.engine, to=to, dtype=dtype, device=device, bucket_bytes=bucket_bytes)

    @dispatched(gather=sum, changes=True, needs="nothing")
    def offload(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move this rank's weights, optimizer state, or both to (pinned) host memory, and free them on the device.

        Methods that need the moved tensors raise until `onload` brings them back, bit for bit.

        Returns:
            Bytes given up on the device.
        """
        return self._memory.offload(weights=weights, optimizer=optimizer)

    @dispatched(changes=True, needs="nothing")
    def onload(self, *, weights: bool = True, optimizer: bool = True) -> None:
        """Bring back the tensors that `offload` has moved; does nothing for tensors that are here."""
        self._memory.onload(weights=weights, optimizer=optimizer)
