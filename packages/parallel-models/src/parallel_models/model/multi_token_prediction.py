"""Multi-token-prediction layers: layer k predicts the token k + 1 places on.

DeepSeek-V3 (arXiv:2412.19437, section 2.2). Layers share the embedding and the head of the model. As in Megatron-Core
and in inference engines, a layer reads the hidden states behind the final norm of the model or of the layer before it.

Shape legend: T tokens of a packed batch with its padding, T' this rank's tokens, H hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from parallel_layers import DecoderConfig, DecoderLayer, ModelConfig, PackedSequence, Placement, VocabParallelEmbedding
from parallel_layers.inference import SequenceCache
from parallel_layers.linear import ReplicatedLinear
from parallel_layers.memory import checkpoint, recomputed_part
from parallel_models.model.decoder import Decoder, ModelOptions, layer_options


class PredictionLayer(DecoderLayer):
    """A layer:  norm(decoder_layer(eh_proj [enorm(e); hnorm(h)])),  with the names of DeepSeek's files.

    Under sequence parallelism the backward adds an all-reduce of the gradient of each replicated parameter.
    """

    def __init__(self, config: DecoderConfig, *, placement: Placement, **options: Any) -> None:
        super().__init__(config, placement=placement, **options)
        how = {"dtype": options["dtype"], "device": options["device"]}
        self.enorm, self.hnorm = (config.build_norm(placement, **how) for _ in range(2))
        self.eh_proj = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, placement=placement, **how)
        self.shared_head = nn.ModuleDict({"norm": config.build_norm(placement, **how)})

    def forward(self, hidden: Tensor, *arguments: Any, embedded: Tensor) -> Tensor:  # type: ignore[override]
        """Return `[T', H]` from hidden states and from embeddings of the tokens k places on, `[T', H]` each.

        `arguments` are the further arguments of `DecoderLayer.forward`.
        """
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        states: Tensor = self.shared_head["norm"](super().forward(joined, *arguments))
        return states


class Predictions(nn.Module):
    """The multi-token-prediction layers of a model, numbered behind the decoder's layers, and their shared embedding.

    Each layer is like the last layer of the decoder; its router has no auxiliary loss and takes no replay. The last of
    several pipeline stages has a copy of the embedding. Layers that are not trained are frozen.
    """

    def __init__(self, config: ModelConfig, decoder: Decoder, **options: Unpack[ModelOptions]) -> None:
        super().__init__()
        last_layer = config.num_layers - 1
        numbers = range(config.num_layers, config.num_layers + options["prediction_layers"])
        layer_config, layer_kwargs = config.with_router_losses().layer(last_layer), layer_options(options)
        self.layers = nn.ModuleDict(
            {str(i): PredictionLayer(layer_config, layer_number=i, **layer_kwargs) for i in numbers}
        )
        for layer in self.layers.values():
            module = recomputed_part(layer, last_layer, options.get("recompute"))
            if module is not None:
                module.forward = partial(checkpoint, module.forward)
        self.trained = options.get("mtp_loss", False)
        if self.trained and not hasattr(decoder, "embed_tokens"):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.decoder.hidden_size,
                group=options.get("group"),
                sequence_parallel=options.get("sequence_parallel", False),
                counted=False,
                dtype=options.get("dtype"),
                device=options.get("device"),
            )
        self.requires_grad_(self.trained)

    def states(
        self,
        decoder: Decoder,
        hidden: Tensor,
        packed: PackedSequence,
        labels: Tensor,
        cache: SequenceCache | None = None,
    ) -> list[Tensor]:
        """Return the normed hidden states `[T', H]` of every layer.

        Args:
            decoder: The decoder of the model.
            hidden: `[T', H]`, behind the final norm.
            packed: The batch.
            labels: The next token of each token `[T]`, negative where there is none.
            cache: The cache of the model, with entries of these layers.
        """
        states = []
        for number in range(len(self.layers)):
            # Where no token follows, token 0 stands in: attention is causal, so no later prediction sees it.
            hidden = self.layer_states(number, decoder, hidden, packed, labels.clamp(min=0), cache)
            states.append(hidden)
            labels = following(labels)
        return states

    def layer_states(
        self,
        number: int,
        decoder: Decoder,
        hidden: Tensor,
        packed: PackedSequence,
        tokens: Tensor,
        cache: SequenceCache | None,
    ) -> Tensor:
        """Return the normed hidden states `[T', H]` of a layer, from the states before it and its tokens `[T]`."""
        embedding = decoder.embed_tokens if hasattr(decoder, "embed_tokens") else self.embed_tokens
        embedded = embedding(tokens if cache is not None else decoder.split(tokens))
        rotary_of = decoder.rotary_of[-1]
        rotary = None if rotary_of is None else decoder.tables(packed, whole=cache is not None)[rotary_of]
        entry = None if cache is None else cache.layer(len(decoder.with_cache) + number)
        bounds = packed.cu_seqlens, packed.max_seqlen
        states: Tensor = list(self.layers.values())[number](hidden, rotary, *bounds, entry, embedded=embedded)
        return states


def following(labels: Tensor) -> Tensor:
    """Return the token after each label `[T]`, and the label itself where it is negative: the sequence has ended."""
    return torch.where(labels < 0, labels, labels.roll(-1))
