"""`ModelConfig`: all that a decoder is built from, read from a Hugging Face config and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch

from parallel_layers.attention.latent import LatentConfig
from parallel_layers.decoder import DecoderConfig
from parallel_layers.model.families import FAMILIES, Family, family_of, values
from parallel_layers.model.fields import Config, count, flag
from parallel_layers.moe import MoEConfig
from parallel_layers.rotary import RotaryEmbedding

# Fields, of any family's config, that change what a decoder computes, and the values that change nothing. A family may
# read such a field; another value of a field that the family does not read is refused by name, never ignored.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attention_bias": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "embd_pdrop": (None, 0, 0.0),
    "mlp_bias": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "attn_output_gate": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "router_jitter_noise": (None, 0, 0.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "is_encoder_decoder": (None, False),
}


@runtime_checkable
class HasToDict(Protocol):
    """A config object such as transformers' `PreTrainedConfig`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        ...


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model.

    Attributes:
        family: The name of the row of `parallel_layers.model.FAMILIES`.
        vocab_size: Rows of the embedding and of the head, without the padding that tensor parallelism adds.
        decoder: A layer with full attention and an MLP.
        windows: The sliding window of every layer in tokens, None for full attention; one entry for each layer.
        moe: The mixture of experts of every layer, None for an MLP.
        tie_word_embeddings: The head is the embedding.
        hf: The Hugging Face config as it was read; a save writes it back.
    """

    family: str
    vocab_size: int
    decoder: DecoderConfig
    windows: tuple[int | None, ...]
    moe: tuple[MoEConfig | None, ...]
    tie_word_embeddings: bool
    hf: Mapping[str, Any] = field(repr=False, hash=False)

    @classmethod
    def from_hf(cls, config: Config | HasToDict | str | os.PathLike[str] | ModelConfig) -> Self:
        """Read a Hugging Face config: a mapping, an object with `to_dict()`, or a checkpoint folder.

        A `ModelConfig` is returned as it is.

        Raises:
            ValueError: The family is unknown, a field is missing or has an unusable value, or a field changes the
                numbers in a way that the family's row does not describe; names the field and its value.
        """
        if isinstance(config, cls):
            return config
        hf = _fields(config)
        family = family_of(hf)
        _refuse_unread(hf, family)
        num_layers = count("num_hidden_layers")(hf)
        latent = None if family.latent is None else LatentConfig(**values(family.latent, hf))
        return cls(
            family=family.name,
            vocab_size=count("vocab_size")(hf),
            decoder=DecoderConfig(**values(family.decoder, hf), latent=latent),
            windows=family.windows(hf, num_layers),
            moe=tuple(None if part is None else MoEConfig(**part) for part in family.experts(hf, num_layers)),
            tie_word_embeddings=flag("tie_word_embeddings")(hf),
            hf=hf,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.windows)

    def layer(self, index: int) -> DecoderConfig:
        """Return the config of one layer."""
        return replace(self.decoder, window=self.windows[index], moe=self.moe[index])

    def with_router_losses(
        self, *, balance_loss: float = 0.0, sequence_balance_loss: float = 0.0, z_loss: float = 0.0
    ) -> Self:
        """Return the same model with these weights of its routers' auxiliary losses."""
        moe = tuple(
            part
            and replace(part, balance_loss=balance_loss, sequence_balance_loss=sequence_balance_loss, z_loss=z_loss)
            for part in self.moe
        )
        return replace(self, moe=moe)

    def rotary(self, device: torch.device | str | None = None) -> RotaryEmbedding:
        """Return a new rotary embedding with the config's rope parameters."""
        return RotaryEmbedding.from_config(FAMILIES[self.family].rope(self.hf), device=device)


def _fields(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | os.PathLike):
        return _read_folder(Path(config))
    if isinstance(config, HasToDict):
        return config.to_dict()
    raise ValueError(
        f"config is a {type(config).__name__}; pass a mapping, an object with to_dict(), or a checkpoint folder"
    )


def _read_folder(path: Path) -> dict[str, Any]:
    file = path / "config.json"
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
    for name, neutral in NEUTRAL_VALUES.items():
        if name not in family.reads and config.get(name) not in neutral:
            raise ValueError(
                f"the config's {name}={config[name]!r:.100} changes the numbers, and the row of {family.name} in "
                f"parallel_layers.model.FAMILIES does not describe it; use a checkpoint with {name}={neutral[-1]!r}"
            )
