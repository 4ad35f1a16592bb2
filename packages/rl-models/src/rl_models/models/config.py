"""`ModelConfig`: what the native models are built from, read from a Hugging Face config and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from parallel_layers import DecoderConfig, RotaryEmbedding
from parallel_layers.moe import MoEConfig
from parallel_layers.rotary import yarn_softmax_scale
from rl_models.models.families import FAMILIES, family_of

# Config fields, of any family, that change the numbers in a way that the native models do not compute, and the values
# that leave the numbers as they are. Another value is refused by name, never ignored.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attention_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "embd_pdrop": (None, 0, 0.0),
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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model.

    Attributes:
        family: the row of `rl_models.models.families.FAMILIES`.
        vocab_size: of the embedding and the head, without the padding that tensor parallelism adds.
        decoder: of a layer with full attention and an MLP.
        windows: the sliding window of every layer, None for full attention; its length is the number of layers.
        moe: the mixture of experts of every layer, None for an MLP.
        tie_word_embeddings: the head is the embedding.
        hf: the Hugging Face config as it was read; a save writes it back.
    """

    family: str
    vocab_size: int
    decoder: DecoderConfig
    windows: tuple[int | None, ...]
    moe: tuple[MoEConfig | None, ...]
    tie_word_embeddings: bool
    hf: Mapping[str, Any] = field(repr=False, hash=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> Self:
        """Read a Hugging Face config: a mapping (`config.to_dict()`) or a checkpoint folder.

        Raises:
            ValueError: the architecture is unknown, a field is missing, or a field's value would change the numbers in
                a way that these models do not compute; names the field and its value.
        """
        values = config if isinstance(config, Mapping) else _read_folder(Path(config))
        family = family_of(values)
        for name, neutral in NEUTRAL_VALUES.items():
            if name not in family.reads and values.get(name) not in neutral:
                raise ValueError(
                    f"the config's {name}={values[name]!r} changes the numbers, and backend='parallel' does not "
                    f"compute it for {family.name}; use a checkpoint with {name}={neutral[-1]!r}"
                )
        if unknown := sorted(set(values.get("layer_types") or ()) - family.layer_types):
            raise ValueError(f"the config's layer_types {unknown} are not known for {family.name}")
        heads, hidden = _integer(values, "num_attention_heads"), _integer(values, "hidden_size")
        windows = family.windows({**values, "num_hidden_layers": _integer(values, "num_hidden_layers")})
        latent, head_dim, scale = None, None, None
        if family.latent is not None:
            latent = family.latent(values)
            rope = values.get("rope_parameters") or values.get("rope_scaling")
            scale = yarn_softmax_scale(latent.qk_head_dim, rope)
        else:
            head_dim = _integer(values, "head_dim", None if family.explicit_head_dim else hidden // heads)
        decoder = DecoderConfig(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_integer(values, "num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=_integer(values, "intermediate_size"),
            norm_eps=_positive(values, "rms_norm_eps"),
            activation=str(values.get("hidden_act", family.activation)),
            gated_mlp=family.gated_mlp,
            qk_norm=family.qk_norm,
            attention_bias=family.flag("qkv_bias", values),
            output_bias=family.flag("output_bias", values),
            mlp_bias=family.flag("mlp_bias", values),
            latent=latent,
            attention_scale=scale,
            rotary_interleaved=family.flag("rotary_interleaved", values),
        )
        moe = tuple(family.moe(values, i) if family.moe else None for i in range(len(windows)))
        tied = bool(values.get("tie_word_embeddings", False))
        return cls(family.name, _integer(values, "vocab_size"), decoder, windows, moe, tied, dict(values))

    @property
    def num_layers(self) -> int:
        """Of the whole model."""
        return len(self.windows)

    def layer(self, index: int) -> DecoderConfig:
        """The config of one layer."""
        return replace(self.decoder, window=self.windows[index], moe=self.moe[index])

    def with_router_losses(
        self, *, balance_loss: float = 0.0, sequence_balance_loss: float = 0.0, z_loss: float = 0.0
    ) -> Self:
        """The same model with these weights of its routers' auxiliary losses."""
        moe = tuple(
            part
            and replace(part, balance_loss=balance_loss, sequence_balance_loss=sequence_balance_loss, z_loss=z_loss)
            for part in self.moe
        )
        return replace(self, moe=moe)

    def rotary(self, device: torch.device | str | None = None) -> RotaryEmbedding:
        """The rotary embedding, by the config's own rope parameters."""
        return RotaryEmbedding.from_config(FAMILIES[self.family].rope(self.hf), device=device)


def _read_folder(path: Path) -> Mapping[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; pass a checkpoint folder with a config.json")
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds {type(values).__name__}, not a JSON object")
    return values


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the config's {name}={value!r} must be a positive integer")
    return value


def _positive(config: Mapping[str, Any], name: str) -> float:
    """Without a default: the families' differ."""
    value = config.get(name)
    if not isinstance(value, float | int) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"the config's {name}={value!r} must be a number above 0")
    return float(value)
