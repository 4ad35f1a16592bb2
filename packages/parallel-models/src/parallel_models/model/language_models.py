"""`CausalLM`, `ValueModel` and `CausalLMWithValue`: the native models, for every family, from one config.

Shape legend: T tokens of a packed batch with its padding, T' this rank's tokens under sequence and context parallelism,
H hidden size, V vocabulary, N sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckpt.layout import classifies_sequences
from parallel_layers import (
    DecoderLayer,
    LogProbs,
    ModelConfig,
    PackedSequence,
    VocabParallelHead,
    invariant,
    linear_log_probs,
    next_token_labels,
)
from parallel_layers.attention import gather_sequence, repeated_rows
from parallel_layers.data import SharedPrefixes
from parallel_layers.distributed import (
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
)
from parallel_layers.head import Distillation, SamplingMask, linear_distillation
from parallel_layers.inference import PagedKVCache, SequenceCache
from parallel_layers.linear import PLAIN, SCALES, InvariantProduct
from parallel_layers.moe import RoutingContext
from parallel_layers.rotary import require_length
from parallel_models.model.decoder import Chunk, Decoder, ModelOptions, VisualStates
from parallel_models.model.multi_token_prediction import Predictions, following


class HeadInputs(NamedTuple):
    """Hidden states `[T', H]`, labels `[T]`, and the options of a score; `rows` `[R]` limits it to these rows."""

    states: Tensor
    labels: Tensor
    temperature: float | Tensor = 1.0
    sampling_mask: SamplingMask | None = None
    rows: Tensor | None = None
    distillation: Distillation | None = None


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
            distillation: See `MicroBatch`; without `shared`.

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
        outputs = self._outputs(inputs)
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


class CausalLM(PackedModel):
    """A language model, which computes log-probs of the next tokens of packed sequences.

    A tied head uses the embedding's tensor. Only the last of several pipeline stages holds a copy for the head; that
    stage also has the multi-token-prediction layers.
    """

    def __init__(self, config: ModelConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        tied = config.tie_word_embeddings
        if self.chunks[-1].last and not (tied and hasattr(self.model, "embed_tokens")):
            self.lm_head = VocabParallelHead(
                config.decoder.hidden_size,
                config.vocab_size,
                group=self.group,
                counted=not tied,
                dtype=options.get("dtype"),
                device=options.get("device"),
            )
        if self.chunks[-1].last and options.get("prediction_layers"):
            options["sequence_parallel"] = self.sequence_parallel
            self.mtp = Predictions(config, self.model, **options)

    @property
    def head_weight(self) -> Tensor:
        """`[ceil(V/tp), H]`: the weight of the head with its adapter, or of the embedding if they are tied."""
        if hasattr(self, "lm_head"):
            return self.lm_head.effective_weight()
        weight = self.model.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return weight

    def log_probs(
        self,
        packed: PackedSequence,
        *,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
        routing: RoutingContext | None = None,
    ) -> LogProbs:
        """Compute the log-prob of each token's label, and the entropy of its prediction, both `[T]` fp32.

        Args:
            packed, temperature, routing: See `outputs`.
            labels: `[T]` (default: the next token of each sequence, and at its end -100, which gives 0).
            entropy: Compute the entropy.

        Raises:
            ValueError: A label or an id is outside the vocabulary; on every rank alike.
        """
        labels = next_token_labels(packed) if labels is None else labels
        return self._log_probs(HeadInputs(self(packed, routing=routing), labels, temperature), entropy)

    def _log_probs(self, inputs: HeadInputs, entropy: bool = True) -> LogProbs:
        states, labels, temperature, sampling_mask, rows, _ = inputs
        sequence_parallel = self.sequence_parallel
        if rows is not None:
            if sequence_parallel:
                # The head completes the gradient of its rows, on every rank.
                states = gather_from_sequence_parallel(states, self.group, reduce_gradient=False)
            states, sequence_parallel = repeated_rows(states, rows), False
        if isinstance(temperature, Tensor) and temperature.dim():
            temperature = self.model.split(temperature)
        if sampling_mask is not None and self.model.context_group is not None:
            sampling_mask = sampling_mask[self.model.split(torch.arange(len(labels)))]
        labels = self.model.split(labels)
        head = self.scoring(labels, temperature, sampling_mask, entropy=entropy, sequence_parallel=sequence_parallel)
        scores = self.lm_head.run(head, states) if hasattr(self, "lm_head") else head(states, self.head_weight)
        if self.model.context_group is None or scores.entropy is None:
            return LogProbs(self._gather_context(scores.log_probs), scores.entropy)
        gathered = self._gather_context(torch.stack((scores.log_probs, scores.entropy), dim=1))
        return LogProbs(gathered[:, 0].contiguous(), gathered[:, 1].contiguous())

    def scoring(
        self, labels_T: Tensor, temperature: float | Tensor, sampling_mask: SamplingMask | None, **options: bool
    ) -> Callable[[Tensor, Tensor], LogProbs]:
        """Return the function of hidden states and the head's weight that computes the log-probs of labels."""
        ordinary = partial(linear_log_probs, keep_probabilities=self.keep_probabilities)
        return partial(
            invariant.linear_log_probs if self.tp_invariant else ordinary,
            labels_T=labels_T, group=self.group, temperature=temperature, vocab_size=self.config.vocab_size,
            logit_scale=self.config.logit_scale, logit_softcap=self.config.logit_softcap,
            sampling_mask=sampling_mask, **options,
        )  # fmt: skip

    def _outputs(self, inputs: HeadInputs) -> tuple[Tensor, ...]:
        result = self._log_probs(inputs)
        assert result.entropy is not None
        outputs = (result.log_probs, result.entropy, *super()._outputs(inputs))
        return outputs if inputs.distillation is None else (*outputs, self._divergence(inputs, inputs.distillation))

    def _divergence(self, inputs: HeadInputs, distillation: Distillation) -> Tensor:
        head = partial(
            linear_distillation, teacher=distillation.teacher.part(self.model.split), group=self.group,
            divergence=distillation.divergence, mixture=distillation.mixture, temperature=inputs.temperature,
            sequence_parallel=self.sequence_parallel, vocab_size=self.config.vocab_size,
            logit_scale=self.config.logit_scale, logit_softcap=self.config.logit_softcap,
        )  # fmt: skip
        has_head = hasattr(self, "lm_head")
        divergence = self.lm_head.run(head, inputs.states) if has_head else head(inputs.states, self.head_weight)
        return self._gather_context(divergence)

    def _further_log_probs(self, states: Tensor, packed: PackedSequence) -> list[Tensor]:
        assert self.mtp is not None
        labels, log_probs = next_token_labels(packed), []
        for predicted in self.mtp.states(self.model, states, packed, labels):
            labels = following(labels)
            log_probs.append(self._log_probs(HeadInputs(predicted, labels), entropy=False).log_probs)
        return log_probs

    def new_cache(
        self,
        num_sequences: int,
        max_length: int,
        num_blocks: int | None = None,
        *,
        float8: bool = False,
        drafts: bool = False,
    ) -> PagedKVCache:
        """Return an empty cache for `next_logits`, of this rank's layers and heads; see `PagedKVCache`.

        With `drafts` the multi-token-prediction layers have the last entries.

        Raises:
            ValueError: `max_length` is too long.
        """
        require_length(max_length, self.model.longest)
        layers: list[nn.Module] = list(self.model.layers.values())
        layers = [layers[number] for number in self.model.with_cache]
        layers += self.mtp.layers.values() if drafts and self.mtp is not None else ()
        return PagedKVCache(
            [layer.cache_shape for layer in layers if isinstance(layer, DecoderLayer)],
            num_sequences,
            max_length,
            num_blocks=num_blocks,
            dtype=self.dtype,
            device=next(self.parameters()).device,
            float8=float8,
        )

    @torch.no_grad()
    def next_logits(self, packed: PackedSequence, *, cache: SequenceCache) -> Tensor:
        """Compute the logits `[N, V]` fp32 after the last token of each of the N sequences, the same on every rank.

        `cache` holds the tokens before these. A sequence without tokens gets an arbitrary row.
        """
        last_tokens = packed.cu_seqlens[1 : packed.num_sequences + 1].long() - 1
        logits = self.logits(self.every_state(self(packed, cache=cache))[last_tokens.clamp(min=0)])
        return gather_from_tensor_parallel(logits, self.group)[:, : self.config.vocab_size]

    def every_state(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens `[T, H]`, which sequence parallelism divides, on every rank."""
        return gather_from_sequence_parallel(hidden, self.group) if self.sequence_parallel else hidden

    def logits(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Return this rank's part of the logits `[R, ceil(V/tp)]` fp32 of hidden states `[R, H]`, -inf for padding.

        With `exact` the operands of the head's GEMM are fp32 copies.
        """
        weight = self.head_weight
        if self.tp_invariant:
            logits = InvariantProduct()(hidden, weight, None, torch.float32)
        else:
            logits = hidden.float() @ weight.float().T if exact else PLAIN(hidden, weight, None, torch.float32)
        softcap = self.config.logit_softcap
        logits = logits if self.config.logit_scale == 1 else logits * self.config.logit_scale
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        rank = 0 if self.group is None else self.group.rank()
        logits[:, max(0, self.config.vocab_size - rank * len(weight)) :] = -torch.inf
        return logits


class ValueModel(PackedModel):
    """A value model: the linear head `score` gives `num_labels` numbers per token, one output each.

    Hugging Face calls it a model for token classification. A reward model, whose config describes a model for sequence
    classification, has a head without bias. The head is replicated over the tensor-parallel group; under sequence
    parallelism each rank computes its own tokens.
    """

    def __init__(self, config: ModelConfig, *, num_labels: int = 1, **options: Unpack[ModelOptions]) -> None:
        super().__init__(config, **options)
        if self.chunks[-1].last:
            self.score = VocabParallelHead(
                config.decoder.hidden_size,
                num_labels,
                group=self.group,
                sequence_parallel=self.sequence_parallel,
                bias=not classifies_sequences(config.hf),
                replicated=True,
                dtype=options.get("dtype"),
                device=options.get("device"),
            )

    def _outputs(self, inputs: HeadInputs) -> tuple[Tensor, ...]:
        values, rows = self.score.values(inputs.states, tp_invariant=self.tp_invariant), inputs.rows
        values = self._gather_context(values) if rows is None else repeated_rows(values, rows)
        # Clones: FSDP2 warns of views.
        return *(column.clone() for column in values.unbind(1)), *super()._outputs(inputs)


class CausalLMWithValue(CausalLM, ValueModel):
    """A language model and a value model on one decoder; both heads read its final hidden states.

    `outputs` returns log-probs, entropies and values, in this order.
    """
