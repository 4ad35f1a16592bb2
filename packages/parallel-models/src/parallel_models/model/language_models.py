"""`CausalLM`, `ValueModel` and `CausalLMWithValue`: the native models, for every family, from one config.

Shape legend: T tokens of a packed batch with its padding, T' this rank's tokens under sequence and context parallelism,
H hidden size, V vocabulary, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar, Unpack

import torch
from torch import Tensor, nn

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
from parallel_layers.attention import repeated_rows
from parallel_layers.distributed import gather_from_sequence_parallel, gather_from_tensor_parallel
from parallel_layers.head import Distillation, SamplingMask, linear_distillation, linear_token_statistics
from parallel_layers.inference import PagedKVCache, SequenceCache
from parallel_layers.linear import PLAIN, InvariantProduct
from parallel_layers.moe import RoutingContext
from parallel_layers.rotary import require_length
from parallel_models.model.decoder import ModelOptions
from parallel_models.model.multi_token_prediction import Predictions, following
from parallel_models.model.packed_model import HeadInputs, PackedModel

R = TypeVar("R")


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
        scores = self._run_head(partial(self._log_probs_head, entropy=entropy), inputs)
        if self.model.context_group is None or scores.entropy is None:
            return LogProbs(self._gather_context(scores.log_probs), scores.entropy)
        gathered = self._gather_context(torch.stack((scores.log_probs, scores.entropy), dim=1))
        return LogProbs(gathered[:, 0].contiguous(), gathered[:, 1].contiguous())

    def _run_head(self, head: Callable[..., R], inputs: HeadInputs) -> R:
        """Return the result for this rank's tokens of `linear_log_probs`, or of a function with its arguments."""
        states, labels, temperature, sampling_mask, rows, *_ = inputs
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
        function = self._bound(head, labels, temperature, sampling_mask, sequence_parallel=sequence_parallel)
        return self._with_head(function, states)

    def _with_head(self, function: Callable[[Tensor, Tensor], R], states: Tensor) -> R:
        return self.lm_head.run(function, states) if hasattr(self, "lm_head") else function(states, self.head_weight)

    def scoring(
        self, labels_T: Tensor, temperature: float | Tensor, sampling_mask: SamplingMask | None, **options: bool
    ) -> Callable[[Tensor, Tensor], LogProbs]:
        """Return the function of hidden states and the head's weight that computes the log-probs of labels."""
        return self._bound(self._log_probs_head, labels_T, temperature, sampling_mask, **options)

    @property
    def _log_probs_head(self) -> Callable[..., LogProbs]:
        ordinary = partial(linear_log_probs, keep_probabilities=self.keep_probabilities)
        return invariant.linear_log_probs if self.tp_invariant else ordinary

    def _bound(
        self,
        head: Callable[..., R],
        labels_T: Tensor,
        temperature: float | Tensor,
        sampling_mask: SamplingMask | None,
        **options: bool,
    ) -> Callable[[Tensor, Tensor], R]:
        """Return `linear_log_probs`, or a function with its arguments, as one of hidden states and a weight."""
        return partial(
            head, labels_T=labels_T, group=self.group, temperature=temperature, vocab_size=self.config.vocab_size,
            logit_scale=self.config.logit_scale, logit_softcap=self.config.logit_softcap,
            sampling_mask=sampling_mask, **options,
        )  # fmt: skip

    def _outputs(self, inputs: HeadInputs) -> tuple[Tensor, ...]:
        if inputs.values_only:
            return super()._outputs(inputs)
        if inputs.top_n is not None:
            statistics = self._run_head(partial(linear_token_statistics, top_n=inputs.top_n), inputs)
            return (self._gather_context(statistics.columns()),)
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
        return self._gather_context(self._with_head(head, inputs.states))

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
