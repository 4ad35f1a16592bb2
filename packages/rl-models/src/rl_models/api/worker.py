"""`Worker`: the base of actors and critics, with batches in and results per token or an optimizer step out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Self, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_layers.head import TeacherHead
from parallel_models import Engine, Grid, OptimizerOptions, Role, be_deterministic
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
from parallel_models.training import TrainedModel
from rl_models.backends.options import BackendKeywords, BackendOptions
from rl_models.backends.registry import load_engine, require_learning, require_optimizer
from rl_models.batch.batch import Batch
from rl_models.calls.agreement import CallArguments, agree_on_call, warn
from rl_models.calls.dispatch import Method, dispatched, for_all, per_token
from rl_models.calls.distillation import Divergence
from rl_models.calls.passes import LossFunction, accumulate, predict


class Worker(TrainedModel):
    """The base of `Actor`, `Critic` and `ActorCritic`: loads an engine, computes with it and trains it.

    Every data-parallel rank passes its own part of a batch; ranks that differ in tp, cp or pp alone pass the same.

    Attributes:
        max_tokens_per_micro_batch: The largest number of tokens in one forward pass.
        positions: The longest sequence that the model supports; None: unknown, or the warning was given.
        inherited: The division of the methods of `TrainedModel` over ranks.
    """

    role: ClassVar[Role]
    inherited: ClassVar[Mapping[str, Method]] = {
        "save_pretrained": Method(),
        "save_adapter": Method(),
        "save_training": Method(needs="optimizer"),
        "wait_for_save": Method(needs="nothing"),
        "load_training": Method(changes=True, needs="optimizer"),
        "offload": Method(gather=sum, changes=True, needs="nothing"),
        "onload": Method(changes=True, needs="nothing"),
    }

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
        self.teacher_head: TeacherHead | None = None

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
            max_tokens_per_micro_batch: The largest number of tokens in one forward pass. `generate` computes a prompt
                with images in one pass, also a longer one.
            **options: Fields of `parallel_models.EngineOptions` and `rl_models.backends.BackendOptions`.

        Raises:
            ValueError: An option, the backend or the architecture is unknown, sizes do not divide, the checkpoint is
                broken, or options differ between ranks; on every rank alike.
        """
        other_names = ("path", "backend", "dims", "device", "mesh", "optimizer", "max_tokens_per_micro_batch")
        engine_options = options_of(BackendOptions, f"{cls.__name__}.from_pretrained", options, other_names)
        if optimizer is not None:
            require_kind("optimizer", optimizer, OptimizerOptions)
        if engine_options.deterministic:
            be_deterministic()
        grid = Grid.build(dims or ParallelDims(), device=device, mesh=mesh)
        checkpoint = Checkpoint(located(path, grid.everyone))

        def prepare() -> CallArguments:
            require_number("max_tokens_per_micro_batch", max_tokens_per_micro_batch, at_least=1, integer=True)
            checkpoint_folder(checkpoint.path)
            longest_sequence(checkpoint)  # refuses rope parameters that contradict each other, on every backend
            if optimizer is not None:
                require_learning(backend, engine_options.dtype or stored_dtype(checkpoint))
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
        engine = load_engine(backend, checkpoint, cls.role, grid, engine_options)
        return cls(engine, optimizer, max_tokens_per_micro_batch, max_positions(checkpoint))

    @classmethod
    def sharing_base(
        cls,
        other: Worker,
        *,
        lora: Lora,
        optimizer: OptimizerOptions | None = None,
        max_tokens_per_micro_batch: int | None = None,
    ) -> Self:
        """Return a model with new adapters on the frozen base of another worker, which is in memory once.

        A critic on the base of its actor, for example, has its own adapters, value head, optimizer and checkpoints.
        The new model takes grid, backend and further options from `other`. Every rank of the grid calls this method.

        Args:
            other: A worker that was loaded with `lora`. It holds the base: its `offload` offloads the base of both.
            lora: The adapters: `LoraOptions`, or a folder with an adapter of PEFT.
            optimizer: As for `from_pretrained`.
            max_tokens_per_micro_batch: The largest number of tokens in one forward pass (default: as for `other`).

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
            other._require_adapters()
            return CallArguments()

        name, optimizer_fields = f"{cls.__name__}.sharing_base", vars(optimizer or OptimizerOptions())
        agree_on_call(other.grid, name, prepare, lora=lora, max_tokens_per_micro_batch=tokens, **optimizer_fields)
        options = replace(engine.options, lora=lora)
        checkpoint = Checkpoint(engine.source)
        shared_engine = load_engine(engine.backend, checkpoint, cls.role, other.grid, options, engine)
        return cls(shared_engine, optimizer, tokens, max_positions(checkpoint), other)

    def _agree(
        self, method: str, check: Callable[[], None] = lambda: None, *, optimizer: bool = False, **everywhere: object
    ) -> None:
        """Check a call that needs the weights and, on request, the optimizer on every rank; see `agree_on_call`."""

        def prepare() -> CallArguments:
            self._require(method, optimizer=optimizer)
            check()
            return CallArguments()

        agree_on_call(self.grid, f"{type(self).__name__}.{method}", prepare, **everywhere)

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
        with self._with_adapters(adapters) as without:
            results = predict(
                self.engine,
                batch,
                self.max_tokens_per_micro_batch,
                call=f"{type(self).__name__}.predict{without}",
                temperature=temperature,
                record_routing=record_routing,
            )
        self._warn_of_length(batch)
        names = OUTPUTS[self.role] + ("routing",) * record_routing
        return dict(zip(names, results, strict=True))

    @contextmanager
    def _with_adapters(self, used: bool) -> Iterator[str]:
        """Compute with or without adapters inside the block, which gets a part of the call's name."""
        if used:
            yield ""
            return
        self._require_adapters()
        with self.engine.without_adapters():
            yield " without adapters"

    def _warn_of_length(self, batch: Batch) -> None:
        """Warn, once, of a sequence beyond the model's positions; the last token needs no position."""
        longest = max(batch.lengths, default=0)
        if self.positions is not None and longest - 1 > self.positions:
            warn(
                f"a sequence of {longest} tokens goes beyond the model's {self.positions} positions "
                "(max_position_embeddings in its config.json): shorten prompts or max_new_tokens, unless the model is "
                "to learn longer sequences"
            )
            self.positions = None

    @dispatched(for_all, changes=True, needs="optimizer")
    def update(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        aggregation: str = "token-mean",
        divergence: Divergence | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on the batch: `forward_backward`, with its arguments, and `optimizer_step`.

        A call that raises changes nothing, unless the optimizer itself was interrupted. Results and errors: see both
        methods.
        """
        metrics = self.forward_backward(
            batch, loss, temperature=temperature, aggregation=aggregation, divergence=divergence
        )
        return self._step(metrics)

    @dispatched(for_all, changes=True, needs="optimizer")
    def forward_backward(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        aggregation: str = "token-mean",
        divergence: Divergence | None = None,
    ) -> dict[str, float]:
        """Add the gradient of the loss on the batch to the gradients of earlier calls, for the next `optimizer_step`.

        The function differentiated is  sum_t w_t loss_t  over all tokens of all ranks, with the weights w of
        `token_weights`, however the batch was divided. The weights of each call add up to 1, and the gradients of
        calls add: for the mean over several batches, multiply each loss by the share of its batch. A pass that fails
        drops all gradients, also from earlier calls. An error of the loss on one rank is raised on every rank.

        Args:
            batch: This data-parallel rank's part, with the fields that the loss reads. Ranks that differ in tp, cp or
                pp alone compute with the floating-point fields of the first of these ranks.
            loss: A pure function of `rl_models.LossInputs` that returns a term for each token: `LossTerms`, or a bare
                tensor `[T]`. It is called for each micro-batch with tokens in its mask.
            temperature: As for `predict`.
            aggregation: How the terms are averaged (`rl_models.losses.aggregation.token_weights`).
            divergence: Give the loss the field `divergence` `[T]` of the micro-batch, with its gradient: each token's
                divergence from the teacher in the batch's fields (`rl_models.calls.distillation`), over the whole
                vocabulary also where the batch has a sampling mask. An actor on backend="parallel" takes it.

        Returns:
            The means of `loss` and of the loss's metrics over the whole batch, all ranks together. With
            `mtp_loss_scaling_factor` also `mtp_loss`, the mean of -log p over the multi-token-prediction layers; `loss`
            includes it, times that factor.

        Raises:
            ValueError: The mask is empty; the loss is not one number per token; the loss's metrics differ between
                micro-batches or ranks, or are named like results of `update`; the aggregation differs between ranks; or
                as for `predict`.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        self._require("an update", optimizer=True)
        if self._warn_of_default:
            self._warn_of_default = False
            warn(
                f"no optimizer was given: updates take AdamW with learning_rate={self.options.learning_rate}; pass "
                "optimizer=OptimizerOptions(learning_rate=...) to from_pretrained"
            )
        with self._dropping_gradients():
            _ = self.optimizer  # built before the backward: the optimizer sets the dtype of sums of gradients
            metrics = accumulate(
                self.engine,
                batch,
                loss,
                self.max_tokens_per_micro_batch,
                call=f"{type(self).__name__}.forward_backward",
                aggregation=aggregation,
                temperature=temperature,
                divergence=divergence,
                teacher_head=self.teacher_head,
            )
        self._has_gradients = True
        self._warn_of_length(batch)
        return metrics

    @dispatched(changes=True, needs="optimizer")
    def optimizer_step(self) -> dict[str, float]:
        """Clip the sum of the gradients of the `forward_backward` calls since the last step, and take a step.

        Returns:
            `grad_norm`, and the `learning_rate` of the step. Under a loss scale (fp16) also `loss_scale` and the number
            of `skipped_steps` so far: an overflow skips the step, and the schedule stands still.

        Raises:
            ValueError: There are no gradients.
            FloatingPointError: The gradient is not finite; the parameters have not changed.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        self._agree("optimizer_step", self._require_gradients, optimizer=True)
        return self._step({})

    def _require_gradients(self) -> None:
        if not self._has_gradients:
            raise ValueError("optimizer_step has no gradients since the last step; call forward_backward first")

    def _step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Take a step, and return its numbers with the metrics of its gradient."""
        rate, scale = self.learning_rate, self.optimizer.loss_scale
        with self._dropping_gradients():
            norm = self.optimizer.step(rate)
        self._has_gradients = False
        if not math.isfinite(norm) and scale is None:
            raise FloatingPointError(f"the gradient norm is {norm} (metrics: {metrics}); no step was taken")
        self.steps += math.isfinite(norm)
        self.skipped_steps += not math.isfinite(norm)
        if scale is not None:
            metrics = {**metrics, "loss_scale": scale, "skipped_steps": float(self.skipped_steps)}
        return {**metrics, "grad_norm": norm, "learning_rate": rate}

    @contextmanager
    def _dropping_gradients(self) -> Iterator[None]:
        """Drop the gradients if the block raises: the next step would use them."""
        try:
            yield
        except BaseException:
            self._drop_gradients()
            raise
