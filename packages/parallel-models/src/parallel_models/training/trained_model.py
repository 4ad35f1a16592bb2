"""`TrainedModel`: the weights and optimizer state of an engine, saved, resumed, streamed and offloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt
from ckpt.training import PendingSave
from ckpt.transfer import Holdings, in_peft_names, weights_to_send
from parallel_layers.distributed import form_group
from parallel_layers.memory import HostOffload
from parallel_layers.module import is_dtensor
from parallel_models.engine.checks import require_kind, require_number
from parallel_models.engine.engine import Engine, Shards
from parallel_models.engine.grid import Grid
from parallel_models.generation.session import end_sessions
from parallel_models.optimizers.interface import Optimizer, OptimizerOptions
from parallel_models.training.fsdp import release


class TrainingProgress(NamedTuple):
    """The step that a training checkpoint was saved at, and the values that the caller saved with it."""

    step: int
    extra: dict[str, Any]


class TrainedModel:
    """An engine with its optimizer: saved, resumed on any other grid, streamed and offloaded.

    Every rank of the grid calls each method, in the same order.

    Attributes:
        engine: The model on its grid.
        options: The optimizer's options.
        steps: The optimizer steps taken so far; the learning rate follows from this number.
        skipped_steps: The steps skipped because fp16 overflowed under the loss scale.
        base: The model whose frozen base this one shares; None: it has its own.
    """

    def __init__(self, engine: Engine, options: OptimizerOptions | None, base: TrainedModel | None = None) -> None:
        self.engine, self.base = engine, base
        self.options = options or OptimizerOptions()
        self.steps = 0
        self.skipped_steps = 0
        self._has_gradients = False
        self._weights_away, self._optimizer_away = HostOffload(), HostOffload()
        self._background: dist.ProcessGroup | None = None
        self._saving: PendingSave | None = None

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, made when first needed: a reference model has no use for fp32 masters."""
        return self.engine.build_optimizer(self.options)

    def _agree(
        self, method: str, check: Callable[[], None] = lambda: None, *, optimizer: bool = False, **everywhere: object
    ) -> None:
        """Begin a call of every rank that needs the weights and, on request, the optimizer.

        A subclass may compare `everywhere` among the ranks; here each rank checks its own arguments alone.
        """
        self._require(method, optimizer=optimizer)
        check()

    def _require(self, operation: str, *, optimizer: bool = False, ends_sessions: bool = True) -> None:
        """Raise RuntimeError if the weights, or with `optimizer` the optimizer's state, are offloaded.

        Any operation but a generation ends the sessions of this process's engines.
        """
        if ends_sessions:
            end_sessions()
        away = ["weights"] * self._weights_away.offloaded
        away += ["optimizer state"] * (optimizer and self._optimizer_away.offloaded)
        if away:
            raise RuntimeError(f"{operation} needs the {' and the '.join(away)} on the device; call onload() first")
        if self.base is not None:
            self.base._require(f"{operation} on a shared base", ends_sessions=ends_sessions)

    def _drop_gradients(self) -> None:
        self.engine.drop_gradients()
        self._has_gradients = False

    def _trained(self) -> Shards:
        release(self.engine.module)
        return self.engine.training_shards()

    def _require_adapters(self) -> None:
        if self.engine.adapters() is None:
            raise ValueError("the model has no adapters; load it with from_pretrained(..., lora=LoraOptions(...))")

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

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint, with the config and tokenizer files of the loaded checkpoint.

        Every rank calls this method. The complete folder replaces an older folder in one step. Adapters are merged, in
        fp64 and rounded once.
        """
        self._agree("save_pretrained", path=os.path.abspath(path))
        release(self.engine.module)
        self.engine.save(path)

    def save_adapter(self, path: str | os.PathLike[str]) -> None:
        """Write the adapters as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

        Every rank calls this method. The files are the same bytes from every grid; `peft`, vLLM and
        `from_pretrained(..., lora=path)` read them.

        Raises:
            ValueError: The model has no adapters.
        """
        release(self.engine.module)
        self._agree("save_adapter", self._require_adapters, path=os.path.abspath(path))
        self.engine.save_adapter(path)

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

        Every rank writes its own part. The complete checkpoint appears in one step, and `path/latest` names it; a kill
        before that leaves the older checkpoints.

        Args:
            path: The folder of the run; an actor and a critic each need their own.
            step: The number of the checkpoint (default: the steps of the optimizer).
            keep: The number of newest checkpoints to keep; None: all.
            extra: JSON values for `load_training`; rank 0's are saved.
            asynchronous: Return after the copy to host memory, and write in the background. The next save, a load and
                `wait_for_save` wait for the end; call `wait_for_save` before the process group is destroyed.

        Raises:
            ValueError, OSError: This save, or the save before in the background, failed; on every rank.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        step = self.steps if step is None else step

        def check() -> None:
            require_number("step", step, at_least=0, integer=True)
            require_kind("extra", extra or {}, Mapping)

        self._agree("save_training", check, optimizer=True, path=os.path.abspath(path), step=step, keep=keep)
        self.wait_for_save()
        group = self.grid.everyone
        if asynchronous:
            if group is not None and self._background is None:
                # A separate group: the collectives of the save run beside the collectives of the next steps.
                self._background = form_group(sorted(dist.get_process_group_ranks(group)), "gloo")
            group = self._background
        shards = self._trained()
        parameters = shards.parameters
        self._saving = ckpt.save_training(
            path,
            int(step),
            {name: shards.exchanged(name, parameter) for name, parameter in parameters.items()},
            shards.layout,
            shards.places,
            optimizer={
                name: {slot: shards.exchanged(name, tensor) for slot, tensor in state.items()}
                for name, parameter in parameters.items()
                if (state := self.optimizer.state(parameter))
            },
            extra={
                "steps": self.steps,
                "skipped_steps": self.skipped_steps,
                "updates": self.engine.updates,
                "loss_scale": self.optimizer.loss_scale_state,
                "extra": dict(extra or {}),
            },
            keep=keep,
            group=group,
            asynchronous=asynchronous,
        )

    def wait_for_save(self) -> None:
        """Wait for the save in the background, if there is one; raise its ValueError or OSError once, on every rank."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load_training(self, path: str | os.PathLike[str], *, step: int | None = None) -> TrainingProgress:
        """Resume from a training checkpoint of any grid; every rank calls this method.

        The checkpoint gives weights, optimizer state, steps taken and (for a rank of the same number) random-number
        states. This model keeps its options, such as the learning rate and its schedule.

        Args:
            path: The folder given to `save_training`.
            step: The step of the checkpoint; None: the latest.

        Raises:
            ValueError: There is no checkpoint, it is broken, or it belongs to another model; on every rank alike.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        self._agree("load_training", optimizer=True, path=os.path.abspath(path), step=step)
        self.wait_for_save()
        shards, optimizer = self._trained(), self.optimizer
        into = {name: shards.exchanged(name, parameter) for name, parameter in shards.parameters.items()}
        state = ckpt.load_training(path, shards.layout, shards.places, step=step, into=into, group=self.grid.everyone)
        states = [
            (parameter, {slot: shards.exchanged(name, x) for slot, x in state.optimizer.get(name, {}).items()})
            for name, parameter in shards.parameters.items()
        ]
        ckpt.agree(lambda: optimizer.require_states(states), self.grid.everyone)
        self._drop_gradients()
        for parameter, slots in states:
            optimizer.load_state(parameter, slots)
        ckpt.restore_rng(state.rng)
        self.steps = int(state.extra["steps"])
        self.skipped_steps = int(state.extra.get("skipped_steps", 0))
        self.engine.updates = int(state.extra.get("updates", self.steps + self.skipped_steps))
        if optimizer.loss_scale_state is not None and state.extra.get("loss_scale") is not None:
            optimizer.loss_scale_state = state.extra["loss_scale"]
        return TrainingProgress(state.step, state.extra["extra"])

    def stream_weights(
        self,
        *,
        to: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        format: Literal["fp8"] | None = None,
        device: torch.device | str | None = None,
        bucket_bytes: int = 64 << 20,
        adapter: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of everything `save_pretrained` would write, for an inference engine.

        Every rank iterates to the end. Memory: two buckets of tensors. FSDP2 shards are gathered one tensor at a time.
        Adapters are merged.

        Args:
            to: The ranks of the grid that receive the tensors; the other ranks yield nothing. None: all ranks.
            dtype: Cast floating-point tensors to this dtype.
            format: "fp8": the projections in FP8 by blocks, each followed by its scales `X.weight_scale_inv`, for an
                engine that holds them so; give `dtype` for the other tensors. Stacked experts (gpt-oss) stay plain.
            device: The device of the tensors (default: the parameters' device). "cpu" beside a GPU is pinned memory,
                which later tensors overwrite: clone a tensor to keep it.
            bucket_bytes: The bytes that one exchange sends; at least one tensor.
            adapter: Yield the low-rank adapters alone, with the names and shapes of PEFT's files, without a value head.
        """

        def check() -> None:
            if adapter:
                self._require_adapters()
            ranks = self.grid.dims.world_size
            listed = isinstance(to, Sequence) and not isinstance(to, str)
            if to is not None and not (listed and all(rank in range(ranks) for rank in to)):
                raise ValueError(
                    f"to={to!r} must be ranks of the grid, 0 to {ranks - 1}, such as [0]; your program hands the "
                    "tensors of these ranks to an inference engine"
                )

        self._agree(
            "stream_weights", check, to=to, dtype=dtype, format=format, bucket_bytes=bucket_bytes, adapter=adapter
        )
        release(self.engine.module)
        shards = self.engine.training_shards() if adapter else self.engine.streamed()
        pairs = ckpt.stream_hf(
            [parameters for _, parameters in shards.chunks],
            shards.layout,
            self.grid.everyone,
            shards.places,
            to=to,
            dtype=dtype,
            format=format,
            device=device,
            bucket_bytes=bucket_bytes,
            change=None if adapter else self.engine.merging(),
        )
        return in_peft_names(pairs, shards.layout) if isinstance(shards.layout, ckpt.AdapterLayout) else pairs

    def held_weights(self) -> Holdings:
        """Return the weights of `stream_weights` as the ranks hold them, for copies from shard to shard.

        Adapters are merged when the weights are read.
        """
        self._agree("held_weights")
        release(self.engine.module)
        shards, merging = self.engine.streamed(), self.engine.merging()
        chunks = [parameters for _, parameters in shards.chunks]
        return weights_to_send(chunks, shards.layout, self.grid.everyone, shards.places, merging)

    def offload(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move this rank's weights, optimizer state, or both to (pinned) host memory, and free them on the device.

        Methods that need the moved tensors raise until `onload` brings them back, bit for bit. A shared base belongs to
        the model that has loaded it, which alone moves it.

        Returns:
            The bytes freed on the device.
        """
        end_sessions()
        freed = 0
        if optimizer and "optimizer" in self.__dict__ and not self._optimizer_away.offloaded:
            # `OptimizerOptions.offload` keeps some in host memory already.
            on_device = [tensor for tensor in self.optimizer.tensors() if tensor.device.type == self.device.type]
            freed += self._optimizer_away.offload(on_device)
        if weights and not self._weights_away.offloaded:
            release(self.engine.module)
            base = None if self.base is None else self.base.engine.module
            if base is not None:
                release(base)
            freed += self._weights_away.offload(_memory(self.engine.module, base))
        if freed and torch.accelerator.is_available():
            # torch would keep the memory for this process; other processes on the device may need it.
            torch.accelerator.empty_cache()
        return freed

    def onload(self, *, weights: bool = True, optimizer: bool = True) -> None:
        """Bring back the tensors that `offload` has moved."""
        end_sessions()
        if weights:
            self._weights_away.onload()
        if optimizer:
            self._optimizer_away.onload()


def _memory(module: nn.Module, base: nn.Module | None) -> Iterator[Tensor]:
    """Yield the local parameters, their gradients, and the buffers, without the tensors of `base`."""
    base_ids = set() if base is None else {id(tensor) for tensor in (*base.parameters(), *base.buffers())}
    for parameter in (*module.parameters(), *module.buffers()):
        for tensor in (parameter, parameter.grad) if id(parameter) not in base_ids else ():
            if tensor is not None:
                yield tensor.to_local() if is_dtensor(tensor) else tensor
