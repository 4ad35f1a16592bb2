"""`ParallelEngine`: the engine of `backend="parallel"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt
from parallel_layers.attention import gather_sequence
from parallel_layers.data import pad_to
from parallel_layers.device import GPU
from parallel_layers.inference import decodes_in_blocks
from parallel_layers.linear import SCALES, dense_weight, round_again_, with_execution
from parallel_layers.moe import (
    BatchTotals,
    GroupedExperts,
    MoE,
    RouterReplay,
    RoutingContext,
    waits_for_counts,
)
from parallel_layers.training import sum_in_place_, sum_norm_gradients_once
from parallel_models.engine.engine import OUTPUTS, Engine, Loss, MicroBatch, Outputs, Shards
from parallel_models.engine.grid import Grid
from parallel_models.engine.options import EngineOptions, RouterLosses
from parallel_models.engine.vision import Vision, Visual
from parallel_models.generation.decoding import CacheOptions, Decoding
from parallel_models.generation.drafter import Drafter
from parallel_models.generation.experts import gathers_experts
from parallel_models.generation.options import require_drafts
from parallel_models.generation.scorer import Scorer
from parallel_models.generation.stage_ring import StageRing
from parallel_models.model.language_models import CausalLM
from parallel_models.model.packed_model import PackedModel
from parallel_models.optimizers.interface import OptimizerOptions
from parallel_models.optimizers.master_weights import ShardOptimizer
from parallel_models.training.decoding_forward import (
    DecodingForward,
    for_steps,
    with_all_experts,
    without_hooks,
)
from parallel_models.training.fsdp import backward_each, drop_gradients, forward_each, gathered, release, shard_over_dp
from parallel_models.training.pipeline import Computation, Pipeline, tied_gradients
from parallel_models.training.shared_prefixes import shared_mask, shared_pack, whole_outputs
from parallel_models.training.stage import Stage, batch_totals, compute, count_loads


class ParallelEngine(Engine):
    """A native model, divided over tp, pp, cp and ep, and over dp x cp of a replica by FSDP2.

    `model` has all pipeline chunks of this rank, under ckpt's local names; `stages` are the chunks as callable modules.
    `pipeline` is None for pp 1.
    """

    def __init__(
        self,
        model: PackedModel,
        layout: ckpt.Layout,
        places: Sequence[ckpt.Place],
        grid: Grid,
        options: EngineOptions,
        adapters: ckpt.AdapterLayout | None = None,
        vision: Vision | None = None,
    ) -> None:
        self.module = self.model = model
        self.adapter_layout = adapters
        self.layout, self.places, self.grid, self.options = layout, places, grid, options
        self.images = self.vision = vision
        self.vocab_size = model.config.vocab_size
        self.num_labels = layout.num_labels
        self._num_outputs = len(OUTPUTS[layout.role]) + layout.num_labels - 1
        self.shares_prefixes = options.share_prefixes
        self.distils = not options.share_prefixes
        self.separates_values = layout.role == "causal_lm_with_value"
        self.lists_tokens = isinstance(model, CausalLM) and not options.tp_invariant
        self.tokens_multiple_of = model.tokens_multiple_of
        self.micro_batches_multiple_of = grid.dims.pp
        self.stages = [Stage(model, chunk, vision) for chunk in model.chunks]
        mixtures = {i: mixture for i, mixture in enumerate(model.config.moe) if mixture is not None}
        self._top_k = {i: mixture.top_k for i, mixture in mixtures.items()}
        self.routed_layers = list(mixtures)
        self.num_experts = max((mixture.num_experts for mixture in mixtures.values()), default=0)
        if options.pipeline.schedule != "zero-bubble":  # which computes gradients by `torch.autograd.grad`
            sum_in_place_(model.parameters())
        if grid.dims.dp * grid.dims.cp * grid.dims.pp > 1:
            # Else whole FP8 copies of weights that FSDP2 divides are kept, in a pipeline for each micro-batch.
            round_again_(model)
        for stage in self.stages:
            experts = [module.experts for module in stage.modules() if isinstance(module, MoE)]
            # Blocks stay gathered in a pipeline: it runs other micro-batches between a forward and its backward.
            one_stage = grid.dims.pp == 1
            head = getattr(model, "lm_head", None) if one_stage else None
            shard_over_dp(stage, stage.blocks, grid, experts=experts, head=head, reshard_blocks=one_stage)
        self.mtp_loss_scaling_factor = options.mtp_loss_scaling_factor
        self.further_outputs = layout.prediction_layers if layout.predicts else 0
        self.pipeline: Pipeline | None = None
        if (group := grid.group("pp")) is not None:
            counts = self._num_outputs, self.further_outputs
            self.pipeline = Pipeline(model, self.stages, group, options.pipeline, grid.device, *counts)

    def require_visual(self, sequences: Sequence[Tensor], visual: Visual) -> None:
        """See `Engine`."""
        super().require_visual(sequences, visual)
        if visual and self.options.tp_invariant:
            raise ValueError(
                "tp_invariant=True is for text alone: a vision tower computes the images of a micro-batch together, so "
                "the bits of one depend on the others; leave tp_invariant or the images out"
            )

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch."""
        local = self._local(micro_batches)
        outputs = self._run(partial(compute, self.model, None), local)
        self._complete(micro_batches, local)
        return [
            _trimmed(micro_batch, _of_sequences(local_batch, output))
            for micro_batch, local_batch, output in zip(micro_batches, local, outputs, strict=True)
        ]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the losses and of the routers' losses."""
        local = self._local(micro_batches)
        computation = partial(compute, self.model, self._totals(local), further=self.further_outputs > 0)
        tower = [] if self.vision is None or self.vision.tower is None else self.vision.tower.parameters()
        with self.dropout(), sum_norm_gradients_once(self.model, self.grid.group("tp"), tower):
            if self.pipeline is None:
                backward_each(
                    self._as_function(computation),
                    self.stages[0],
                    local,
                    lambda batch, out: loss(batch, _of_sequences(batch, out)),
                )
            else:
                with tied_gradients(self._embedding_copy, self.pipeline.group):
                    self.pipeline.forward_backward(
                        local,
                        computation,
                        lambda n, out: loss(micro_batches[n], _trimmed(micro_batches[n], _of_sequences(local[n], out))),
                    )
        self._complete(micro_batches, local)

    def drop_gradients(self) -> None:
        """Drop the gradients of all stages."""
        for stage in self.stages:
            drop_gradients(stage)

    def _local(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches as this rank's layers take them: padded to one length in a pipeline, and with the
        part of each replay that belongs to this rank's tokens."""
        local = [self._with_prefixes(batch) if batch.prompts else batch for batch in micro_batches]
        longest = max(batch.packed.num_tokens for batch in local)
        for number, batch in enumerate(local):
            packed = batch.packed if self.vision is None else self.vision.positioned(batch.packed, batch.visual)
            packed = packed if self.pipeline is None else pad_to(packed, longest)
            replay = batch.replay and self._local_replay(batch.replay, packed.num_tokens)
            mask = batch.sampling_mask
            mask = None if mask is None else mask.pad(packed.num_tokens)
            teacher = batch.distillation and batch.distillation.pad(packed.num_tokens)
            local[number] = replace(batch, packed=packed, replay=replay, sampling_mask=mask, distillation=teacher)
        return local

    def _with_prefixes(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch that has each of its prompts once."""
        shared = shared_pack(micro_batch.packed, micro_batch.prompts)
        packed = pad_to(shared.packed, shared.packed.num_tokens + -shared.packed.num_tokens % self.tokens_multiple_of)
        return replace(micro_batch, packed=packed, shared=shared, sampling_mask=shared_mask(micro_batch))

    def _local_replay(self, replay: RouterReplay, num_tokens: int) -> RouterReplay:
        """Return this rank's part of a replay, with rows of -1 for padding up to `num_tokens`."""
        local = RouterReplay()
        local.recording = replay.recording
        for layer, entry in ({} if replay.recording else replay.experts).items():
            padding = entry.new_full((num_tokens - len(entry), entry.shape[1]), -1)
            local.experts[layer] = self.model.model.split(torch.cat([entry, padding]))
        return local

    def _totals(self, local: Sequence[MicroBatch]) -> BatchTotals | None:
        """Return the totals of the whole batch that the routers' losses need before its first gradient."""
        losses, contexts = self.options.router_losses, list[RoutingContext]()
        if losses == RouterLosses():
            return None
        if losses.balance:
            self._run(partial(count_loads, self.model, self._num_outputs, contexts), local)
        return batch_totals(local, contexts, self.grid)

    def _run(self, computation: Computation, local: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the last stage's results for every micro-batch, without a graph."""
        if self.pipeline is None:
            return forward_each(self._as_function(computation), self.stages[0], local)
        outputs = self.pipeline.forward(local, computation)
        for stage in self.stages:
            release(stage)
        return outputs

    def _as_function(self, computation: Computation) -> Callable[[MicroBatch], Outputs]:
        """Return the model as a function of a micro-batch, where there is no pipeline."""
        (stage,) = self.stages
        return lambda micro_batch: stage.run(partial(computation, stage, micro_batch))

    def _complete(self, micro_batches: Sequence[MicroBatch], local: Sequence[MicroBatch]) -> None:
        """Put the recordings of all ranks into the caller's replays, on every rank.

        Communication: an all-gather for each layer over the context-parallel group, and one all-reduce over the
        pipeline.
        """
        decoder = self.model.model
        for micro_batch, local_batch in zip(micro_batches, local, strict=True):
            if micro_batch.replay is None or local_batch.replay is None or not micro_batch.replay.recording:
                continue
            # [M, T, k]: M layers with routed experts, T tokens, k experts a token.
            shape = len(self._top_k), local_batch.packed.num_tokens, max(self._top_k.values())
            table_MTk = torch.zeros(shape, dtype=torch.int64, device=self.grid.device)
            for row, layer in enumerate(self._top_k):
                if layer in local_batch.replay.experts:
                    experts = local_batch.replay.experts[layer]
                    table_MTk[row] = gather_sequence(experts, decoder.context_group, layout=decoder.context_layout)
            if self.pipeline is not None:  # each layer is on one stage, and 0 elsewhere
                dist.all_reduce(table_MTk, group=self.pipeline.group)
            experts_of_layers = table_MTk[:, : micro_batch.packed.num_tokens].unbind()
            micro_batch.replay.experts.update(zip(self._top_k, experts_of_layers, strict=True))

    @property
    def _embedding_copy(self) -> nn.Parameter | None:
        """The embedding, if the first and the last stage of a pipeline hold a copy each, and this rank is one of them.

        The copy of the last stage is the tied head, or serves the multi-token-prediction layers.
        """
        model, tied = self.model, self.model.config.tie_word_embeddings
        if not (tied or self.layout.predicts) or not isinstance(model, CausalLM):
            return None
        if model.chunks[0].first:
            return model.model.embed_tokens.weight
        if not model.chunks[-1].last:
            return None
        weight = (model.lm_head if tied or model.mtp is None else model.mtp.embed_tokens).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def build_optimizer(self, options: OptimizerOptions) -> ShardOptimizer:
        """Return an optimizer of this rank's shards."""
        return ShardOptimizer(
            self.model,
            options,
            shards=self.adapters() or self.shards(),
            everyone=self.grid.everyone,
            groups=[self.grid.group(axis) for axis in ("tp", "ep", "replicate")],
            pipeline_group=self.grid.group("pp"),
        )

    def shards(self) -> Shards:
        """Return the parameters of this rank, without adapters."""
        return self._shards(self.layout)

    def adapters(self) -> Shards | None:
        """See `Engine`."""
        return None if self.adapter_layout is None else self._shards(self.adapter_layout)

    def _shards(self, layout: ckpt.Layout) -> Shards:
        tensors = self.model.state_dict(keep_vars=True)
        if self.options.base_format is not None and layout is self.layout:
            tensors |= self._dense()
        chunks = []
        for place in self.places:
            copies = {copy: tensors[original] for copy, original in shared_copies(layout, place).items()}
            stored = tensors | copies
            chunks.append((place, {name: stored[name] for name in layout.at(place) if name in stored}))
        return Shards(layout, chunks)

    def _dense(self) -> dict[str, Tensor]:
        """Return dense copies of the weights that are in FP8, by name; every rank calls this."""
        weights: dict[str, Tensor] = {}
        for path, module in self.model.named_modules():
            for name in list(module._parameters) if hasattr(module, "dense_dtype") else ():
                if getattr(module, f"{name}{SCALES}", None) is not None:
                    weights[f"{path}.{name}"] = dense_weight(module, name)
        return weights

    @contextmanager
    def decoding(self, options: CacheOptions) -> Iterator[Decoding]:
        """See `Engine`."""
        model, grid = self.model, self.grid
        assert isinstance(model, CausalLM)
        self.require_drafts(options.drafts)
        exact = options.exact or self.options.tp_invariant
        for name in ("float8", "float8_cache"):
            if self.options.tp_invariant and getattr(options, name):
                raise ValueError(
                    f"{name}=True excludes tp_invariant=True: rounding in FP8 is not training's; leave one out"
                )
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(gathered(stage, reshard_blocks=grid.dims.pp == 1))
            new_cache = partial(model.new_cache, float8=options.float8_cache, drafts=options.drafts > 0)
            gathers = gathers_experts(model, grid, options, new_cache)
            held = with_all_experts(model, float8=options.float8) if gathers else model
            prompts = steps = without_hooks(held)
            if not exact:
                steps = for_steps(held, float8=options.float8)
                if model.dtype.itemsize < torch.float32.itemsize:
                    # Half the bytes of a sum over tp, as in the steps.
                    prompts = with_execution(prompts, reduce_dtype=model.dtype)
            head = Scorer(steps)
            forward = DecodingForward(prompts, steps, head, self.stages, self.pipeline, self.vision, exact=exact)
            waits = any(waits_for_counts(layer) for layer in model.modules() if isinstance(layer, GroupedExperts))
            capturable = grid.device.type == GPU and not waits and not exact
            caches = options.build([new_cache], grid)
            if self.options.tp_invariant and not options.exact:
                # Ranks that exchange rows of experts wait for counts.
                capturable = decodes_in_blocks(caches[0]) and not waits and (gathers or grid.dims.ep == 1)
            drafter = None
            if options.drafts:
                drafting = for_steps(held, float8=False) if exact else steps
                drafter = Drafter(prompts, steps, head, drafting, options.drafts, exact=exact)
            ring, stages = None, grid.group("pp")
            if stages is not None:
                ring = StageRing(stages, len(self.stages), forward.step_chunk, forward.new_states)
            yield Decoding(
                caches, forward, exact, capturable, grid.group("tp"), stages, ring,
                lasting=True, independent=gathers, drafter=drafter, recurrent=model.config.has_linear_attention,
                scorer=head if head.is_invariant else None,
            )  # fmt: skip

    def require_drafts(self, drafts: int) -> None:
        """Raise ValueError unless the model can draft tokens."""
        require_drafts(drafts, self.layout.prediction_layers, self.grid.dims.pp, images=self.vision is not None)


def shared_copies(layout: ckpt.Layout, place: ckpt.Place) -> dict[str, str]:
    """Map each local copy to the local tensor that it duplicates in the files, by local names."""
    blocks = layout.at(place)
    local = {block.names[0]: name for name, block in blocks.items()}
    entries = {name: layout.canonical[block.names[0]] for name, block in blocks.items()}
    return {name: local[entry.copy_of] for name, entry in entries.items() if entry.copy_of is not None}


def _of_sequences(local: MicroBatch, outputs: Outputs) -> Outputs:
    """Return the outputs of whole sequences, where prompts are shared."""
    return outputs if local.shared is None else whole_outputs(local.shared, outputs, local.prompts)


def _trimmed(micro_batch: MicroBatch, outputs: Outputs) -> Outputs:
    """Return the outputs without the tokens that a pipeline has added."""
    return tuple(output[: micro_batch.packed.num_tokens] for output in outputs)
