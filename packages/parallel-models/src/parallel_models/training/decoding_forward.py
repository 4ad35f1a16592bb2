"""`DecodingForward`: new tokens through this rank's chunks of a model, by views of the model that have no hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache, decoding_attributes, float8_attributes
from parallel_layers.module import view_of
from parallel_layers.moe import gathered_attributes
from parallel_models.engine.vision import Vision, Visual
from parallel_models.generation.scorer import Scorer
from parallel_models.model.decoder import Decoder
from parallel_models.model.language_models import CausalLM
from parallel_models.training.pipeline import Pipeline
from parallel_models.training.stage import Stage


class DecodingForward:
    """The forward passes of a decoding model: prompts through all stages, and the chunks of a step.

    Args:
        prompts, steps: The views of the model that compute prompts and steps.
        head: The head of `steps`.
        stages: The chunks of this rank.
        pipeline: All stages; None: this rank has the only one.
        vision: The vision of the model.
        exact: See `CacheOptions`.
    """

    def __init__(
        self,
        prompts: CausalLM,
        steps: CausalLM,
        head: Scorer,
        stages: Sequence[Stage],
        pipeline: Pipeline | None,
        vision: Vision | None,
        *,
        exact: bool,
    ) -> None:
        self._prompts, self._steps, self._stages, self._pipeline = prompts, steps, stages, pipeline
        self._vision, self._exact, self._head = vision, exact, head

    def __call__(
        self, packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool, visual: Visual = ()
    ) -> Tensor | None:
        """Compute a step without a pipeline, which has logits, or prompts; see `ForwardPass`."""
        if logits:
            return self.step_chunk(0, packed, caches, None)
        packed = packed if self._vision is None else self._vision.positioned(packed, visual)

        def run(stage: Stage, hidden: Tensor | None) -> Tensor:
            images = stage.see(packed, visual, separate_packs=True)
            output: Tensor = self._prompts(packed, hidden, chunk=stage.chunk, cache=caches[0], visual=images)
            return output

        if self._pipeline is None:
            return run(self._stages[0], None)
        return self._pipeline.relay(self._prompts, packed.num_tokens, run)

    def step_chunk(
        self, number: int, packed: PackedSequence, caches: Sequence[SequenceCache], hidden: Tensor | None
    ) -> Tensor:
        """Compute this rank's chunk of this number for a step: hidden states, or the logits behind the last chunk."""
        model, chunk = self._steps, self._stages[number].chunk
        packed = packed if self._vision is None else self._vision.positioned(packed, ())
        states: Tensor = model(packed, hidden, chunk=chunk, cache=caches[0])
        return self._head.logits(states, exact=self._exact) if chunk.last else states

    def new_states(self, number: int, num_tokens: int, behind: bool) -> Tensor:
        """Return an empty tensor for the hidden states of a step in front of this rank's chunk, or behind it."""
        model, layers = self._steps, self._stages[number].chunk.layers
        shape = model.boundary_shape(num_tokens, layers[-1] + 1 if behind else layers[0], cached=True)
        return torch.empty(shape, dtype=model.dtype, device=next(model.parameters()).device)


def without_hooks(model: CausalLM) -> CausalLM:
    """Return a view without FSDP2's hooks: all parameters stay gathered, and a CUDA graph cannot capture the hooks."""
    return view_of(model, _remove_hooks)


def with_all_experts(model: CausalLM, *, float8: bool) -> CausalLM:
    """Return a view with the experts of all ranks, which are gathered."""
    return view_of(model, lambda module, view: view.__dict__.update(gathered_attributes(view, float8=float8)))


def for_steps(model: CausalLM, *, float8: bool) -> CausalLM:
    """Return a view without hooks that exchanges whole tokens of a decoding step (`parallel_layers.inference`)."""
    return view_of(model, partial(_exchange_whole_tokens, float8=float8))


def _remove_hooks(module: nn.Module, view: nn.Module) -> None:
    view.__dict__["_forward_pre_hooks"], view.__dict__["_forward_hooks"] = OrderedDict(), OrderedDict()


def _exchange_whole_tokens(module: nn.Module, view: nn.Module, *, float8: bool) -> None:
    _remove_hooks(module, view)
    view.__dict__.update(decoding_attributes(view))
    if float8:
        view.__dict__.update(float8_attributes(view))
    if isinstance(view, Decoder):
        view.boundaries = {edge: replace(boundary, tokens=1) for edge, boundary in view.boundaries.items()}
