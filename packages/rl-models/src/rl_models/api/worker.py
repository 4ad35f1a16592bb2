"""`Worker`: the base of actors and critics, with batches in and results per token or an optimizer step out."""

from __future__ import annotations

import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar, Self, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_layers import ParallelDims
from parallel_models import Engine, Grid, OptimizerOptions, Role
from parallel_models.engine import (
    OUTPUTS,
    Lora,
    checkpoint_folder,
    located,
    longest_sequence,
    max_positions,
    options_of,
    require_kind,
    require_lora,
    require_number,
    stored_dtype,
)
from rl_models.api.state import WorkerState
from rl_models.backends.options import BackendKeywords, BackendOptions
from rl_models.backends.registry import load_engine, require_learning, require_optimizer
from rl_models.batch.batch import Batch
from rl_models.calls.agreement import CallArguments, agree_on_call
from rl_models.calls.dispatch import dispatched, for_all, per_token
from rl_models.calls.passes import PartLoss, accumulate, predict


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
        base: Worker | None = None,
    ) -> None:
        super().__init__(engine, options, base)
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
        mesh: DeviceMesh | None = None,
        optimizer: OptimizerOptions | None = None,
        max_tokens_per_micro_batch: int = 16384,
        **options: Unpack[BackendKeywords],
    ) -> Self:
        """Load a Hugging Face checkpoint; each rank reads its own slices.

        Args:
            path: A folder with `config.json` and safetensors files, or a model's name on a hub, such as
                `organisation/name` or `organisation/name@revision`; see `parallel_models.engine.hub.located`.
            backend: One of `rl_models.backends.BACKENDS`.
            dims, device, mesh: The grid, see `Grid.build` (default: one rank).
            optimizer: The options of the optimizer (default: `OptimizerOptions()`, with a warning at the first update).
            max_tokens_per_micro_batch: The largest number of tokens in one forward pass.
            **options: Fields of `rl_models.backends.BackendOptions`: `dtype`, `sequence_parallel`, `pipeline`,
                `context_parallel`, `router_losses`, `recompute`, `tiled_mlp`, `offload_activations`, `float8`,
                `share_prefixes`, `keep_probabilities`, `tp_invariant`, `mtp_loss_scaling_factor`, `deterministic`,
                `lora`, `base_format` and `megatron`.

        Raises:
            ValueError: An option, the backend or the architecture is unknown, sizes do not divide, the checkpoint is
                broken, or options differ between ranks; on every rank alike.
        """
        others = ("path", "backend", "dims", "device", "mesh", "optimizer", "max_tokens_per_micro_batch")
        engine_options = options_of(BackendOptions, f"{cls.__name__}.from_pretrained", options, others)
        if optimizer is not None:
            require_kind("optimizer", optimizer, OptimizerOptions)
        if engine_options.deterministic:
            be_deterministic()
        grid = Grid.build(dims or ParallelDims(), device=device, mesh=mesh)
        folder = located(path, grid.everyone)

        def prepare() -> CallArguments:
            require_number("max_tokens_per_micro_batch", max_tokens_per_micro_batch, at_least=1, integer=True)
            checkpoint_folder(folder)
            longest_sequence(folder)  # refuses rope parameters that contradict each other, on every backend
            if optimizer is not None:
                require_learning(backend, engine_options.dtype or stored_dtype(folder))
                require_optimizer(backend, optimizer, adapters=engine_options.lora is not None)
            return CallArguments()

        agree_on_call(
            grid,
            f"{cls.__name__}.from_pretrained",
            prepare,
            backend=backend,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            **vars(engine_options),
            **vars(optimizer or OptimizerOptions()),
        )
        engine = load_engine(backend, folder, cls.role, grid, engine_options)
        return cls(engine, optimizer, max_tokens_per_micro_batch, max_positions(folder))

    @classmethod
    def sharing_base(
        cls,
        other: Worker,
        *,
        lora: Lora,
        optimizer: OptimizerOptions | None = None,
        max_tokens_per_micro_batch: int | None = None,
    ) -> Self:
        """Return a model with adapters of its own on the frozen base of another worker, which is in memory once.

        Such as a critic on the base of its actor: it has its own adapters, value head, optimizer and checkpoints.
        Grid, backend and further options are those of `other`. Every rank of the grid calls this method.

        Args:
            other: A worker that was loaded with `lora`. It holds the base: its `offload` takes the base away from both.
            lora: The adapters: `LoraOptions`, or a folder with an adapter of PEFT.
            optimizer: As for `from_pretrained`.
            max_tokens_per_micro_batch: The largest number of tokens in one forward pass (default: that of `other`).

        Raises:
            ValueError: `other` trains all of its weights, or its base lacks a head; a target of `lora` matches nothing;
                on every rank alike.
            RuntimeError: The weights of `other` are offloaded.
        """
        engine, tokens = other.engine, max_tokens_per_micro_batch
        if tokens is None:
            tokens = other.max_tokens_per_micro_batch
        if optimizer is not None:
            require_kind("optimizer", optimizer, OptimizerOptions)

        def prepare() -> CallArguments:
            require_number("max_tokens_per_micro_batch", tokens, at_least=1, integer=True)
            require_lora(lora)
            other._require("a shared base")
            if optimizer is not None:
                require_optimizer(engine.backend, optimizer, adapters=True)
            if engine.adapters() is None:
                raise ValueError(
                    f"the {type(other).__name__} trains all of its weights, so no other model can share them; load it "
                    "with from_pretrained(..., lora=LoraOptions(...))"
                )
            return CallArguments()

        name, of_optimizer = f"{cls.__name__}.sharing_base", vars(optimizer or OptimizerOptions())
        agree_on_call(other.grid, name, prepare, lora=lora, max_tokens_per_micro_batch=tokens, **of_optimizer)
        options = replace(engine.options, lora=lora)
        made = load_engine(engine.backend, engine.source, cls.role, other.grid, options, engine)
        return cls(made, optimizer, tokens, max_positions(engine.source), other)

    @dispatched(per_token)
    def predict(
        self, batch: Batch, *, temperature: float = 1.0, record_routing: bool = False, adapters: bool = True
    ) -> dict[str, Tensor]:
        """Return the outputs of the role (`rl_models.backends.OUTPUTS`) without gradients, each `[T]`.

        Each number stands at its token, in the batch's order.

        Router replay (arXiv:2510.11370): a batch with the field `routing` `[T, M, k]`, which `record_routing` or an
        inference engine's export gives, sends its tokens to those experts, here and in `update`, on every backend;
        a row of -1 leaves the choice to the router.

        Args:
            batch: This data-parallel rank's part.
            temperature: The logits are divided by this number.
            adapters: False computes with the frozen base alone, the reference of a policy with adapters (LoRA).
            record_routing: Return also `routing`, the experts `[T, M, k]` int16 of each token in the M layers of a
                mixture of experts.

        Raises:
            ValueError: A token is outside the vocabulary, or an expert outside 0..E-1; the model has no routing; ranks
                that differ in tp, cp or pp alone got other sequences or temperatures; on every rank alike. In a batch
                on a GPU a token outside the vocabulary is a device assertion.
        """
        self._require("a forward pass")
        call = f"{type(self).__name__}.predict"
        if not adapters:
            self._require_adapters()
            call += " without adapters"
        with nullcontext() if adapters else self.engine.without_adapters():
            results = predict(
                self.engine,
                batch,
                self.max_tokens_per_micro_batch,
                call=call,
                temperature=temperature,
                record_routing=record_routing,
            )
        self._warn_of_length(batch)
        names = OUTPUTS[self.role] + ("routing",) * record_routing
        return dict(zip(names, results, strict=True))

    def _warn_of_length(self, batch: Batch, stacklevel: int = 4) -> None:
        """Warn, once, of a sequence beyond the model's positions; its last token needs none, as no token follows."""
        longest = max(batch.lengths, default=0)
        if self.positions is not None and longest - 1 > self.positions:
            warnings.warn(
                f"a sequence of {longest} tokens goes beyond the model's {self.positions} positions "
                "(max_position_embeddings in its config.json): shorten prompts or max_new_tokens, unless the model is "
                "to learn longer sequences",
                stacklevel=stacklevel,
            )
            self.positions = None

    @dispatched(for_all, changes=True, needs="optimizer")
    def update(
        self, batch: Batch, loss: PartLoss, *, temperature: float = 1.0, aggregation: str = "token-mean"
    ) -> dict[str, float]:
        """Take one optimizer step on the batch.

        The gradient is that of  sum_t w_t loss_t  over all tokens of all ranks, with the weights w of `token_weights`;
        it does not depend on how the batch was divided. A call that raises changes nothing, unless the optimizer itself
        was interrupted. An error of the loss on one rank is raised on every rank.

        Args:
            batch: This data-parallel rank's part, with the fields that the loss reads.
            loss: A pure function of the outputs of the role (`rl_models.backends.OUTPUTS`) and the batch. It is called
                for each micro-batch with tokens in its mask; outside the mask its inputs are 0 and carry no gradient.
            temperature: As for `predict`.
            aggregation: How the terms are averaged (`rl_models.losses.aggregation.token_weights`).

        Returns:
            The means of `loss` and of the loss's metrics over the whole batch, all ranks together, `grad_norm`, and the
            `learning_rate` of the step. With `mtp_loss_scaling_factor` also `mtp_loss`, the mean of -log p over the
            multi-token-prediction layers; `loss` includes it, times that factor. Under a loss scale (fp16) also
            `loss_scale` and the number of `skipped_steps` so far: an overflow skips the step, and the schedule stands
            still.

        Raises:
            ValueError: The mask is empty, the loss is not one number per token, its metrics differ between
                micro-batches or ranks or have the names of results of this method, ranks give other aggregations, or
                for the reasons of `predict`.
            FloatingPointError: The gradient is not finite; the parameters have not changed.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        self._require("an update", optimizer=True)
        if self._warn_of_default:
            self._warn_of_default = False
            warnings.warn(
                f"no optimizer was given: updates take AdamW with learning_rate={self.options.learning_rate}; pass "
                "optimizer=OptimizerOptions(learning_rate=...) to from_pretrained",
                stacklevel=2,
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
        self._warn_of_length(batch, stacklevel=3)
        if scale is not None:
            metrics |= {"loss_scale": scale, "skipped_steps": float(self.skipped_steps)}
        return {**metrics, "grad_norm": norm, "learning_rate": rate}


def be_deterministic() -> None:
    """Make this process compute sums in fixed orders from now on; call this before the first use of cuBLAS.

    torch takes deterministic algorithms, and raises for an operation without one; flash attention takes its
    deterministic backward. cuBLAS gets one workspace, unless the environment has `CUBLAS_WORKSPACE_CONFIG`.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only reveals reads of uninitialized memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
