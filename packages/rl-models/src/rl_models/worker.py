"""What `Actor` and `Critic` share: micro-batches in, per-token results or one optimizer step out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ckpt import PendingSave, agree, all_gather_json
from megatron_utils.pipeline_parallel import split_micro_batches
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.attention.layer import ContextParallel
from parallel_layers.embedding import check_token_ids
from rl_models import checkpoint
from rl_models.aggregation import token_weights
from rl_models.backends import (
    Engine,
    EngineOptions,
    MegatronOptions,
    Outputs,
    PipelineOptions,
    Role,
    RouterLosses,
    load_engine,
)
from rl_models.batch import Batch
from rl_models.checkpoint import Resumed
from rl_models.decoder import Recompute
from rl_models.determinism import be_deterministic
from rl_models.grid import Grid, checkpoint_folder
from rl_models.losses import LossTerms
from rl_models.offload import Offload
from rl_models.optimizer import Optimizer, OptimizerOptions
from rl_models.routing import ROUTING, recorded, routed


def shift_to_own_token(per_token: Tensor, batch: Batch) -> Tensor:
    """From "after token t" to "of token t": `result[t] = per_token[t - 1]`, 0 for each sequence's first token.

    A model says at each token something of the next one. Args: `[T]` or longer (padding at the end is dropped).
    """
    if not batch.num_tokens:
        return per_token[:0]
    moved = torch.cat([per_token.new_zeros(1), per_token[: batch.num_tokens - 1]])
    return torch.where(batch.first, 0, moved)


class Worker:
    """An engine, its optimizer, and the division of batches; the base of `Actor` and `Critic`.

    Every data-parallel rank passes its own part of a batch; ranks that differ in tp, cp or pp alone pass the same.

    Attributes:
        steps: of the optimizer, taken so far; the learning rate follows from it.
        skipped_steps: not taken, because fp16 had overflowed under the loss scale.
    """

    role: ClassVar[Role]

    def __init__(self, engine: Engine, options: OptimizerOptions, max_tokens_per_micro_batch: int) -> None:
        self.engine = engine
        self.options = options
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.steps = 0
        self.skipped_steps = 0
        self._memory = Offload(engine.module, self._optimizer_state)
        self._background: dist.ProcessGroup | None = None
        self._saving = PendingSave()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "parallel",
        dims: ParallelDims | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool | None = None,
        pipeline: PipelineOptions | None = None,
        context_parallel: ContextParallel = "ulysses",
        router_losses: RouterLosses | None = None,
        recompute: Recompute = None,
        tp_invariant: bool = False,
        deterministic: bool = False,
        megatron: MegatronOptions | None = None,
        optimizer: OptimizerOptions | None = None,
        max_tokens_per_micro_batch: int = 16384,
    ) -> Self:
        """Load a Hugging Face checkpoint; each rank reads only what it will hold.

        Args:
            path: a folder with `config.json` and safetensors files.
            backend: one of `rl_models.backends.BACKENDS`.
            dims: the sizes of the grid; default one rank.
            device: default this process's CUDA device where there is one, else the CPU.
            dtype: of the parameters; default as stored.
            mesh: a mesh from `dims.build_mesh(...)`, when the grid is on some of the ranks; default all of them.
            sequence_parallel: default where tp > 1.
            pipeline: where pp > 1, the schedule, virtual stages and the split of the layers; default 1F1B, as even as
                possible.
            context_parallel: where cp > 1: "ulysses" or "ring".
            router_losses: of a mixture of experts, added by `update`; default none.
            recompute: what is computed again in the backward instead of saved: "full", "selective" (MLPs and experts),
                or the numbers of the layers that are.
            tp_invariant: log-probs and values have the same bits at tp 1, 2 and 4 and in every batch (backend
                "parallel"; no mixture of experts). Generation is not part of it.
            deterministic: the same call gives the same bits at every run on the same grid. It is a setting of the whole
                process and stays; see `rl_models.determinism`.
            megatron: what only that backend has to choose.
            optimizer: default `OptimizerOptions()`.
            max_tokens_per_micro_batch: the most tokens that one forward pass takes.

        Raises:
            ValueError: an unknown backend or architecture, sizes that do not divide, or a broken checkpoint; on every
                rank alike.
        """
        if deterministic:
            be_deterministic()
        grid = Grid.build(dims or ParallelDims(), device=device, mesh=mesh)
        options = EngineOptions(
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            pipeline=pipeline or PipelineOptions(),
            context_parallel=context_parallel,
            router_losses=router_losses or RouterLosses(),
            recompute=recompute,
            tp_invariant=tp_invariant,
            deterministic=deterministic,
            megatron=megatron or MegatronOptions(),
        )
        folder = agree(lambda: checkpoint_folder(path), grid.everyone)
        engine = load_engine(backend, folder, cls.role, grid, options)
        return cls(engine, optimizer or OptimizerOptions(), max_tokens_per_micro_batch)

    @cached_property
    def optimizer(self) -> Optimizer:
        """Made when it is first needed: a reference model has no use for fp32 masters."""
        return self.engine.build_optimizer(self.options)

    def _optimizer_state(self) -> Iterator[Tensor]:
        if "optimizer" in self.__dict__:
            yield from self.optimizer.tensors()

    @property
    def grid(self) -> Grid:
        """Where the model stands."""
        return self.engine.grid

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.engine.grid.device

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.options.learning_rate_at(self.steps)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint with the config and tokenizer files of the one that was loaded.

        Every rank calls it. The folder appears in one step when it is complete; what was there is kept until then.
        """
        self._memory.require("save_pretrained")
        self.engine.save(path)

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
                and `wait_for_save` wait for the end.

        Raises:
            ValueError, OSError: this save, or the one before in the background, went wrong; on every rank.
            RuntimeError: weights or optimizer state are offloaded.
        """
        self._memory.require("save_training", optimizer=True)
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
                "loss_scale": self.optimizer.loss_scale,
                "extra": dict(extra or {}),
            },
            keep=keep,
            group=group,
            asynchronous=asynchronous,
        )

    def wait_for_save(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            ValueError, OSError: what went wrong with it, on every rank, once.
        """
        saving, self._saving = self._saving, PendingSave()
        saving.wait()

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
        self._memory.require("load_training", optimizer=True)
        self.wait_for_save()
        state = checkpoint.load_training(self.engine, self.optimizer, path, step)
        self.steps = int(state.extra["steps"])
        self.skipped_steps = int(state.extra.get("skipped_steps", 0))
        if self.optimizer.loss_scale is not None and state.extra.get("loss_scale") is not None:
            self.optimizer.loss_scale = float(state.extra["loss_scale"])
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
            device: where the tensors are; None: where the parameters are.
            bucket_bytes: how much is exchanged at once; at least one tensor.
        """
        self._memory.require("stream_weights")
        return checkpoint.stream_weights(self.engine, to=to, dtype=dtype, device=device, bucket_bytes=bucket_bytes)

    def offload(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move this rank's weights, optimizer state, or both to (pinned) host memory, and free them on the device.

        Methods that need what is away raise; `onload` brings it back, bit for bit. What is away already stays so.

        Returns:
            Bytes given up on the device.
        """
        return self._memory.offload(weights=weights, optimizer=optimizer)

    def onload(self, *, weights: bool = True, optimizer: bool = True) -> None:
        """Bring back what `offload` has moved; what is here already stays so."""
        self._memory.onload(weights=weights, optimizer=optimizer)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """The sequences of each micro-batch: at most `max_tokens_per_micro_batch` tokens, equally many on all dp ranks.

        There are as many as the engine wants; some may be empty.

        Raises:
            ValueError: a sequence is longer than the budget.
        """
        return split_micro_batches(
            batch.lengths,
            self.max_tokens_per_micro_batch,
            group=self.grid.group("dp"),
            count_multiple_of=self.engine.micro_batches_multiple_of,
        )

    def predict(self, batch: Batch, *, temperature: float = 1.0, record_routing: bool = False) -> tuple[Tensor, ...]:
        """The engine's outputs without gradients, each `[T]`, aligned with their own token, in the batch's order.

        With `record_routing` the routing `[T, M, k]` follows them.
        """
        self._memory.require("a forward pass")
        batch = self._own(batch)
        indices = self.micro_batches(batch)
        if not indices:
            raise ValueError("the batch has no sequences, on any rank")
        parts = [self._part(batch, chosen) for chosen in indices]
        packed = [self._pack(part) for part in parts]
        with routed(self.engine, parts, packed, record=record_routing) as replays:
            outputs = self.engine.forward(packed, temperature=temperature)
        results = tuple(torch.zeros(batch.num_tokens, device=self.device) for _ in outputs[0])
        for chosen, part, output in zip(indices, parts, outputs, strict=True):
            if chosen:
                where = batch.positions(chosen)
                for result, column in zip(results, output, strict=True):
                    result[where] = shift_to_own_token(column, part)
        if record_routing:
            return *results, recorded(replays, parts, [batch.positions(chosen) for chosen in indices], batch.num_tokens)
        return results

    def step(
        self,
        batch: Batch,
        loss: Callable[[Batch, Outputs], LossTerms],
        *,
        aggregation: str,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on the whole batch: gradients add up over micro-batches and data-parallel ranks.

        The gradient is that of  sum_t w_t loss_t  over all tokens of all ranks, w being `token_weights`; so it does not
        depend on how the batch was divided.

        Where the optimizer scales losses (fp16), an overflow skips the step: the schedule stands still, and the metrics
        `skipped_steps` (so far) and `loss_scale` (of this step) say so.

        Raises:
            ValueError: the batch has nothing to learn from, or the loss is not one number per token.
            FloatingPointError: the gradient is not finite; the parameters have not been changed.
            RuntimeError: weights or optimizer state are offloaded.
        """
        self._memory.require("an update", optimizer=True)
        optimizer = self.optimizer  # before the backward: it says in which type gradients add up
        metrics = self._backward(self._own(batch), loss, aggregation, temperature)
        rate = self.learning_rate
        scale = optimizer.loss_scale
        norm = optimizer.step(rate)
        if not math.isfinite(norm) and scale is None:
            raise FloatingPointError(f"the gradient norm is {norm} (metrics: {metrics}); no step was taken")
        self.steps += math.isfinite(norm)
        self.skipped_steps += not math.isfinite(norm)
        if scale is not None:
            metrics |= {"loss_scale": scale, "skipped_steps": float(self.skipped_steps)}
        return {**metrics, "grad_norm": norm, "learning_rate": rate}

    def _backward(
        self, batch: Batch, loss: Callable[[Batch, Outputs], LossTerms], aggregation: str, temperature: float
    ) -> dict[str, float]:
        batch = batch.with_fields(_weight=token_weights(batch, aggregation, self.grid.group("dp")))
        parts = [self._part(batch, indices) for indices in self.micro_batches(batch)]
        sums: dict[str, Tensor] = {}

        def total(number: int, outputs: Outputs) -> Tensor:
            part = parts[number]
            # What is outside the mask is a constant: whatever a loss does there, no gradient can come of it.
            own = tuple(torch.where(part.mask, shift_to_own_token(output, part), 0) for output in outputs)
            terms = loss(part, own)
            if terms.loss.shape != part.tokens.shape:
                raise ValueError(f"the loss must be one number per token, [{part.num_tokens}], got {terms.loss.shape}")
            for name, value in {"loss": terms.loss, **terms.metrics}.items():
                sums[name] = sums.get(name, 0) + _weighted_sum(value.detach(), part)
            return _weighted_sum(terms.loss, part)

        packed = [self._pack(part) for part in parts]
        with routed(self.engine, parts, packed):
            self.engine.forward_backward(packed, total, temperature=temperature)
        return self._reduce(sums)

    def _own(self, batch: Batch) -> Batch:
        """The batch on this rank's device; its ids are checked before, where that does not stall the device."""
        check_token_ids(batch.tokens, self.engine.vocab_size)
        return batch.to(self.device)

    def _part(self, batch: Batch, indices: list[int]) -> Batch:
        """The sequences of a micro-batch. An empty one is one token outside the mask: the ranks must run in step."""
        if indices:
            return batch.select(indices)
        zero = {
            name: torch.full((1, *tensor.shape[1:]), -1 if name == ROUTING else 0, dtype=tensor.dtype)
            for name, tensor in batch.fields.items()
        }
        return Batch(torch.zeros(1, dtype=torch.int64), (1,), torch.zeros(1, dtype=torch.bool), zero).to(self.device)

    def _pack(self, part: Batch) -> PackedSequence:
        return part.packed(multiple_of=self.engine.tokens_multiple_of)

    def _reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum over dp, all numbers in one all-reduce; the other pipeline stages learn them from the last."""
        pipeline = self.grid.group("pp")
        names: list[str] = all_gather_json(list(sums), pipeline)[-1]
        zero = torch.zeros((), device=self.device)
        values = torch.stack([sums.get(name, zero) for name in names]).double()
        for group in (self.grid.group("dp"), pipeline):
            if group is not None:
                dist.all_reduce(values, group=group)
        return dict(zip(names, values.tolist(), strict=True))


def _weighted_sum(per_token: Tensor, part: Batch) -> Tensor:
    weight = part["_weight"]
    return torch.where(weight > 0, weight * per_token, 0).sum()
