"""`ModelConfig`: the description from which a decoder is built, read from a Hugging Face config alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from parallel_layers.attention.config import LatentConfig
from parallel_layers.model.decoder import DecoderConfig
from parallel_layers.model.families import family_of
from parallel_layers.model.family import Family, values
from parallel_layers.model.fields import Config, count, flag
from parallel_layers.moe.config import MoEConfig
from parallel_layers.rotary.embedding import RotaryEmbedding
from parallel_layers.rotary.rope_types import stated_parameters

# Fields of a config and its rope parameters that change the computation of a decoder: `_OFF` unless absent, null, zero,
# false or empty, and `_ONE` unless absent, null or 1. Such a field that the family's row does not read is refused.
_OFF = (
    *("is_encoder_decoder", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"),
    *("attention_bias", "qkv_bias", "attention_out_bias", "use_bias", "mlp_bias", "clip_qkv", "attn_output_gate"),
    *("use_qk_norm", "qk_layernorm", "use_bidirectional_attention"),
    *("attention_multiplier", "attention_chunk_size", "no_rope_layers", "num_kv_shared_layers", "llama_4_scaling_beta"),
    *("hidden_size_per_layer_input", "use_double_wide_mlp", "enable_moe_block", "attention_k_eq_v"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "scale_depth", "dim_model_base"),
)
_ONE = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb", "moe_layer_freq")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model.

    Attributes:
        family: The name of the row of `parallel_layers.model.FAMILIES`.
        vocab_size: Rows of the embedding and of the head, without the padding that tensor parallelism adds.
        decoder: A layer with full attention and an MLP.
        own_fields: The fields of `DecoderConfig` in which a layer differs from `decoder`, for every layer (Gemma 4).
        windows: The sliding window of every layer in tokens, None for full attention; one entry for each layer.
        moe: The mixture of experts of every layer, None for an MLP.
        tie_word_embeddings: The head is the embedding.
        ropes: The fields that `RotaryEmbedding.from_config` reads, for every layer; None: no rotation.
        hf: The Hugging Face config as it was read; a save writes it back.
        embedding_scale: Factor of the embeddings, rounded to their dtype (Gemma, Granite).
        logit_scale: Factor of the logits (Cohere, Granite).
        logit_softcap: Soft-cap of the scaled logits (Gemma 2); None: no cap.
        per_layer_vocab_size: Rows of the table of per-layer embeddings (Gemma 4 E2B, E4B); 0: there is none.
    """

    family: str
    vocab_size: int
    decoder: DecoderConfig
    own_fields: tuple[Mapping[str, Any], ...] = field(hash=False)
    windows: tuple[int | None, ...]
    moe: tuple[MoEConfig | None, ...]
    tie_word_embeddings: bool
    ropes: tuple[Mapping[str, Any] | None, ...] = field(hash=False)
    hf: Mapping[str, Any] = field(repr=False, hash=False)
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer_vocab_size: int = 0

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        """Read a Hugging Face config.

        Args:
            config: A mapping, an object with `to_dict()`, or the path of a checkpoint folder. A `ModelConfig` is
                returned as it is.

        Raises:
            ValueError: The family is unknown, a field is missing or has an unusable value, or a field changes the
                numbers in a way that the family's row does not describe; names the field and its value.
        """
        if isinstance(config, cls):
            return config
        stated = _fields(config)
        if isinstance(config, str | os.PathLike):
            try:
                return cls.from_hf(stated)
            except ValueError as error:
                raise ValueError(f"{Path(config) / 'config.json'}: {error}") from None
        family = family_of(stated)
        hf = family.fields(stated)
        _refuse_unread(hf, family)
        num_layers = count("num_hidden_layers")(hf)
        latent = None if family.latent is None else LatentConfig(**values(family.latent, hf))
        model = cls(
            family=family.name,
            vocab_size=count("vocab_size")(hf),
            decoder=DecoderConfig(**values(family.decoder, hf), latent=latent),
            own_fields=family.own_fields(hf, num_layers),
            windows=family.windows(hf, num_layers),
            moe=tuple(None if mixture is None else MoEConfig(**mixture) for mixture in family.experts(hf, num_layers)),
            tie_word_embeddings=flag("tie_word_embeddings", default=family.tied)(hf),
            ropes=family.ropes(hf, num_layers),
            hf=stated,
            **values(family.model, hf),
        )
        for layer, rope in enumerate(model.ropes):
            if rope not in model.ropes[:layer]:
                model.rotary(layer)  # raises for rope parameters that no rotation has
        return model

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.windows)

    @property
    def has_linear_attention(self) -> bool:
        """Return whether a layer has linear attention."""
        return any("linear_attention" in fields for fields in self.own_fields)

    def layer(self, index: int) -> DecoderConfig:
        """Return the config of one layer."""
        return replace(self.decoder, window=self.windows[index], moe=self.moe[index], **self.own_fields[index])

    def with_router_losses(
        self, *, balance_loss: float = 0.0, sequence_balance_loss: float = 0.0, z_loss: float = 0.0
    ) -> Self:
        """Return the same model with these weights of its routers' auxiliary losses."""
        losses: Any = {"balance_loss": balance_loss, "sequence_balance_loss": sequence_balance_loss, "z_loss": z_loss}
        return replace(self, moe=tuple(None if mixture is None else replace(mixture, **losses) for mixture in self.moe))

    def rotary(self, layer: int = 0, device: torch.device | str | None = None) -> RotaryEmbedding | None:
        """Return a new rotary embedding of a layer; None if the layer does not rotate."""
        rope = self.ropes[layer]
        return None if rope is None else RotaryEmbedding.from_config(rope, device=device)


def _fields(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping) or hasattr(config, "to_dict"):
        return dict(config if isinstance(config, Mapping) else config.to_dict())
    if not isinstance(config, str | os.PathLike):
        raise ValueError(
            f"config is a {type(config).__name__}; pass a mapping, an object with to_dict(), or a checkpoint folder"
        )
    file = Path(config) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; pass a checkpoint folder with a config.json")
    try:
        fields = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds {type(fields).__name__}, not a JSON object")
    return fields


def _refuse_unread(config: Config, family: Family) -> None:
    fields = {**stated_parameters(config), **config}
    for name in (*_OFF, *_ONE):
        value = fields.get(name)
        neutral = not value if name in _OFF else value in (None, 1)
        if not neutral and name not in family.reads:
            raise ValueError(
                f"the config's {name}={value!r:.100} changes the numbers, and the row of {family.name} in "
                f"parallel_layers.model.FAMILIES does not describe it; use a checkpoint without {name}"
            )
