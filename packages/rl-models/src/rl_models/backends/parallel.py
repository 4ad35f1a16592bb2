"""`backend="parallel"`: the models of this package over parallel-layers, loaded and saved by ckpt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt
from ckpt import agree
from parallel_layers import PackedSequence
from parallel_layers.activations import XIELU
from parallel_layers.moe import MoE, RouterReplay, RoutingContext
from rl_models.backends.accumulate import backward_each, forward_each
from rl_models.backends.continuation import continue_sequences
from rl_models.backends.engine import Loss, NextLogits, Outputs, Role
from rl_models.backends.fsdp import full_tensors, gathered, release, shard_over_dp
from rl_models.backends.options import EngineOptions, RouterLosses
from rl_models.backends.pipeline import Pipeline, sum_tied_gradients
from rl_models.backends.replay import complete, local_replay
from rl_models.backends.shards import Shards
from rl_models.backends.stage import Stage, Task
from rl_models.backends.stored import stored_dtype
from rl_models.config import ModelConfig
from rl_models.decoder import Chunk, ModelOptions
from rl_models.grid import Grid
from rl_models.models import CausalLM, ValueModel
from rl_models.optimizer import AdamW, OptimizerOptions

MODELS: dict[Role, type[CausalLM] | type[ValueModel]] = {"causal_lm": CausalLM, "value": ValueModel}


class _Call(NamedTuple):
    """What one call of an engine does with every micro-batch.

    Attributes:
        temperature: of the logits.
        router_scale: of the routers' losses; None: there are none.
        replays: of this rank's part of each micro-batch; None: the routers choose, and nothing is recorded.
    """

    temperature: float
    router_scale: float | None
    replays: Sequence[RouterReplay] | None


class ParallelEngine:
    """A `CausalLM` or `ValueModel`, divided over tp, pp, cp and ep, and over the ranks that hold the same by FSDP2.

    Attributes:
        model: what this rank holds, all its pipeline chunks together, under ckpt's local names.
        layout, places: where that stands; a place for each chunk.
        stages: the chunks, as they are called.
        routed_layers, num_experts: see `RoutedEngine`.
    """

    def __init__(
        self,
        model: CausalLM | ValueModel,
        layout: ckpt.Layout,
        places: Sequence[ckpt.Place],
        grid: Grid,
        options: EngineOptions,
        source: str,
    ) -> None:
        self.module = self.model = model
        self.layout, self.places, self.grid, self.options, self.source = layout, places, grid, options, source
        self.vocab_size = model.config.vocab_size
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
                num_outputs=1 if isinstance(model, ValueModel) else 2,
            )

    def forward(self, micro_batches: Sequence[PackedSequence], *, temperature: float = 1.0) -> list[Outputs]:
        """The outputs of every micro-batch, without a graph."""
        call = self._call(temperature, micro_batches)
        if self.pipeline is None:
            outputs = forward_each(self._outputs(call), micro_batches)
        else:
            outputs = self.pipeline.forward(micro_batches, partial(self._task, call))
        for stage in self.stages:
            release(stage)
        self._complete(call, micro_batches)
        return outputs

    def forward_backward(
        self, micro_batches: Sequence[PackedSequence], loss: Loss, *, temperature: float = 1.0
    ) -> None:
        """Add the gradient of the losses, and of the routers' own."""
        call = self._call(temperature, micro_batches)
        if self.pipeline is None:
            backward_each(self._outputs(call), self.stages[0], micro_batches, loss)
            self._complete(call, micro_batches)
            return
        # A tied embedding's two copies have summed gradients from the calls before.
        before = None if self._tied_copy is None else self._tied_copy.grad
        if self._tied_copy is not None:
            self._tied_copy.grad = None
        self.pipeline.forward_backward(micro_batches, partial(self._task, call), loss, self.grid.everyone)
        self._complete(call, micro_batches)
        sum_tied_gradients(self._tied_copy, self.pipeline.group)
        if before is not None and self._tied_copy is not None and self._tied_copy.grad is not None:
            self._tied_copy.grad += before

    @contextmanager
    def routing(self, replays: Sequence[RouterReplay]) -> Iterator[None]:
        """Inside, one call of `forward` or `forward_backward` routes micro-batch i by `replays[i]`."""
        self._replays = replays
        try:
            yield
        finally:
            self._replays = None

    def _call(self, temperature: float, micro_batches: Sequence[PackedSequence]) -> _Call:
        # The routers' losses are means over the tokens at hand, the loss a sum over micro-batches and ranks.
        parts = len(micro_batches) * self.grid.dims.dp * self.grid.dims.cp
        scale = 1 / parts if self.options.router_losses != RouterLosses() else None
        if self._replays is None:
            return _Call(temperature, scale, None)
        sizes = self._sizes(micro_batches)
        decoder = self.model.model
        return _Call(
            temperature, scale, [local_replay(r, decoder, n) for r, n in zip(self._replays, sizes, strict=True)]
        )

    def _sizes(self, micro_batches: Sequence[PackedSequence]) -> list[int]:
        """The tokens of each micro-batch as the layers see it: a pipeline pads them to one length."""
        sizes = [packed.num_tokens for packed in micro_batches]
        return sizes if self.pipeline is None else [max(sizes)] * len(sizes)

    def _complete(self, call: _Call, micro_batches: Sequence[PackedSequence]) -> None:
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

    def _task(self, call: _Call, stage: Stage, number: int, packed: PackedSequence) -> Task:
        """What a stage does with a micro-batch: hidden states, or the outputs of the last."""

        def task(hidden: Tensor | None) -> Tensor | Outputs:
            model, chunk = self.model, stage.chunk
            routing = None
            if call.router_scale is not None or call.replays is not None:
                replay = None if call.replays is None else call.replays[number]
                routing = RoutingContext.of(packed, replay=replay, loss_scale=call.router_scale or 0.0)
            if not chunk.last:
                states: Tensor = model(packed, hidden, chunk=chunk, routing=routing)
                return states
            if isinstance(model, ValueModel):
                return (model.values(packed, hidden, chunk=chunk, routing=routing),)
            result = model.log_probs(packed, hidden, chunk=chunk, temperature=call.temperature, routing=routing)
            assert result.entropy is not None
            return result.log_probs, result.entropy

        return task

    def _outputs(self, call: _Call) -> Callable[[PackedSequence], Outputs]:
        """The outputs of the micro-batches, one after the other, without a pipeline."""
        stage, numbers = self.stages[0], count()

        def outputs(packed: PackedSequence) -> Outputs:
            result: Outputs = stage.run(self._task(call, stage, next(numbers), packed))
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

    @contextmanager
    def decoding(self, num_sequences: int, max_length: int) -> Iterator[NextLogits]:
        """Decode with a KV cache, on every tp and cp rank alike, through one pipeline stage after another."""
        model, pipeline = self.model, self.pipeline
        assert isinstance(model, CausalLM)
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(gathered(stage, reshard_blocks=self.grid.dims.pp == 1))
            stack.enter_context(torch.no_grad())
            cache = model.new_cache(num_sequences, max_length)
            lengths = [0] * num_sequences

            def run(packed: PackedSequence, stage: Stage, hidden: Tensor | None) -> Tensor:
                method = model.next_logits if stage.chunk.last else model
                logits: Tensor = stage.run(
                    lambda hidden: method(packed, hidden, chunk=stage.chunk, cache=cache), hidden
                )
                return logits

            def next_logits(tokens: Sequence[Tensor]) -> Tensor:
                packed = continue_sequences(tokens, lengths, model.tokens_multiple_of)
                for n, new in enumerate(tokens):
                    lengths[n] += len(new)
                logits: Tensor | None
                if pipeline is None:
                    logits = run(packed, self.stages[0], None)
                else:
                    logits = pipeline.relay(self._hidden_shape(packed.num_tokens, cached=True), partial(run, packed))
                return self._same_on_all_ranks(logits, (num_sequences, self.vocab_size))

            yield next_logits

    def _same_on_all_ranks(self, logits: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """The logits of the last pipeline stage, those of its first context-parallel rank bit for bit: each of them has
        computed all, and may have met its tokens in another order at the experts."""
        result = torch.empty(shape, device=self.grid.device) if logits is None else logits.contiguous()
        if (context := self.grid.group("cp")) is not None:
            dist.broadcast(result, group=context, group_src=0)
        if (stages := self.grid.group("pp")) is not None:
            dist.broadcast(result, group=stages, group_src=stages.size() - 1)
        return result

    def save(self, path: str | os.PathLike[str]) -> None:
        """Every rank writes its own bytes; config and tokenizer files are carried over from where it was loaded."""
        tensors = full_tensors(self.model)
        chunks = [self._of(place, tensors) for place in self.places]
        ckpt.save_hf(path, chunks, self.layout, self.places, group=self.grid.everyone, copy_from=self.source)


def load(path: str, role: Role, grid: Grid, options: EngineOptions) -> ParallelEngine:
    """Load a checkpoint; each rank reads only its own slices.

    Raises:
        ValueError: the architecture or a config field is not supported, sizes do not divide over the grid, or the
            checkpoint is broken; on every rank alike.
    """
    group = grid.group("tp")
    sequence_parallel = group is not None if options.sequence_parallel is None else options.sequence_parallel
    if sequence_parallel and group is None:
        raise ValueError("sequence_parallel=True needs tp > 1; leave it out or set dims=ParallelDims(tp=...)")
    pipeline = options.pipeline
    if grid.dims.pp == 1 and (pipeline.virtual_stages > 1 or pipeline.split is not None):
        raise ValueError(f"{pipeline} needs pp > 1; leave it out or set dims=ParallelDims(pp=...)")
    places = _places(grid, pipeline.virtual_stages)

    def build() -> tuple[CausalLM | ValueModel, ckpt.Layout]:
        config = ModelConfig.from_hf(path)
        config = replace(config, decoder=replace(config.decoder, context_parallel=options.context_parallel))
        losses = options.router_losses
        config = config.with_router_losses(balance_loss=losses.balance, z_loss=losses.z)
        if not any(config.moe) and (grid.dims.ep > 1 or losses != RouterLosses()):
            raise ValueError(
                f"ep={grid.dims.ep} and router_losses={losses} are for a mixture of experts, which {config.family} is "
                "not; leave them out"
            )
        split = "balanced" if pipeline.split is None else list(pipeline.split)
        layout = ckpt.layout_for(config.hf, target="parallel", role=role, layers=split)
        model_options: ModelOptions = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "context_group": grid.group("cp"),
            "expert_group": grid.group("ep"),
            "expert_tensor_parallel": grid.expert_tensor_parallel,
            "chunks": _chunks(layout, places),
            "recompute": options.recompute,
            "tp_invariant": options.tp_invariant,
            "dtype": options.dtype or stored_dtype(path),
            # Nothing is allocated or initialised that the checkpoint then replaces.
            "device": "meta",
        }
        return MODELS[role](config, **model_options), layout

    model, layout = agree(build, grid.everyone)
    model.to_empty(device=grid.device)
    for module in model.modules():
        if isinstance(module, XIELU):
            module.reset_parameters()  # a checkpoint may lack the activation's constants
    if isinstance(model, ValueModel) and model.chunks[-1].last:
        # What a causal language model's checkpoint does not have: a critic that starts with the value 0 everywhere.
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    state = model.state_dict()
    for place in places:
        ckpt.load_hf(path, layout, place, into=state, group=grid.everyone)
    return ParallelEngine(model, layout, places, grid, options, path)


def _places(grid: Grid, virtual_stages: int) -> list[ckpt.Place]:
    """Where each of this rank's chunks stands."""
    dims = grid.dims
    return [
        ckpt.Place(
            tp=(grid.rank("tp"), dims.tp),
            pp=(grid.rank("pp"), dims.pp),
            vpp=(chunk, virtual_stages),
            ep=(grid.rank("ep"), dims.ep),
            etp=None if grid.expert_tensor_parallel else (0, 1),
        )
        for chunk in range(virtual_stages)
    ]


def _chunks(layout: ckpt.Layout, places: Sequence[ckpt.Place]) -> list[Chunk]:
    """The layers of each of this rank's chunks.

    Raises:
        ValueError: a chunk would have no layer, or what `ckpt.place_layers` refuses.
    """
    layers = layout.chunk_layers(places[0].grid)
    if not all(layers):
        raise ValueError(
            f"num_hidden_layers={layout.num_layers} is fewer than pp * virtual_stages = {len(layers)}; every chunk "
            "needs a layer"
        )
    return [Chunk(layers[p.chunk], first=p.chunk == 0, last=p.chunk == len(layers) - 1) for p in places]
