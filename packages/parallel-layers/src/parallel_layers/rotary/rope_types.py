"""The table of rope types: the frequencies and the attention factor of each type.

Shape legend: D rotary dims of a head (head_dim x partial_rotary_factor).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The rope parameters that are numbers: parameters above 0, and parameters that may be 0.
_POSITIVE = (
    *("rope_theta", "partial_rotary_factor", "factor", "attention_factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "max_position_embeddings", "original_max_position_embeddings"),
)
_OR_ZERO = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")


def stated_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `rope_parameters` or the `rope_scaling` of a Hugging Face config.

    Raises:
        ValueError: The parameters are no object, or the config states a value under two names, and the two differ;
            programs disagree on the one that counts.
    """
    stated = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    for name, parameters in stated.items():
        if not isinstance(parameters, Mapping):
            raise ValueError(
                f"the config's {name}={parameters!r:.100} must be an object, such as "
                "{'rope_type': 'linear', 'factor': 2.0}"
            )
        _refuse_contradictions(config, name, parameters)
    if len(stated) == 2:
        beside = {name: value for _, name, value in _beside(config)}
        newer, older = ({**beside, **_with_one_type(parameters)} for parameters in stated.values())
        if differing := sorted(name for name in {*newer, *older} if newer.get(name) != older.get(name)):
            raise ValueError(
                f"the config's rope_parameters and rope_scaling differ in {', '.join(differing)}: "
                f"{stated['rope_parameters']!r:.200} and {stated['rope_scaling']!r:.200}; rope_scaling is the older "
                "name of rope_parameters: write every parameter into one of them and remove the other"
            )
    return next(iter(stated.values()), {})


def _beside(config: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return (name there, name of the rope parameter, value) of the rope parameters beside a config's own."""
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    fields = [(name, name, config[name]) for name in names if config.get(name) is not None]
    rotary, head = config.get("rotary_dim"), config.get("head_dim")
    if isinstance(rotary, int) and isinstance(head, int) and rotary and head:
        fields.append(("rotary_dim / head_dim", "partial_rotary_factor", rotary / head))
    return fields


def _with_one_type(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters with `rope_type`, whose older name is `type`; "mrope" is the default type by axes."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    further = {name: value for name, value in parameters.items() if name not in ("rope_type", "type")}
    return {**further, "rope_type": "default" if kind == "mrope" else kind}


def _refuse_contradictions(config: Mapping[str, Any], name: str, parameters: Mapping[str, Any]) -> None:
    """Raise ValueError if a config states a rope parameter twice, with different values."""
    beside, local = _beside(config), config.get("rope_local_base_freq")
    sets = [(name, parameters, beside)]
    if isinstance(parameters.get("full_attention"), Mapping):
        sets = [(f"{name}.full_attention", parameters["full_attention"], beside)]
    if isinstance(parameters.get("sliding_attention"), Mapping):
        fields = [] if local is None else [("rope_local_base_freq", "rope_theta", local)]
        sets.append((f"{name}.sliding_attention", parameters["sliding_attention"], fields))
    for where, values, fields in sets:
        stated = {key: (f"{where}.{key}", value) for key, value in values.items() if value not in (None, "mrope")}
        if "type" in stated:
            fields = [*fields, (f"{where}.type", "rope_type", values["type"])]
        for field, key, value in fields:
            source, expected = stated.setdefault(key, (field, value))
            if expected != value:
                raise ValueError(
                    f"the config states {source}={expected!r:.100} and {field}={value!r:.100}, two names of one value; "
                    "remove the wrong one"
                )


class RopeParameters(dict[str, Any]):
    """The `rope_parameters` of a Hugging Face config, with `rope_theta` and `max_position_embeddings`.

    Raises:
        ValueError: A parameter that is a number has another value.
    """

    def __init__(self, parameters: Mapping[str, Any] | None = None, **further: Any) -> None:
        super().__init__(parameters or {}, **further)
        for name in (*_POSITIVE, *_OR_ZERO):
            value, or_zero = self.get(name), name in _OR_ZERO
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
            if value is not None and not (is_number and (value or or_zero)):
                kind = "a number of at least 0" if or_zero else "a number above 0"
                raise ValueError(f"the rope parameter {name}={value!r:.100} must be {kind}; write {name} as a number")

    def __getitem__(self, name: str) -> Any:
        """Return the parameter `name`; raise ValueError if it is missing."""
        value = self.get(name)
        if value is None:
            raise ValueError(
                f"rope_type={self.get('rope_type')!r} needs {name!r}, which is not among the rope parameters "
                f"{sorted(self)}; add it to the config's rope_parameters"
            )
        return value

    def extension(self) -> float:
        """Return `factor`, or else the maximum over the original maximum."""
        return float(self.get("factor") or self["max_position_embeddings"] / self["original_max_position_embeddings"])


def _default(powers: Tensor, parameters: RopeParameters) -> Tensor:
    """RoFormer, https://arxiv.org/abs/2104.09864."""
    return 1.0 / powers


def _linear(powers: Tensor, parameters: RopeParameters) -> Tensor:
    """Position interpolation, https://arxiv.org/abs/2306.15595: divide every frequency by the factor."""
    return 1.0 / powers / parameters["factor"]


def _proportional(powers: Tensor, parameters: RopeParameters) -> Tensor:
    """Gemma 4: the frequencies of the whole head, and 0 for all but the first `partial_rotary_factor` of them."""
    inv_freq = 1.0 / powers / parameters.get("factor", 1.0)
    rotated = int((parameters.get("partial_rotary_factor") or 1.0) * 2 * len(powers) // 2)
    return inv_freq.index_fill(0, torch.arange(rotated, len(powers)), 0.0)


def _llama3(powers: Tensor, parameters: RopeParameters) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched by the factor, with a linear ramp between.

    With r = original / wavelength and a = (r - low) / (high - low):
    frequency / factor for r < low, frequency for r > high, and (1 - a) frequency / factor + a frequency between.
    """
    inv_freq = 1.0 / powers
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    ramp = (original / wavelength - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, stretched)


def _yarn(powers: Tensor, parameters: RopeParameters) -> Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071: interpolate the dims that turn less than beta_slow times in the original
    context, keep the dims that turn more than beta_fast times, and ramp linearly (over the dim's index) between them.
    """
    dim, original = 2 * len(powers), parameters["original_max_position_embeddings"]

    def dim_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low = dim_that_turns(parameters.get("beta_fast") or 32)
    high = dim_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # a ramp of width 0 becomes a step
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1.0 / (parameters.extension() * powers)) * (1 - keep) + (1.0 / powers) * keep


def _longrope(powers: Tensor, parameters: RopeParameters) -> Tensor:
    """LongRoPE, https://arxiv.org/abs/2402.13753, up to the original length: divide each frequency by its short factor.

    In a longer sequence all tokens have the long factors, also the first tokens. A token's log-prob then depends on the
    tokens after it, so a policy that draws a sequence would differ from the policy that scores it.
    """
    factors = parameters["short_factor"]
    numbers = isinstance(factors, list | tuple) and all(isinstance(factor, int | float) for factor in factors)
    if not numbers or len(factors) != len(powers):
        dims = 2 * len(powers)
        raise ValueError(f"short_factor={factors!r:.100} must be {dims // 2} numbers, because {dims} dims rotate")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)


def _longrope_attention_factor(parameters: RopeParameters) -> float:
    factor, original = parameters.extension(), parameters["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def require_length(tokens: int, longest: int | None) -> None:
    """Raise ValueError for a sequence longer than a rotation has one set of frequencies for; None: any length."""
    if longest is not None and tokens > longest:
        raise ValueError(
            f"a sequence of {tokens} tokens is longer than {longest}, the original_max_position_embeddings of a model "
            "with LongRoPE: all of its tokens would rotate otherwise, and log-probs would depend on later tokens; use "
            f"prompts and responses of at most {longest} tokens together"
        )


def _magnitude(factor: float, m: float) -> float:
    """Return 0.1 m ln(factor) + 1, YaRN's attention factor for a context `factor` times as long."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(parameters: RopeParameters) -> float:
    """Return 0.1 m ln(factor) + 1 for m = 1, or its ratio at `mscale` and `mscale_all_dim` (DeepSeek)."""
    factor, scale, scale_all = parameters.extension(), parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_all:
        return _magnitude(factor, scale) / _magnitude(factor, scale_all)
    return _magnitude(factor, 1.0)


def yarn_softmax_scale(head_dim: int, parameters: Mapping[str, Any] | None) -> float:
    """Return the scale of DeepSeek's attention scores: (0.1 mscale_all_dim ln(factor) + 1)² / sqrt(head_dim).

    The scores carry the factor of `mscale_all_dim`, because a part of a head is not rotated. cos and sin carry the
    ratio of `mscale` and `mscale_all_dim`. Without `mscale_all_dim` the scale is 1 / sqrt(head_dim).
    https://arxiv.org/abs/2405.04434

    Raises:
        ValueError: `mscale_all_dim` is given without `factor`, or a parameter is no number.
    """
    parameters = RopeParameters(parameters)
    mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if not mscale or parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return head_dim**-0.5
    if factor is None:
        raise ValueError(f"mscale_all_dim={mscale} needs the rope parameter 'factor'; got {sorted(parameters)}")
    return head_dim**-0.5 * _magnitude(factor, mscale) ** 2


class RopeType(NamedTuple):
    """A row of the table of rope types.

    Attributes:
        frequencies: Function of theta^(2i/D) `[D/2]` fp32 and the parameters. Returns inverse frequencies `[D/2]`.
        attention_factor: Function of the parameters. Returns the factor of cos and sin, unless the parameters give
            `attention_factor`. None: 1.
        original_length: The frequencies hold for sequences up to `original_max_position_embeddings`.
        whole_head: `partial_rotary_factor` does not make D smaller; the frequencies say which dims stay.
    """

    frequencies: Callable[[Tensor, RopeParameters], Tensor]
    attention_factor: Callable[[RopeParameters], float] | None = None
    original_length: bool = False
    whole_head: bool = False


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(_default),
    "linear": RopeType(_linear),
    "llama3": RopeType(_llama3),
    "longrope": RopeType(_longrope, _longrope_attention_factor, original_length=True),
    "proportional": RopeType(_proportional, whole_head=True),
    "yarn": RopeType(_yarn, _yarn_attention_factor),
}
