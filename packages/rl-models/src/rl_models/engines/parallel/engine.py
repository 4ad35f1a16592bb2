"""`ParallelEngine`: the engine of `backend="parallel"`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

from torch import Tensor, nn

import ckpt
from parallel_layers import PackedSequence
from parallel_layers.moe import MoE, RouterReplay
from rl_models.engines.accumulate import backward_each, forward_each
from rl_models.engines.engine import OUTPUTS, Loss, NextLogits, Outputs
from rl_models.engines.fsdp import drop_gradients, release, shard_over_dp
from rl_models.engines.optimizer import AdamW, OptimizerOptions
from rl_models.engines.options import EngineOptions, RouterLosses
from rl_models.engines.parallel.calls import Call
from rl_models.engines.parallel.decoding import decode
from rl_models.engines.parallel.loads import LoadCounter, batch_totals
from rl_models.engines.parallel.pipeline import MakeTask, Pipeline, sum_tied_gradients
from rl_models.engines.parallel.stage import Stage
from rl_models.engines.replay import complete, local_replay
from rl_models.engines.shards import Shards
from rl_models.grid import Grid
from rl_models.models.language_models import CausalLM, PackedModel


class ParallelEngine:
    """A model of this package, divided over tp, pp, cp and ep, and over the ranks that hold the same by FSDP2.

    Attributes:
        model: what this rank holds, all its pipeline chunks together, under ckpt's local names.
        layout, places: where that stands; a place for each chunk.
        stages: the chunks, as they are called.
        routed_layers, num_experts: see `RoutedEngine`.
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
        self._replays: Sequence[RouterReplay] | None = None
        self.pipeline: Pipeline | None = None
        for stage in self.stages:
            experts = [module.experts for module in stage.modules() if isinstance(module, MoE)]
            # A pipeline runs other micro-batches between a block's forward and its backward: it stays gathered.
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

    def forward(self, micro_batches: Sequence[PackedSequence], *, temperature: float = 1.0) -> list[Outputs]:
        """The outputs of every micro-batch, without a graph."""
        call = self._call(temperature, micro_batches)
        outputs = self._run(call.task, micro_batches)
        self._complete(call, micro_batches)
        return outputs

    def forward_backward(
        self, micro_batches: Sequence[PackedSequence], loss: Loss, *, temperature: float = 1.0
    ) -> None:
        """Add the gradient of the losses, and of the routers' own."""
        call = self._with_totals(self._call(temperature, micro_batches), micro_batches)
        if self.pipeline is None:
            backward_each(self._outputs(call.task), self.stages[0], micro_batches, loss)
            self._complete(call, micro_batches)
            return
        # A tied embedding's two copies have summed gradients from the calls before.
        before = None if self._tied_copy is None else self._tied_copy.grad
        if self._tied_copy is not None:
            self._tied_copy.grad = None
        self.pipeline.forward_backward(micro_batches, call.task, loss)
        self._complete(call, micro_batches)
        sum_tied_gradients(self._tied_copy, self.pipeline.group)
        if before is not None and self._tied_copy is not None and self._tied_copy.grad is not None:
            self._tied_copy.grad += before

    def drop_gradients(self) -> None:
        """Drop the gradients of all stages."""
        for stage in self.stages:
            drop_gradients(stage)

    @contextmanager
    def routing(self, replays: Sequence[RouterReplay]) -> Iterator[None]:
        """Inside, one call of `forward` or `forward_backward` routes micro-batch i by `replays[i]`."""
        self._replays = replays
        try:
            yield
        finally:
            self._replays = None

    def _call(self, temperature: float, micro_batches: Sequence[PackedSequence]) -> Call:
        replays = None
        if self._replays is not None:
            sizes, decoder = self._sizes(micro_batches), self.model.model
            replays = [local_replay(r, decoder, n) for r, n in zip(self._replays, sizes, strict=True)]
        return Call(self.model, temperature, replays)

    def _with_totals(self, call: Call, micro_batches: Sequence[PackedSequence]) -> Call:
        """The call with what the routers' losses need to know of the whole batch."""
        losses = self.options.router_losses
        if losses == RouterLosses():
            return call
        counter = LoadCounter(self.model, call.replays, self._num_outputs)
        if losses.balance:
            self._run(counter.task, micro_batches)
        return replace(call, totals=batch_totals(micro_batches, counter.loads, self.grid))

    def _run(self, make_task: MakeTask, micro_batches: Sequence[PackedSequence]) -> list[Outputs]:
        """The last stage's results for every micro-batch, without a graph."""
        if self.pipeline is None:
            outputs = forward_each(self._outputs(make_task), micro_batches)
        else:
            outputs = self.pipeline.forward(micro_batches, make_task)
        for stage in self.stages:
            release(stage)
        return outputs

    def _sizes(self, micro_batches: Sequence[PackedSequence]) -> list[int]:
        """The tokens of each micro-batch as the layers see it: a pipeline pads them to one length."""
        sizes = [packed.num_tokens for packed in micro_batches]
        return sizes if self.pipeline is None else [max(sizes)] * len(sizes)

    def _complete(self, call: Call, micro_batches: Sequence[PackedSequence]) -> None:
        """Put what this call has recorded into the replays that it was given."""
        if self._replays is None or call.replays is None:
            return
        top_k = next(part.top_k for part in self.model.config.moe if part is not None)
        for replay, local, packed, size in zip(
            self._replays, call.replays, micro_batches, self._sizes(micro_batches), strict=True
        ):
            if replay.recording:
                complete(
                    replay,
                    local,
                    self.model.model,
                    layers=self.routed_layers,
                    shape=(size, top_k),
                    num_tokens=packed.num_tokens,
                    group=self.grid.group("pp"),
                    device=self.grid.device,
                )

    def _outputs(self, make_task: MakeTask) -> Callable[[PackedSequence], Outputs]:
        """The outputs of the micro-batches, one after the other, without a pipeline."""
        stage, numbers = self.stages[0], count()

        def outputs(packed: PackedSequence) -> Outputs:
            result: Outputs = stage.run(make_task(stage, next(numbers), packed))
            return result

        return outputs

    def _hidden_shape(self, num_tokens: int, *, cached: bool = False) -> tuple[int, int]:
        """Of what goes from stage to stage; with a cache every context-parallel rank works on all tokens."""
        parts = 1 if cached else self.grid.dims.cp
        if self.model.sequence_parallel:
            parts *= self.grid.dims.tp
        return num_tokens // parts, self.model.config.decoder.hidden_size

    @property
    def _tied_copy(self) -> nn.Parameter | None:
        """The embedding, where this rank holds one of two copies of it."""
        model = self.model
        if self.grid.dims.pp == 1 or not model.config.tie_word_embeddings or not isinstance(model, CausalLM):
            return None
        if model.chunks[0].first:
            return model.model.embed_tokens.weight
        return model.lm_head.weight if model.chunks[-1].last else None

    def build_optimizer(self, options: OptimizerOptions) -> AdamW:
        """AdamW on this rank's shards."""
        grid = self.grid
        groups = [grid.group("tp"), grid.group("ep")]
        return AdamW(self.model, options, groups=groups, pipeline_group=grid.group("pp"))

    def shards(self) -> Shards:
        """The parameters of this rank."""
        parameters = self.model.state_dict(keep_vars=True)
        return Shards(self.layout, [(place, self._of(place, parameters)) for place in self.places])

    def _of(self, place: ckpt.Place, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one chunk, of all that this rank holds."""
        return {name: tensors[name] for name in self.layout.at(place) if name in tensors}

    def decoding(self, num_sequences: int, max_length: int) -> AbstractContextManager[NextLogits]:
        """Decode with a KV cache, on every tp and cp rank alike, through one pipeline stage after another."""
        assert isinstance(self.model, CausalLM)
        return decode(
            self.model,
            self.stages,
            self.pipeline,
            self.grid,
            partial(self._hidden_shape, cached=True),
            num_sequences=num_sequences,
            max_length=max_length,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Every rank writes its own bytes; config and tokenizer files are carried over from where it was loaded."""
        tensors = self.model.state_dict()
        chunks = [self._of(place, tensors) for place in self.places]
        ckpt.save_hf(path, chunks, self.layout, self.places, group=self.grid.everyone, copy_from=self.source)
