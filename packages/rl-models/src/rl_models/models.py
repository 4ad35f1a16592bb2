"""`CausalLM` and `ValueModel`: decoder-only models over tensor-parallel layers, for every family, from one config.

Shape legend: T tokens of a packed batch (with its padding), H hidden, V vocabulary; "T or T/tp": this rank's part under
sequence parallelism.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import (
    DecoderLayer,
    LogProbs,
    PackedSequence,
    RMSNorm,
    VocabParallelEmbedding,
    linear_log_probs,
    next_token_labels,
)
from parallel_layers.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
)
from parallel_layers.embedding import vocab_range
from parallel_layers.inference import KVCache
from parallel_layers.sharding import Block, Sharding, set_sharding
from rl_models.config import ModelConfig


class Decoder(nn.Module):
    """Embedding, layers and final norm: ids [T] -> hidden [T or T/tp, H].

    Each rank holds its shards of every layer. Communication: the embedding's reduction, then per layer one gather and
    one scatter forward and their conjugates backward for attention and for the MLP (all-reduces without sequence
    parallelism).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: ProcessGroup | None,
        sequence_parallel: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        hidden = config.decoder.hidden_size
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, hidden, group=group, sequence_parallel=sequence_parallel, dtype=dtype, device=device
        )
        # Keyed by the layer's number in the whole model, which is its name in checkpoints.
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(
                    config.layer(i), group=group, sequence_parallel=sequence_parallel, dtype=dtype, device=device
                )
                for i in range(config.num_layers)
            }
        )
        self.norm = RMSNorm(
            hidden,
            eps=config.decoder.norm_eps,
            group=group,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.rotary = config.rotary(device)

    def forward(self, packed: PackedSequence, cache: KVCache | None = None) -> Tensor:
        """Hidden states of every token; with a cache, of the tokens that follow what it holds."""
        rotary = self.rotary(packed.position_ids, packed.cu_seqlens)
        hidden: Tensor = self.embed_tokens(packed.input_ids)
        for number, layer in enumerate(self.layers.values()):
            layer_cache = None if cache is None else cache.layer(number)
            hidden = layer(hidden, rotary, packed.cu_seqlens, packed.max_seqlen, layer_cache)
        if cache is not None:
            cache.advance(packed.cu_seqlens)
        return self.norm(hidden)


class VocabParallelHead(nn.Module):
    """The rows of the output embedding that this rank holds: `weight [ceil(V/tp), H]`, zero beyond V."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: ProcessGroup | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        rows = -(-vocab_size // (1 if group is None else group.size()))
        self.weight = nn.Parameter(torch.zeros(rows, hidden_size, dtype=dtype, device=device))
        if group is not None:
            # For the gradient norm: these rows are on this rank alone.
            set_sharding(self, "weight", Sharding(group, 0, vocab_size, (Block(*vocab_range(vocab_size, group)),)))


class _PackedModel(nn.Module):
    """What the two models share.

    `entry_points` are the methods that are called from outside in the place of `forward` (FSDP2 has to know).
    """

    entry_points: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.sequence_parallel = sequence_parallel and group is not None
        self.model = Decoder(config, group=group, sequence_parallel=self.sequence_parallel, dtype=dtype, device=device)
        self._add_head(dtype, device)

    def _add_head(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        raise NotImplementedError

    @property
    def tokens_multiple_of(self) -> int:
        """Packed batches must have a multiple of so many tokens."""
        return self.group.size() if self.sequence_parallel and self.group is not None else 1

    def forward(self, packed: PackedSequence, cache: KVCache | None = None) -> Tensor:
        """Final hidden states, see `hidden_states`."""
        return self.hidden_states(packed, cache)

    def hidden_states(self, packed: PackedSequence, cache: KVCache | None = None) -> Tensor:
        """Final hidden states `[T or T/tp, H]`, in the tokens' order.

        Raises:
            ValueError: under sequence parallelism, the number of tokens is no multiple of tp.
        """
        if packed.num_tokens % self.tokens_multiple_of:
            raise ValueError(
                f"{packed.num_tokens} tokens are not divisible by tp={self.tokens_multiple_of}, which sequence "
                f"parallelism needs; pack with multiple_of={self.tokens_multiple_of}"
            )
        return self.model(packed, cache)


class CausalLM(_PackedModel):
    """A language model: log-probabilities of the next tokens of packed sequences.

    Args:
        config: `ModelConfig.from_hf(...)`.
        group: tensor-parallel group; None: not sharded.
        sequence_parallel: keep `[T/tp, H]` between the blocks.
        dtype, device: of the parameters.

    The names in `state_dict()` are those of `ckpt.layout_for(config, target="parallel")`. A tied head has no tensor of
    its own. The parameters are not initialised beyond what the layers do: `Actor.from_pretrained` loads them.
    """

    entry_points = ("log_probs", "next_logits")

    def _add_head(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        if not self.config.tie_word_embeddings:
            self.lm_head = VocabParallelHead(
                self.config.vocab_size, self.config.decoder.hidden_size, group=self.group, dtype=dtype, device=device
            )

    @property
    def head_weight(self) -> Tensor:
        """`[ceil(V/tp), H]`: the head's, or the embedding's when they are tied."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        weight = head.weight
        assert isinstance(weight, Tensor)
        return weight

    def log_probs(
        self,
        packed: PackedSequence,
        *,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
    ) -> LogProbs:
        """Log-probability of each token's label, and the entropy of its prediction, both `[T]` fp32.

        Args:
            packed: the batch, the same on every rank of the group.
            labels: `[T]`; default the next token of each sequence (-100 at its last, which gives 0).
            temperature: the logits are divided by it; a number or `[T]`.
            entropy: compute it, too.

        Raises:
            ValueError: a label or an id is outside the vocabulary (on every rank alike).
        """
        labels = next_token_labels(packed) if labels is None else labels
        return linear_log_probs(
            self.hidden_states(packed),
            self.head_weight,
            labels,
            group=self.group,
            temperature=temperature,
            entropy=entropy,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.config.vocab_size,
        )

    def new_cache(self, num_sequences: int, max_length: int) -> KVCache:
        """An empty cache for `next_logits`, with this rank's key-value heads."""
        decoder = self.config.decoder
        assert decoder.head_dim is not None  # filled in by the config
        tp = 1 if self.group is None else self.group.size()
        weight = self.head_weight
        return KVCache(
            self.config.num_layers,
            num_sequences,
            max_length,
            # With more ranks than key-value heads, each holds one.
            max(1, decoder.num_kv_heads // tp),
            decoder.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def next_logits(self, packed: PackedSequence, cache: KVCache | None = None) -> Tensor:
        """Logits `[N, V]` fp32 after the last token of each of the N sequences, the same on every rank.

        A sequence without tokens gets an arbitrary row. Nothing of the size `[T, V]` is made. Communication: under
        sequence parallelism one all-gather of the hidden states; one all-gather of the logits.
        """
        hidden = self.hidden_states(packed, cache)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel(hidden, self.group)
        last = packed.cu_seqlens[1 : packed.num_sequences + 1].long() - 1
        local = hidden[last.clamp(min=0)].float() @ self.head_weight.float().T
        logits: Tensor = gather_from_tensor_parallel(local, self.group)
        return logits[:, : self.config.vocab_size]


class ValueModel(_PackedModel):
    """A value model: one number per token from its hidden state, `score` being a linear map with a bias.

    In Hugging Face's terms a model for token classification with one label. The head is replicated over the
    tensor-parallel group and computed in fp32; under sequence parallelism each rank computes the values of its own
    tokens, and the head's gradients are summed over the group, so that its copies stay equal.
    """

    entry_points = ("values",)

    def _add_head(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self.score = nn.Linear(self.config.decoder.hidden_size, 1, dtype=dtype, device=device)

    def values(self, packed: PackedSequence) -> Tensor:
        """Value `[T]` fp32 of the state after each token, the same on every rank."""
        hidden = self.hidden_states(packed).float()
        weight: Tensor = self.score.weight
        bias: Tensor = self.score.bias
        if self.sequence_parallel:
            weight, bias = copy_to_tensor_parallel(weight, self.group), copy_to_tensor_parallel(bias, self.group)
        values = hidden @ weight[0].float() + bias.float()
        if self.sequence_parallel:
            # Every rank computes the same loss from all values: backward each takes its own tokens' gradients.
            values = gather_from_sequence_parallel(values, self.group, reduce_gradient=False)
        return values
