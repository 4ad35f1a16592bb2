"""`PackedModel`: a decoder over packed sequences, to which each kind of model adds its head.

Shape legend: T tokens of a packed batch with its padding, T' this rank's tokens under sequence and context parallelism,
H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers import (
    ModelConfig,
    PackedSequence,
    next_token_labels,
)
from parallel_layers.attention import gather_sequence
from parallel_layers.data import SharedPrefixes
from parallel_layers.distributed import gather_from_sequence_parallel
from parallel_layers.head import Distillation, SamplingMask
from parallel_layers.inference import SequenceCache
from parallel_layers.linear import SCALES
from parallel_layers.moe import RoutingContext
from parallel_models.model.decoder import Chunk, Decoder, ModelOptions, VisualStates
from parallel_models.model.multi_token_prediction import Predictions


class HeadInputs(NamedTuple):
    """Hidden states `[T', H]`, labels `[T]`, and the options of a score; `rows` `[R]` limits it to these rows."""

    states: Tensor
    labels: Tensor
    temperature: float | Tensor = 1.0
    sampling_mask: SamplingMask | None = None
    rows: Tensor | None = None
    distillation: Distillation | None = None
    top_n: int | None = None
    values_only: bool = False


class PackedModel(nn.Module):
    """A decoder, to which each kind of model adds its head.

    The config is `ModelConfig.from_hf(...)`; for the options see `ModelOptions`. `state_dict()` has the names of
    `ckpt.layout_for(config, target="parallel")`, for this rank's chunks of a pipeline.
    `Actor.from_pretrained` loads the parameters.
    """

    def __init__(self, config: ModelConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__()
        self.config, self.group = config, options.get("group")
        self.sequence_parallel = options.get("sequence_parallel", False) and self.group is not None
        options["sequence_parallel"] = self.sequence_parallel
        self.tp_invariant = options.get("tp_invariant", False)
        self.keep_probabilities = options.get("keep_probabilities", False)
        self.model = Decoder(config, **options)
        self.chunks: Sequence[Chunk] = self.model.chunks
        self.mtp: Predictions | None = None
        self._tp, self._cp = (1 if group is None else group.size() for group in (self.group, self.model.context_group))
        # Without expert tensor parallelism the ranks of a group divide their tokens before these go to the experts.
        per_rank = self._tp if self.sequence_parallel or not options.get("expert_tensor_parallel", True) else 1
        zigzag = 2 * self._cp if self._cp > 1 and self.model.context_layout == "zigzag" else 1
        self.tokens_multiple_of = math.lcm(self._cp * per_rank, zigzag)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        float8 = torch.float8_e4m3fn  # of a frozen weight, beside fp32 scales
        dtypes = (p.dtype for name, p in self.named_parameters() if p.dtype != float8 and not name.endswith(SCALES))
        return next(dtypes)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of every output: fp64 in a model in fp64, else fp32."""
        return torch.promote_types(self.dtype, torch.float32)

    def boundary_shape(self, num_tokens: int, layer: int, *, cached: bool = False) -> tuple[int, int]:
        """Return the shape of the tensor in front of a chunk's first layer, or behind its last layer, for T tokens.

        With a cache every cp rank works on all tokens.
        """
        divisions = (1 if cached else self._cp) * (self._tp if self.sequence_parallel else 1)
        return num_tokens // divisions, self.model.boundaries[layer].columns

    def forward(
        self,
        packed: PackedSequence,
        hidden: Tensor | None = None,
        *,
        chunk: Chunk | None = None,
        cache: SequenceCache | None = None,
        routing: RoutingContext | None = None,
        visual: VisualStates | None = None,
        following: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states `[T', H]` of this rank's tokens, or a chunk's result; see `Decoder.forward`.

        A cache gets the tokens. With `following` `[T]`, the token after each, it gets the keys and values of the
        multi-token-prediction layers, too (`new_cache(drafts=True)`).
        """
        if packed.num_tokens % self.tokens_multiple_of:
            raise ValueError(
                f"{packed.num_tokens} tokens are no multiple of {self.tokens_multiple_of}, which sequence (tp) and "
                f"context parallelism (cp) need; pack with multiple_of={self.tokens_multiple_of}"
            )
        result: Tensor = self.model(packed, hidden, chunk=chunk, cache=cache, routing=routing, visual=visual)
        if cache is not None and (chunk or self.chunks[0]) is self.chunks[-1]:
            if following is not None:
                assert self.mtp is not None
                self.mtp.states(self.model, result, packed, following, cache)
            cache.advance(packed.cu_seqlens)
        return result

    def outputs(
        self,
        packed: PackedSequence,
        hidden: Tensor | None = None,
        *,
        chunk: Chunk | None = None,
        temperature: float | Tensor = 1.0,
        sampling_mask: SamplingMask | None = None,
        routing: RoutingContext | None = None,
        further: bool = False,
        visual: VisualStates | None = None,
        shared: SharedPrefixes | None = None,
        distillation: Distillation | None = None,
        top_n: int | None = None,
        values_only: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of every head after each token, `[T]` each, from one pass through the decoder.

        A language model returns the log-probs of the next tokens and their entropies, a value model the values. Their
        dtype is `output_dtype`.

        Args:
            packed, hidden, chunk, routing, visual: See `Decoder.forward`; in a pipeline for the last chunk.
            temperature: Divide the logits by this number or `[T]`.
            sampling_mask: See `MicroBatch`.
            further: Return also the log-probs of the tokens 2, 3, ... places on, of the multi-token-prediction layers
                at temperature 1; 0 where the sequence has no such token.
            shared: The prompts and responses in `packed`, which may be padded. The first R outputs, and rows of
                `sampling_mask`, then belong to the R scored tokens; the further ones up to T are padding. `temperature`
                is one number.
            distillation, top_n, values_only: See `MicroBatch`; a distillation without `shared`.

        Raises:
            ValueError: An id is outside the vocabulary; on every rank alike.
        """
        states: Tensor = self(packed, hidden, chunk=chunk, routing=routing, visual=visual)
        if shared is None:
            inputs = HeadInputs(states, next_token_labels(packed), temperature, sampling_mask, None, distillation)
        else:
            padding = packed.num_tokens - len(shared.rows)
            rows = F.pad(shared.rows, (0, padding)).to(states.device)
            labels = F.pad(shared.labels, (0, padding), value=-100)
            inputs = HeadInputs(states, labels, temperature, sampling_mask, rows)
        outputs = self._outputs(inputs._replace(top_n=top_n, values_only=values_only))
        return (*outputs, *self._further_log_probs(states, packed)) if further else outputs

    def _further_log_probs(self, states: Tensor, packed: PackedSequence) -> list[Tensor]:
        return []

    def _outputs(self, inputs: HeadInputs) -> tuple[Tensor, ...]:
        """Return the outputs of every head."""
        return ()

    def whole_states(self, states: Tensor) -> Tensor:
        """Return the hidden states `[T, H]` of all tokens on every rank, without a gradient, from this rank's."""
        if self.sequence_parallel:
            states = gather_from_sequence_parallel(states, self.group)
        return self._gather_context(states)

    def _gather_context(self, per_token: Tensor) -> Tensor:
        """Gather the numbers of all tokens; every rank uses all, so the backward takes this rank's gradients."""
        if self.model.context_group is None:
            return per_token
        # A copy: FSDP2 warns of views, whose in-place changes its hooks do not see.
        return gather_sequence(per_token, self.model.context_group, layout=self.model.context_layout).clone()
