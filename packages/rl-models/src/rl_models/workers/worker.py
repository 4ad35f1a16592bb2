"""`Worker`: the base of actors and critics, with batches in and results per token or an optimizer step out."""

from __future__ import annotations

import math
import os
import warnings
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_layers import ParallelDims
from parallel_layers.attention.config import ContextParallel
from rl_models.batch import Batch
from rl_models.engines import (
    OUTPUTS,
    Engine,
    EngineOptions,
    MegatronOptions,
    PipelineOptions,
    Role,
    RouterLosses,
    load_engine,
    require_learning,
)
from rl_models.engines.optimizer import OptimizerOptions
from rl_models.engines.positions import max_positions
from rl_models.engines.stored import stored_dtype
from rl_models.grid import Grid, checkpoint_folder
from rl_models.models.decoder import Recompute
from rl_models.numbers import require_number
from rl_models.workers.agreement import Given, agree_on_call
from rl_models.workers.determinism import be_deterministic
from rl_models.workers.dispatch import dispatched, for_all, per_token
from rl_models.workers.passes import PartLoss, accumulate, predict
from rl_models.workers.state import WorkerState


class Worker(WorkerState):
    """The base of `Actor`, `Critic` and `ActorCritic`: loads an engine, computes with it and trains it.

    Every data-parallel rank passes its own part of a batch; ranks that differ in tp, cp or pp alone pass the same.

    Attributes:
        max_tokens_per_micro_batch: The largest number of tokens in one forward pass.
        positions: The longest sequence that the model supports; None: unknown, or the warning was given.
    """

    role: ClassVar[Role]

    def __init__(
        self,
        engine: Engine,
        options: OptimizerOptions | None,
        max_tokens_per_micro_batch: int,
        positions: int | None = None,
    ) -> None:
        super().__init__(engine, options)
        self._warn_of_default = options is None
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.positions = positions

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
        keep_probabilities: bool = False,
        tp_invariant: bool = False,
        deterministic: bool = False,
        megatron: MegatronOptions | None = None,
        optimizer: OptimizerOptions | None = None,
        max_tokens_per_micro_batch: int = 16384,
    ) -> Self:
        """Load a Hugging Face checkpoint; each rank reads its own slices. `EngineOptions` explains the other arguments.

        Args:
            path: A folder with `config.json` and safetensors files.
            backend: One of `rl_models.engines.BACKENDS`.
            dims: The sizes of the grid (default: one rank).
            device: The device (default: this process's CUDA device if there is one, else the CPU).
            dtype: The dtype of the parameters (default: as stored). "megatron" alone trains fp16.
            mesh: A mesh of `dims.build_mesh(...)` for a grid on some of the ranks (default: all ranks).
            sequence_parallel: Keep `[T/tp, H]` between blocks (default: if tp > 1).
            pipeline: The schedule, virtual stages and the split of the layers (default: 1F1B, as even as possible).
            tp_invariant: Give log-probs and values with the same bits at tp 1, 2 and 4 and in every batch (backend
                "parallel", dense models). Generation is ordinary.
            deterministic: Give the same bits at every run on the same grid. This sets the whole process for good; see
                `rl_models.workers.determinism`.
            optimizer: The options of the optimizer (default: `OptimizerOptions()`, with a warning at the first update).
            max_tokens_per_micro_batch: The largest number of tokens in one forward pass.

        Raises:
            ValueError: The backend or architecture is unknown, sizes do not divide, the checkpoint is broken, or
                options differ between ranks; on every rank alike.
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
            keep_probabilities=keep_probabilities,
            tp_invariant=tp_invariant,
            deterministic=deterministic,
            megatron=megatron or MegatronOptions(),
        )

        def prepare() -> Given:
            require_number("max_tokens_per_micro_batch", max_tokens_per_micro_batch, at_least=1, integer=True)
            if optimizer is not None:
                require_learning(backend, dtype or stored_dtype(checkpoint_folder(path)))
            return Given()

        agree_on_call(
            grid,
            f"{cls.__name__}.from_pretrained",
            prepare,
            backend=backend,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            **vars(options),
            **vars(optimizer or OptimizerOptions()),
        )
        folder = checkpoint_folder(path)
        engine = load_engine(backend, folder, cls.role, grid, options)
        return cls(engine, optimizer, max_tokens_per_micro_batch, max_positions(folder))

    @dispatched(per_token)
    def predict(self, batch: Batch, *, temperature: float = 1.0, record_routing: bool = False) -> dict[str, Tensor]:
        """Return the outputs of the role (`rl_models.engines.OUTPUTS`) without gradients, each `[T]`.

        Each number stands at its token, in the batch's order. With `record_routing` the result also has the
        routing `[T, M, k]`.
        """
        self._memory.require("a forward pass")
        results = predict(
            self.engine,
            batch,
            self.max_tokens_per_micro_batch,
            call=f"{type(self).__name__}.predict",
            temperature=temperature,
            record_routing=record_routing,
        )
        self._warn_of_length(batch)
        names = OUTPUTS[self.role] + ("routing",) * record_routing
        return dict(zip(names, results, strict=True))

    def _warn_of_length(self, batch: Batch) -> None:
        """Warn, once, of a sequence beyond the model's positions.

        Rotary embeddings have values there, but outputs beyond the trained length are unreliable. The last token needs
        no position: no token of the sequence follows it.
        """
        longest = max(batch.lengths, default=0)
        if self.positions is not None and longest - 1 > self.positions:
            warnings.warn(
                f"a sequence of {longest} tokens goes beyond the model's {self.positions} positions "
                "(max_position_embeddings in its config.json): shorten prompts or max_new_tokens, unless the model is "
                "to learn longer sequences",
                stacklevel=4,
            )
            self.positions = None

    @dispatched(for_all, changes=True, needs="optimizer")
    def step(
        self,
        batch: Batch,
        loss: PartLoss,
        *,
        aggregation: str,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Take one optimizer step on the whole batch, over all micro-batches and data-parallel ranks.

        The gradient is that of  sum_t w_t loss_t  over all tokens of all ranks, with the weights w of `token_weights`;
        it does not depend on how the batch was divided.

        Under a loss scale (fp16), an overflow skips the step: the schedule stands still, and the metrics
        `skipped_steps` (so far) and `loss_scale` (of this step) count it.

        A step that raises changes nothing, unless the optimizer itself was interrupted; the next step starts without
        its gradients.

        Raises:
            ValueError: The mask is empty, the loss is not one number per token, or its metrics differ between
                micro-batches or ranks.
            FloatingPointError: The gradient is not finite; the parameters have not changed.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        self._memory.require("an update", optimizer=True)
        if self._warn_of_default:
            self._warn_of_default = False
            warnings.warn(
                f"no optimizer was given: updates take AdamW with learning_rate={self.options.learning_rate}; pass "
                "optimizer=OptimizerOptions(learning_rate=...) to from_pretrained",
                stacklevel=3,
            )
        optimizer = self.optimizer  # made before the backward: it sets the dtype of sums of gradients
        rate = self.learning_rate
        scale = optimizer.loss_scale
        try:
            metrics = accumulate(
                self.engine,
                batch,
                loss,
                self.max_tokens_per_micro_batch,
                call=f"{type(self).__name__}.update",
                aggregation=aggregation,
                temperature=temperature,
            )
            norm = optimizer.step(rate)
        except BaseException:
            self.engine.drop_gradients()  # the next update would use them
            raise
        if not math.isfinite(norm) and scale is None:
            raise FloatingPointError(f"the gradient norm is {norm} (metrics: {metrics}); no step was taken")
        self.steps += math.isfinite(norm)
        self.skipped_steps += not math.isfinite(norm)
        self._warn_of_length(batch)
        if scale is not None:
            metrics |= {"loss_scale": scale, "skipped_steps": float(self.skipped_steps)}
        return {**metrics, "grad_norm": norm, "learning_rate": rate}
