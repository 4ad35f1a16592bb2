"""`ParallelEngine`: the engine of `backend="parallel"`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

import ckpt
from parallel_layers.moe import BatchTotals, MoE
from rl_models.engines.accumulate import backward_each, forward_each
from rl_models.engines.decoding import CacheOptions, Decoding
from rl_models.engines.engine import OUTPUTS, Loss, Outputs
from rl_models.engines.fsdp import drop_gradients, release, shard_over_dp
from rl_models.engines.micro_batch import MicroBatch
from rl_models.engines.optimizer import AdamW, OptimizerOptions
from rl_models.engines.options import EngineOptions, RouterLosses
from rl_models.engines.padding import pad_to
from rl_models.engines.parallel.decoding import decode
from rl_models.engines.parallel.pipeline import MakeTask, Pipeline, sum_tied_gradients
from rl_models.engines.parallel.replay import complete, local_replay
from rl_models.engines.parallel.stage import Stage
from rl_models.engines.parallel.tasks import LoadCounter, batch_totals, compute
from rl_models.engines.shards import Shards
from rl_models.grid import Grid
from rl_models.models.language_models import CausalLM, PackedModel


class ParallelEngine:
    """A native model, divided over tp, pp, cp and ep, and over dp x cp by FSDP2.

    Attributes:
        model: All pipeline chunks of this rank, under ckpt's local names.
        layout, places: The model's layout, and a place for each chunk.
        stages: The chunks as callable modules.
        routed_layers, num_experts: See `Engine`.
    """

    def __init__(
        self,
        model: PackedModel,
        layout: ckpt.Layout,
        places: Sequence[ckpt.Place],
        grid: Grid,
        options: EngineOptions,
        source: str,
    ) -> None:
        self.module = self.model = model
        self.layout, self.places, self.grid, self.options, self.source = layout, places, grid, options, source
        self.vocab_size = model.config.vocab_size
        self._num_outputs = len(OUTPUTS[layout.role])
        self.tokens_multiple_of = model.tokens_multiple_of
        self.micro_batches_multiple_of = grid.dims.pp
        self.stages = [Stage(model, chunk) for chunk in model.chunks]
        self.routed_layers = [i for i, part in enumerate(model.config.moe) if part is not None]
        self.num_experts = max((part.num_experts for part in model.config.moe if part is not None), default=0)
        self.pipeline: Pipeline | None = None
        for stage in self.stages:
            experts = [module.experts for module in stage.modules() if isinstance(module, MoE)]
            # Blocks stay gathered in a pipeline: it runs other micro-batches between a forward and its backward.
            shard_over_dp(stage, stage.blocks, grid, experts=experts, reshard_blocks=grid.dims.pp == 1)
        if (group := grid.group("pp")) is not None:
            self.pipeline = Pipeline(
                self.stages,
                group,
                options.pipeline,
                hidden_shape=self._hidden_shape,
                dtype=next(model.parameters()).dtype,
                device=grid.device,
                num_outputs=self._num_outputs,
            )

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch, without a graph."""
        local = self._local(micro_batches)
        outputs = self._run(partial(compute, self.model, None), local)
        self._complete(micro_batches, local)
        return [_trimmed(each, output) for each, output in zip(micro_batches, outputs, strict=True)]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the losses and of the routers' losses."""
        local = self._local(micro_batches)
        make_task = partial(compute, self.model, self._totals(local))
        if self.pipeline is None:
            backward_each(self._model(make_task), self.stages[0], local, loss)
            self._complete(micro_batches, local)
            return
        # The two copies of a tied embedding hold the summed gradients of earlier calls.
        before = None if self._tied_copy is None else self._tied_copy.grad
        if self._tied_copy is not None:
            self._tied_copy.grad = None
        self.pipeline.forward_backward(
            local, make_task, lambda number, out: loss(micro_batches[number], _trimmed(micro_batches[number], out))
        )
        self._complete(micro_batches, local)
        sum_tied_gradients(self._tied_copy, self.pipeline.group)
        if before is not None and self._tied_copy is not None and self._tied_copy.grad is not None:
            self._tied_copy.grad += before

    def drop_gradients(self) -> None:
        """Drop the gradients of all stages."""
        for stage in self.stages:
            drop_gradients(stage)

    def _local(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches as this rank's layers take them: padded to one length in a pipeline, and with the
        part of each replay that belongs to this rank's tokens."""
        longest, local = max(each.packed.num_tokens for each in micro_batches), []
        for each in micro_batches:
            packed = each.packed if self.pipeline is None else pad_to(each.packed, longest)
            replay = each.replay and local_replay(each.replay, self.model.model, packed.num_tokens)
            local.append(replace(each, packed=packed, replay=replay))
        return local

    def _totals(self, local: Sequence[MicroBatch]) -> BatchTotals | None:
        """Return the totals of the whole batch that the routers' losses need before its first gradient."""
        losses = self.options.router_losses
        if losses == RouterLosses():
            return None
        counter = LoadCounter(self.model, self._num_outputs)
        if losses.balance:
            self._run(counter.task, local)
        return batch_totals(local, counter.loads, self.grid)

    def _run(self, make_task: MakeTask, local: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the last stage's results for every micro-batch, without a graph."""
        if self.pipeline is None:
            outputs = forward_each(self._model(make_task), local)
        else:
            outputs = self.pipeline.forward(local, make_task)
        for stage in self.stages:
            release(stage)
        return outputs

    def _complete(self, micro_batches: Sequence[MicroBatch], local: Sequence[MicroBatch]) -> None:
        """Put the recordings of all ranks into the caller's replays."""
        for each, own in zip(micro_batches, local, strict=True):
            if each.replay is not None and own.replay is not None and each.replay.recording:
                top_k = next(part.top_k for part in self.model.config.moe if part is not None)
                complete(
                    each.replay,
                    own.replay,
                    self.model.model,
                    layers=self.routed_layers,
                    shape=(own.packed.num_tokens, top_k),
                    num_tokens=each.packed.num_tokens,
                    group=self.grid.group("pp"),
                    device=self.grid.device,
                )

    def _model(self, make_task: MakeTask) -> Callable[[MicroBatch], Outputs]:
        """Return the model as a function of a micro-batch, where there is no pipeline."""

        def outputs(micro_batch: MicroBatch) -> Outputs:
            result: Outputs = self.stages[0].run(make_task(self.stages[0], micro_batch))
            return result

        return outputs

    def _hidden_shape(self, num_tokens: int, *, cached: bool = False) -> tuple[int, int]:
        """Return the shape of the hidden states between stages; with a cache every cp rank works on all tokens."""
        parts = 1 if cached else self.grid.dims.cp
        if self.model.sequence_parallel:
            parts *= self.grid.dims.tp
        return num_tokens // parts, self.model.config.decoder.hidden_size

    @property
    def _tied_copy(self) -> nn.Parameter | None:
        """The tied embedding, if this rank holds one of its two copies."""
        model = self.model
        if self.grid.dims.pp == 1 or not model.config.tie_word_embeddings or not isinstance(model, CausalLM):
            return None
        if model.chunks[0].first:
            return model.model.embed_tokens.weight
        return model.lm_head.weight if model.chunks[-1].last else None

    def build_optimizer(self, options: OptimizerOptions) -> AdamW:
        """Return AdamW on this rank's shards."""
        grid = self.grid
        groups = [grid.group("tp"), grid.group("ep")]
        return AdamW(self.model, options, groups=groups, pipeline_group=grid.group("pp"))

    def shards(self) -> Shards:
        """Return the parameters of this rank."""
        parameters = self.model.state_dict(keep_vars=True)
        return Shards(self.layout, [(place, self._of(place, parameters)) for place in self.places])

    def _of(self, place: ckpt.Place, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of one chunk."""
        return {name: tensors[name] for name in self.layout.at(place) if name in tensors}

    def decoding(self, options: CacheOptions) -> AbstractContextManager[Decoding]:
        """See `Engine`."""
        assert isinstance(self.model, CausalLM)
        hidden_shape = partial(self._hidden_shape, cached=True)
        return decode(self.model, self.stages, self.pipeline, self.grid, hidden_shape, options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bytes of this rank, and copy config and tokenizer files from the loaded checkpoint."""
        tensors = self.model.state_dict()
        chunks = [self._of(place, tensors) for place in self.places]
        ckpt.save_hf(path, chunks, self.layout, self.places, group=self.grid.everyone, copy_from=self.source)


def _trimmed(micro_batch: MicroBatch, outputs: Outputs) -> Outputs:
    """Return the outputs without the tokens that a pipeline has added."""
    return tuple(output[: micro_batch.packed.num_tokens] for output in outputs)
