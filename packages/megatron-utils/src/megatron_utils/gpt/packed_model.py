"""`PackedModel`: a Megatron-Core language model that takes packed batches, whatever its layers are.

Shape suffixes: T tokens, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TELinear,
    TERowParallelGroupedLinear,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_utils.gpt.modules import CONTEXT_PARALLEL, PackedParams, ValueHead
from megatron_utils.grid import MegatronGrid
from parallel_layers import LogProbs, ModelConfig, PackedSequence, RotaryEmbedding, linear_log_probs, next_token_labels
from parallel_layers.attention import gather_sequence, split_sequence
from parallel_layers.data import refuse_unshifted_labels
from parallel_layers.device import GPU, gpu
from parallel_layers.distributed import gather_from_sequence_parallel, gather_from_tensor_parallel
from parallel_layers.head import SamplingMask
from parallel_layers.inference import SequenceCache
from parallel_layers.linear import RECIPES
from parallel_layers.rotary import require_length

Role = Literal["causal_lm", "value"]
# Recipe of FP8 -> the number that must divide the tokens of a GEMM in Transformer Engine.
FP8_TOKENS = {
    "delayed": 16,
    "tensorwise": RECIPES["current"].multiple,
    "mxfp8": RECIPES["mxfp8"].multiple,
    "blockwise": RECIPES["block"].multiple,
}


class PackedModel(MegatronModule):
    """A pipeline stage of a decoder, or a chunk of a stage, called with a packed batch.

    Stages before the last return hidden states `[T / (cp tp), 1, H]`. The last stage returns `LogProbs` if labels are
    given, else logits `[T, V]` (this rank's columns), or fp32 values for a value model, `[T]` or of L labels
    `[T, L]`. With `next_token=True` it returns the logits after the last token of each sequence only, for decoding.
    Under context parallelism every rank gets the whole batch, computes its part, and returns the whole result.

    A subclass is also one of Megatron-Core's models, with `embedding`, `decoder` and `output_layer`, and calls
    `take_packed_batches` when these are built.
    """

    config: TransformerConfig
    decoder: Any
    embedding: Any
    output_layer: Any

    @staticmethod
    def core_arguments(model: ModelConfig, role: Role, padded_vocab: int) -> dict[str, Any]:
        """Return the arguments that Megatron-Core's models take of the description of a model."""
        return {
            "vocab_size": padded_vocab,
            "max_sequence_length": model.hf.get("max_position_embeddings", 0),  # only learned positions read it
            "position_embedding_type": "none",
            "share_embeddings_and_output_weights": role == "causal_lm" and model.tie_word_embeddings,
        }

    def take_packed_batches(
        self, model: ModelConfig, role: Role, ropes: Sequence[Any], *, value_bias: bool = False, num_labels: int = 1
    ) -> None:
        """Add the head of a value model and the rotations.

        Args:
            model: The description of the model.
            role: "causal_lm" or "value".
            ropes: The rotation of each layer of this chunk, None where the layer does not rotate.
            value_bias: The head of a value model has a bias.
            num_labels: The rows of the head of a value model.
        """
        self.role, self.num_labels = role, num_labels if role == "value" else 0
        _, self.layout = CONTEXT_PARALLEL[self.config.cp_comm_type]
        self.true_vocab_size = model.vocab_size
        # One module for all layers that rotate alike.
        different = [rope for n, rope in enumerate(ropes) if rope is not None and rope not in ropes[:n]]
        self.rotaries = nn.ModuleList(map(RotaryEmbedding.from_config, different))
        self.rotary_of = [None if rope is None else different.index(rope) for rope in ropes]
        self.embedding_scale = torch.tensor(model.embedding_scale, dtype=self.config.params_dtype).item()
        self.logits: dict[str, Any] = {"logit_scale": model.logit_scale, "logit_softcap": model.logit_softcap}
        if role == "value" and self.post_process:
            self.output_layer = ValueHead(self.config, num_labels, bias=value_bias)

    @property
    def tokens_multiple_of(self) -> int:
        """Return the number that must divide the number of tokens of a packed batch."""
        tp = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        cp = self.config.context_parallel_size
        multiple = FP8_TOKENS[self.config.fp8_recipe] if self.config.fp8 else 1
        return multiple * tp * (2 * cp if cp > 1 and self.layout == "zigzag" else cp)

    def forward(
        self,
        packed: PackedSequence,
        labels: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        sampling_mask: SamplingMask | None = None,
        entropy: bool = True,
        next_token: bool = False,
        cache: SequenceCache | None = None,
    ) -> Tensor | LogProbs:
        """Run this stage on a packed batch; stages after the first take the hidden states of `set_input_tensor`.

        Args:
            packed: The batch; `tokens_multiple_of` must divide its number of tokens.
            labels: `[T]`, already shifted, -100 for none; the last stage then returns log-probs.
            temperature: Divides the logits; a number or `[T]`.
            sampling_mask: The tokens that each label was drawn from; see `parallel_layers.linear_log_probs`.
            entropy: Whether to return the entropy with the log-probs.
            next_token: Return logits `[N, V]` fp32 of the whole vocabulary after the last token of each of the N
                sequences, the same on every tensor-parallel rank. The row of an empty sequence is arbitrary.
            cache: A cache of `new_cache`, with `next_token` only. The tokens continue the sequences in the cache and
                are added to it. Every context-parallel rank then works on all tokens.

        Raises:
            ValueError: The number of tokens does not divide, a cache comes without `next_token`, the labels are the
                input ids, or a sequence is longer than the original length of LongRoPE.
        """
        if cache is not None and not next_token:
            raise ValueError("a cache is for decoding; call the model with next_token=True")
        if packed.num_tokens % self.tokens_multiple_of:
            raise ValueError(
                f"{packed.num_tokens} tokens are not a multiple of {self.tokens_multiple_of} (tp under sequence "
                f"parallelism, cp); pack with multiple_of={self.tokens_multiple_of}"
            )
        if labels is not None:
            refuse_unshifted_labels(labels, packed.input_ids, next_token_labels(packed))
        cp = self.pg_collection.cp if cache is None else None
        params = PackedParams(
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
            rotary=self._rotary(packed, cp),
            cache=cache,
            first_layer=self.decoder.layers[0].layer_number,
            **self.further_params(packed),
        )
        ids = split_sequence(packed.input_ids, cp, layout=self.layout)
        hidden = self.embedding(ids[None], None) if self.pre_process else None
        if hidden is not None and self.embedding_scale != 1:
            hidden = hidden * self.embedding_scale
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=params)
        if cache is not None:
            cache.advance(packed.cu_seqlens)
        if not self.post_process:
            return hidden
        if self.role == "value":
            values = self.output_layer(hidden)[0][:, 0]
            return self._gather(values[:, 0] if values.shape[1] == 1 else values)
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if next_token:
            return self._next_token(hidden[:, 0], self.output_layer.weight if tied is None else tied, packed, cp)
        if labels is None:
            return self._gather(self._capped(self.output_layer(hidden, weight=tied)[0][:, 0]))
        if sampling_mask is not None:
            sampling_mask = sampling_mask[self._split(torch.arange(len(labels)))]
        group = self.pg_collection.tp
        output = linear_log_probs(
            hidden[:, 0],
            self.output_layer.weight if tied is None else tied,
            self._split(labels),
            group=group if group.size() > 1 else None,
            temperature=self._split(temperature) if isinstance(temperature, Tensor) else temperature,
            entropy=entropy,
            sequence_parallel=self.config.sequence_parallel,
            vocab_size=self.true_vocab_size,
            sampling_mask=sampling_mask,
            **self.logits,
        )
        return LogProbs(
            self._gather(output.log_probs), None if output.entropy is None else self._gather(output.entropy)
        )

    def further_params(self, packed: PackedSequence) -> dict[str, Any]:
        """Return further fields of Megatron's description of a packed batch that layers of this model read."""
        return {}

    @torch.no_grad()
    def _next_token(self, hidden: Tensor, weight: Tensor, packed: PackedSequence, cp: ProcessGroup | None) -> Tensor:
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel(hidden, group)
        hidden = gather_sequence(hidden, cp, layout=self.layout)
        last_tokens = packed.cu_seqlens[1 : packed.num_sequences + 1].long() - 1
        logits = hidden[last_tokens.clamp(min=0)].float() @ weight.float().T
        return self._capped(gather_from_tensor_parallel(logits, group)[:, : self.true_vocab_size])

    def _rotary(self, packed: PackedSequence, cp: ProcessGroup | None) -> list[tuple[Tensor, ...] | None]:
        """Return the rotation of this rank's tokens for each layer."""
        tables = []
        for rotary in self.rotaries:
            assert isinstance(rotary, RotaryEmbedding)
            if packed.padding < packed.max_seqlen:  # the padding of short batches is no sequence
                require_length(packed.max_seqlen, rotary.longest)
            full_tables = rotary.tables(packed.position_ids)
            tables.append(tuple(split_sequence(table, cp, layout=self.layout) for table in full_tables))
        return [None if number is None else tables[number] for number in self.rotary_of]

    def _capped(self, logits: Tensor) -> Tensor:
        """Apply the factor and the soft-cap of the logits."""
        scale, softcap = self.logits["logit_scale"], self.logits["logit_softcap"]
        logits = logits if scale == 1 else logits * scale
        return logits if softcap is None else softcap * (logits / softcap).tanh()

    def _split(self, x: Tensor) -> Tensor:
        """Return this context-parallel rank's tokens of `[T]`."""
        return split_sequence(x, self.pg_collection.cp, layout=self.layout)

    def _gather(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks `[T, ...]`; every rank continues with the same computation."""
        return gather_sequence(x, self.pg_collection.cp, layout=self.layout)


Chunk = TypeVar("Chunk", bound=PackedModel)


def build_chunks(grid: MegatronGrid, make: Callable[[int | None, bool, bool], Chunk]) -> list[Chunk]:
    """Build this rank's chunks of a model, on its device: one, or one for each virtual stage.

    `make` takes the number of the virtual stage, None if there are none, and whether the chunk has the embedding and
    the head.
    """
    stages = range(grid.virtual_stages) if grid.virtual_stages else [None]
    chunks = []
    for stage in stages:
        pre_process = grid.is_first_stage and stage in (None, 0)
        post_process = grid.is_last_stage and stage in (None, (grid.virtual_stages or 1) - 1)
        chunk = make(stage, pre_process, post_process)
        _mark_shards(chunk)
        chunks.append(chunk.to(GPU) if gpu.is_available() else chunk)
    return chunks


def padded_vocabulary(size: int, grid: MegatronGrid) -> int:
    """Return the number of rows of the embedding: equal parts for the tensor-parallel ranks."""
    return -(-size // grid.dims.tp) * grid.dims.tp


def _mark_shards(chunk: PackedModel) -> None:
    """Mark the parameters that are shards; gradient norms count other parameters on the first rank only.

    Megatron marks weights when it initialises them, which is skipped here. Transformer Engine 2.20 does not mark its
    grouped experts, and marks linears that every rank holds whole (the down-projection of a latent).
    """
    for module in chunk.modules():
        for kinds, names, dim in _SHARDED:
            for name, parameter in module.named_parameters(recurse=False) if isinstance(module, kinds) else ():
                if re.fullmatch(names, name) and not hasattr(parameter, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        if type(module) is TELinear:  # parallel linears are subclasses
            for parameter in module.parameters():
                parameter.tensor_model_parallel = False


# Grouped experts number their weights. Without Transformer Engine these classes are None.
_SHARDED = (
    ((ColumnParallelLinear, VocabParallelEmbedding, TEColumnParallelGroupedLinear or ()), r"(weight|bias)\d*", 0),
    ((RowParallelLinear, TERowParallelGroupedLinear or ()), r"weight\d*", 1),
)
