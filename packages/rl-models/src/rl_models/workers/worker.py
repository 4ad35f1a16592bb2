"""What actors and critics share: a batch in, per-token results or one optimizer step out."""

from __future__ import annotations

import math
import os
import warnings
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_layers import ParallelDims
from parallel_layers.attention.layer import ContextParallel
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
    """Loads an engine, and computes and learns with it whole batches at a time; the base of `Actor`, `Critic` and
    `ActorCritic`.

    Every data-parallel rank passes its own part of a batch; ranks that differ in tp, cp or pp alone pass the same.

    Attributes:
        max_tokens_per_micro_batch: the most tokens that one forward pass takes.
        positions: of the longest sequence that the model was made for; None: not known, or already warned of.
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
        """Load a Hugging Face checkpoint; each rank reads only what it will hold.

        Args:
            path: a folder with `config.json` and safetensors files.
            backend: one of `rl_models.engines.BACKENDS`.
            dims: the sizes of the grid; default one rank.
            device: default this process's CUDA device where there is one, else the CPU.
            dtype: of the parameters; default as stored. In fp16, which needs a loss scale, "megatron" alone learns: the
                other backends refuse fp16 with an `optimizer`.
            mesh: a mesh from `dims.build_mesh(...)`, when the grid is on some of the ranks; default all of them.
            sequence_parallel: default where tp > 1.
            pipeline: where pp > 1, the schedule, virtual stages and the split of the layers; default 1F1B, as even as
                possible.
            context_parallel: where cp > 1: "ulysses" or "ring".
            router_losses: of a mixture of experts, added by `update`; default none.
            recompute: what is computed again in the backward instead of saved: "full", "selective" (MLPs and experts),
                or the numbers of the layers that are.
            keep_probabilities: the head keeps `[T, V/tp]` in bf16 for the backward, which then needs a matrix product
                less (on GPUs; backends "parallel" and "transformers").
            tp_invariant: log-probs and values have the same bits at tp 1, 2 and 4 and in every batch (backend
                "parallel"; no mixture of experts). Generation is not part of it.
            deterministic: the same call gives the same bits at every run on the same grid. It is a setting of the whole
                process and stays; see `rl_models.workers.determinism`.
            megatron: what only that backend has to choose.
            optimizer: default `OptimizerOptions()`, of which the first `update` warns.
            max_tokens_per_micro_batch: the most tokens that one forward pass takes.

        Raises:
            ValueError: an unknown backend or architecture, sizes that do not divide, a broken checkpoint, or options
                that differ between ranks; on every rank alike.
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
        """Return all outputs of the role (`rl_models.engines.OUTPUTS`) without gradients, each `[T]`.

        They are aligned with their own token, in the batch's order; with `record_routing` also the routing `[T, M, k]`.
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

        Rotary embeddings go on there, and a model may learn to; beyond the trained length outputs are unreliable. The
        last token needs no position: its successor belongs to no sequence.
        """
        longest = max(batch.lengths, default=0)
        if self.positions is not None and longest - 1 > self.positions:
            warnings.warn(
                f"a sequence of {longest} tokens goes beyond the model's {self.positions} positions "
                "(max_position_embeddings in its config.json): shorten prompts or max_new_tokens, unless the model is "
                "to learn it",
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
        """Take one optimizer step on the whole batch: gradients add up over micro-batches and data-parallel ranks.

        The gradient is that of  sum_t w_t loss_t  over all tokens of all ranks, w being `token_weights`; so it does not
        depend on how the batch was divided.

        Where the optimizer scales losses (fp16), an overflow skips the step: the schedule stands still, and the metrics
        `skipped_steps` (so far) and `loss_scale` (of this step) say so.

        A step that raises changes nothing, unless the optimizer itself was interrupted; the next step starts without
        its gradients.

        Raises:
            ValueError: the batch has nothing to learn from, the loss is not one number per token, or it reports other
                metrics of some micro-batches or on some ranks.
            FloatingPointError: the gradient is not finite; the parameters have not been changed.
            RuntimeError: weights or optimizer state are offloaded.
        """
        self._memory.require("an update", optimizer=True)
        if self._warn_of_default:
            self._warn_of_default = False
            warnings.warn(
                f"no optimizer was given: updates take AdamW with learning_rate={self.options.learning_rate}; pass "
                "optimizer=OptimizerOptions(learning_rate=...) to from_pretrained",
                stacklevel=3,
            )
        optimizer = self.optimizer  # before the backward: it says in which type gradients add up
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
            self.engine.drop_gradients()  # the next update would learn from them, too
            raise
        if not math.isfinite(norm) and scale is None:
            raise FloatingPointError(f"the gradient norm is {norm} (metrics: {metrics}); no step was taken")
        self.steps += math.isfinite(norm)
        self.skipped_steps += not math.isfinite(norm)
        self._warn_of_length(batch)
        if scale is not None:
            metrics |= {"loss_scale": scale, "skipped_steps": float(self.skipped_steps)}
        return {**metrics, "grad_norm": norm, "learning_rate": rate}
