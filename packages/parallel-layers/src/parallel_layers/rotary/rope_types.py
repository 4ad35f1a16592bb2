"""The table of rope types: the frequencies and the attention factor of each type.

Shape legend: D rotary dims of a head (head_dim x partial_rotary_factor).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeSpec:
    """The inputs of a rope type's frequencies.

    Attributes:
        dim: D; even.
        theta: Base of the frequencies.
        max_position: `max_position_embeddings` of the model, or None.
        parameters: The `rope_parameters` (formerly `rope_scaling`) mapping of a Hugging Face config.
    """

    dim: int
    theta: float
    max_position: int | None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the parameter `name`; raise ValueError if it is missing."""
        value = self.parameters.get(name)
        if value is None:
            raise ValueError(
                f"rope_type={self.parameters.get('rope_type')!r} needs {name!r}, which is not among the rope "
                f"parameters {sorted(self.parameters)}; add it to the config's rope_parameters"
            )
        return value

    @property
    def maximum(self) -> int:
        """`max_position_embeddings`; raises ValueError if it is missing."""
        if self.max_position is None:
            raise ValueError(
                f"rope_type={self.parameters.get('rope_type')!r} needs max_position_embeddings; "
                "pass RotaryEmbedding(..., max_position_embeddings=...)"
            )
        return self.max_position

    @property
    def original_maximum(self) -> int:
        """`original_max_position_embeddings`, or else `max_position_embeddings`."""
        value = self.parameters.get("original_max_position_embeddings")
        return self.maximum if value is None else value

    @property
    def extension(self) -> float:
        """`factor`, or else the maximum over the original maximum."""
        return float(self.parameters.get("factor") or self.maximum / self.original_maximum)

    @property
    def powers(self) -> Tensor:
        """theta^(2i/D) for i in [0, D/2), fp32."""
        return self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)


def _default(spec: RopeSpec) -> Tensor:
    """RoFormer, https://arxiv.org/abs/2104.09864."""
    return 1.0 / spec.powers


def _linear(spec: RopeSpec) -> Tensor:
    """Position interpolation, https://arxiv.org/abs/2306.15595: divide every frequency by the factor."""
    return _default(spec) / spec["factor"]


def _llama3(spec: RopeSpec) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched by the factor, with a linear ramp between.

    With r = original / wavelength and a = (r - low) / (high - low):
    frequency / factor for r < low, frequency for r > high, and (1 - a) frequency / factor + a frequency between.
    """
    inv_freq = _default(spec)
    factor, original = spec["factor"], spec.original_maximum
    low, high = spec["low_freq_factor"], spec["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    ramp = (original / wavelength - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, stretched)


def _yarn(spec: RopeSpec) -> Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071: interpolate the dims that turn less than beta_slow times in the original
    context, keep those that turn more than beta_fast times, and ramp linearly (over the dim's index) between them.
    """
    original = spec.original_maximum

    def dim_that_turns(times: float) -> float:
        return spec.dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dim_that_turns(spec.parameters.get("beta_fast") or 32)
    high = dim_that_turns(spec.parameters.get("beta_slow") or 1)
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001  # a ramp of width 0 becomes a step
    keep = 1 - ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = spec.powers
    return (1.0 / (spec.extension * powers)) * (1 - keep) + (1.0 / powers) * keep


def _magnitude(factor: float, m: float) -> float:
    """Return 0.1 m ln(factor) + 1, YaRN's attention factor for a context `factor` times as long."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(spec: RopeSpec) -> float:
    """Return 0.1 m ln(factor) + 1 for m = 1, or its ratio at `mscale` and `mscale_all_dim` (DeepSeek)."""
    factor = spec.extension
    scale, scale_all = spec.parameters.get("mscale"), spec.parameters.get("mscale_all_dim")
    if scale and scale_all:
        return _magnitude(factor, scale) / _magnitude(factor, scale_all)
    return _magnitude(factor, 1.0)


def yarn_softmax_scale(head_dim: int, parameters: Mapping[str, Any] | None) -> float:
    """Return the scale of DeepSeek's attention scores: (0.1 mscale_all_dim ln(factor) + 1)² / sqrt(head_dim).

    The scores carry the factor of `mscale_all_dim`, because a part of a head is not rotated. cos and sin carry the
    ratio of `mscale` and `mscale_all_dim`. Without `mscale_all_dim` the scale is 1 / sqrt(head_dim).
    https://arxiv.org/abs/2405.04434

    Raises:
        ValueError: `mscale_all_dim` is given without `factor`.
    """
    parameters = parameters or {}
    mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if not mscale or parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return head_dim**-0.5
    if factor is None:
        raise ValueError(f"mscale_all_dim={mscale} needs the rope parameter 'factor'; got {sorted(parameters)}")
    return head_dim**-0.5 * _magnitude(factor, mscale) ** 2


class RopeType(NamedTuple):
    """A row of the table of rope types.

    Attributes:
        frequencies: Function of the spec. Returns inverse frequencies `[D/2]`.
        attention_factor: Function of the spec. Returns the factor of cos and sin, unless the parameters give
            `attention_factor`. None: 1.
    """

    frequencies: Callable[[RopeSpec], Tensor]
    attention_factor: Callable[[RopeSpec], float] | None = None


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(_default),
    "linear": RopeType(_linear),
    "llama3": RopeType(_llama3),
    "yarn": RopeType(_yarn, _yarn_attention_factor),
}
