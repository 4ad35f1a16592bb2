"""Rotary position embedding: one table of rope types, computed in fp32 from explicit position ids.

Shape legend: T tokens, D rotary dims of a head (head_dim x partial_rotary_factor), N heads, S sequences.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from parallel_layers.kernels.rotary import fused_rotary
from parallel_layers.kernels.runtime import use_triton


@dataclass(frozen=True)
class RopeSpec:
    """What a rope type computes its frequencies from.

    Attributes:
        dim: D, the rotated dims of a head; even.
        head_dim: All dims of a head.
        theta: Base of the geometric progression of frequencies.
        max_position: `max_position_embeddings` of the model; None when the type does not need it.
        parameters: The `rope_parameters` (formerly `rope_scaling`) mapping of a Hugging Face config.
    """

    dim: int
    head_dim: int
    theta: float
    max_position: int | None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """The parameter `name`; raises ValueError when the config lacks it."""
        value = self.parameters.get(name)
        if value is None:
            raise ValueError(
                f"rope_type={self.parameters.get('rope_type')!r} needs {name!r}, which is not among the rope "
                f"parameters {sorted(self.parameters)}; add it to the config's rope_parameters"
            )
        return value

    def maximum(self) -> int:
        """`max_position_embeddings`; raises ValueError when it was not given."""
        if self.max_position is None:
            raise ValueError(
                f"rope_type={self.parameters.get('rope_type')!r} needs max_position_embeddings; "
                "pass RotaryEmbedding(..., max_position_embeddings=...)"
            )
        return self.max_position

    def powers(self) -> Tensor:
        """theta^(2i/D) for i in [0, D/2), fp32."""
        return self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)


def _default(spec: RopeSpec) -> Tensor:
    """RoFormer, https://arxiv.org/abs/2104.09864."""
    return 1.0 / spec.powers()


def _linear(spec: RopeSpec) -> Tensor:
    """Position interpolation, https://arxiv.org/abs/2306.15595: every frequency divided by the factor."""
    return _default(spec) / spec["factor"]


def _proportional(spec: RopeSpec) -> Tensor:
    """The first `partial_rotary_factor` of the frequencies of a whole head; the others are zero (no rotation)."""
    rotated = int(spec.parameters.get("partial_rotary_factor", 1.0) * spec.head_dim // 2)
    inv_freq = _default(spec)
    inv_freq[rotated:] = 0.0
    return inv_freq / spec.parameters.get("factor", 1.0)


def _llama3(spec: RopeSpec) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched by the factor, with a linear ramp between.

    With r = original / wavelength and a = (r - low) / (high - low):
    frequency / factor for r < low, frequency for r > high, and (1 - a) frequency / factor + a frequency between.
    """
    inv_freq = _default(spec)
    factor, original = spec["factor"], spec["original_max_position_embeddings"]
    low, high = spec["low_freq_factor"], spec["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    ramp = (original / wavelength - low) / (high - low)
    between = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    stretched = torch.where(wavelength > original / low, inv_freq / factor, between)
    return torch.where(wavelength < original / high, inv_freq, stretched)


def _yarn_factor(spec: RopeSpec) -> float:
    return float(spec.parameters.get("factor") or spec.maximum() / spec["original_max_position_embeddings"])


def _yarn(spec: RopeSpec) -> Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071: interpolate the dims that turn less than beta_slow times in the original
    context, keep those that turn more than beta_fast times, and ramp linearly (over the dim's index) between them.
    """
    original = spec["original_max_position_embeddings"]

    def dim_that_turns(times: float) -> float:
        return spec.dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dim_that_turns(spec.parameters.get("beta_fast") or 32)
    high = dim_that_turns(spec.parameters.get("beta_slow") or 1)
    if spec.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low or 0.001  # a ramp of no width is a step
    keep = 1 - ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = spec.powers()
    return (1.0 / (_yarn_factor(spec) * powers)) * (1 - keep) + (1.0 / powers) * keep


def _yarn_attention_factor(spec: RopeSpec) -> float:
    """0.1 m ln(factor) + 1 with m = 1, or the ratio of that at `mscale` and at `mscale_all_dim` (DeepSeek)."""
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _yarn_factor(spec)
    scale, scale_all = spec.parameters.get("mscale"), spec.parameters.get("mscale_all_dim")

    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def _longrope(spec: RopeSpec) -> Tensor:
    """LongRoPE, https://arxiv.org/abs/2402.13753: two tables of factors, `[2, D/2]` (short, long)."""
    factors = [spec["short_factor"], spec["long_factor"]]
    if any(len(row) != spec.dim // 2 for row in factors):
        raise ValueError(
            f"longrope needs {spec.dim // 2} factors for {spec.dim} rotary dims, but short_factor has "
            f"{len(factors[0])} and long_factor {len(factors[1])}"
        )
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.powers())


def _longrope_attention_factor(spec: RopeSpec) -> float:
    """sqrt(1 + ln(factor) / ln(original))."""
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    original = spec["original_max_position_embeddings"]
    factor = spec.parameters.get("factor") or spec.maximum() / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _longrope_by_length(spec: RopeSpec, inv_freq: Tensor, length: Tensor) -> Tensor:
    """The long table for sequences longer than the original context, the short one for the others."""
    is_long = (length > spec["original_max_position_embeddings"])[..., None]
    return torch.where(is_long, inv_freq[1], inv_freq[0])


def _dynamic_by_length(spec: RopeSpec, inv_freq: Tensor, length: Tensor) -> Tensor:
    """Dynamic NTK: beyond the maximum M the base grows to theta (factor L / M - (factor - 1))^(D / (D - 2))."""
    factor, maximum = spec["factor"], spec.maximum()
    stretch = factor * length.clamp(min=maximum) / maximum - (factor - 1)
    theta = spec.theta * stretch ** (spec.dim / (spec.dim - 2))
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32, device=length.device) / spec.dim
    return torch.where((length > maximum)[..., None], 1.0 / theta[..., None] ** exponent, inv_freq[0])


def _one(spec: RopeSpec) -> float:
    return 1.0


@dataclass(frozen=True)
class RopeType:
    """One row of the table of rope types.

    Attributes:
        frequencies: spec -> inverse frequencies `[D/2]`, or `[R, D/2]` for several tables.
        attention_factor: spec -> what cos and sin are multiplied by.
        by_length: (spec, tables `[R, D/2]`, length of each token's sequence `[T]`) -> `[T, D/2]`, for the types whose
            frequencies depend on how long a sequence is; None for the others.
        whole_head: All head dims are in the tables, whatever the partial rotary factor.
    """

    frequencies: Callable[[RopeSpec], Tensor]
    attention_factor: Callable[[RopeSpec], float] = _one
    by_length: Callable[[RopeSpec, Tensor, Tensor], Tensor] | None = None
    whole_head: bool = False


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(_default),
    "linear": RopeType(_linear),
    "dynamic": RopeType(_default, by_length=_dynamic_by_length),
    "llama3": RopeType(_llama3),
    "yarn": RopeType(_yarn, _yarn_attention_factor),
    "longrope": RopeType(_longrope, _longrope_attention_factor, _longrope_by_length),
    "proportional": RopeType(_proportional, whole_head=True),
}
# Names of older configs.
ROPE_TYPES["mrope"] = ROPE_TYPES["default"]
ROPE_TYPES["su"] = ROPE_TYPES["longrope"]


def _frequency_axes(sections: list[int], interleaved: bool) -> Tensor:
    """Which of the position axes (time, height, width) turns each frequency: `[D/2]` int64.

    Contiguous (Qwen2-VL): the sections one after another. Interleaved (Qwen3-VL): axes alternate t h w t h w ... while
    a spatial axis has some of its section left; the rest is time.
    """
    if not interleaved:
        return torch.cat([torch.full((size,), i % 3, dtype=torch.int64) for i, size in enumerate(sections)])
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


class RotaryEmbedding(nn.Module):
    """cos and sin of every token's rotation angles, from its position id; one module for a whole model.

    angle[t, i] = position[t] · inv_freq[i], repeated for both halves of the rotary dims. The frequencies are a function
    of the constructor's arguments and, for `dynamic` and `longrope`, of each sequence's own length: never of earlier
    calls. They stay fp32 when the model is cast, and are recomputed when it is moved or materialised.

    Args:
        head_dim: Size of a head.
        theta: Base; None takes `rope_theta` from the parameters, or 10000.
        parameters: A Hugging Face config's `rope_parameters` (or `rope_scaling`) mapping: `rope_type` and that type's
            options, `partial_rotary_factor`, `mrope_section`, `mrope_interleaved`. None: the default type.
        max_position_embeddings: Needed by `dynamic`, and by `yarn` and `longrope` without a `factor`.
        device: Where the table lives.

    Raises:
        ValueError: An unknown rope type, a missing option of a type, two thetas, an odd number of rotary dims, or
            multi-axis sections that do not fill the frequencies.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        max_position_embeddings: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parameters = dict(parameters or {})
        name = parameters.setdefault("rope_type", parameters.get("type", "default"))
        if name not in ROPE_TYPES:
            raise ValueError(f"rope_type={name!r} is unknown; known types: {', '.join(sorted(ROPE_TYPES))}")
        in_parameters = parameters.get("rope_theta")
        if theta is not None and in_parameters is not None and theta != in_parameters:
            raise ValueError(f"theta={theta} but the rope parameters say rope_theta={in_parameters}; give only one")
        self.rope_type = ROPE_TYPES[name]
        partial = 1.0 if self.rope_type.whole_head else parameters.get("partial_rotary_factor") or 1.0
        dim = int(head_dim * partial)
        if dim % 2 or dim == 0:
            raise ValueError(
                f"head_dim={head_dim} x partial_rotary_factor={partial} = {dim} rotary dims; need an even > 0"
            )
        self.spec = RopeSpec(
            dim, head_dim, float(theta or in_parameters or 10000.0), max_position_embeddings, parameters
        )
        with torch.device(
            "cpu"
        ):  # the same bits everywhere, also when the model is built on another or the meta device
            self._table = self.rope_type.frequencies(self.spec).reshape(-1, dim // 2)
            sections = parameters.get("mrope_section")
            self._axes = None
            if sections is not None:
                if sum(sections) != dim // 2:
                    raise ValueError(
                        f"mrope_section={list(sections)} sums to {sum(sections)}, not to {dim // 2} frequencies"
                    )
                self._axes = _frequency_axes(list(sections), bool(parameters.get("mrope_interleaved", False)))
        self.attention_factor = self.rope_type.attention_factor(self.spec)
        if self.rope_type.by_length is not None:  # a missing option is an error now, not at the first long sequence
            self.rope_type.by_length(self.spec, self._table, torch.zeros(1, dtype=torch.int64, device="cpu"))
        target = torch.device(device) if device is not None else torch.get_default_device()
        self.register_buffer(
            "inv_freq", self._table.to("cpu" if target.type == "meta" else target, copy=True), persistent=False
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, layer_type: str | None = None, device: torch.device | str | None = None
    ) -> Self:
        """Build from a Hugging Face config as a mapping (`config.to_dict()` or a parsed config.json).

        `layer_type` picks one of several sets of rope parameters, e.g. `sliding_attention` of Gemma 3.
        """
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if layer_type is not None and layer_type in parameters:
            parameters = dict(parameters[layer_type])
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if config.get(name) is not None:
                parameters.setdefault(name, config[name])
        return cls(
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            parameters=parameters,
            max_position_embeddings=config.get("max_position_embeddings"),
            device=device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the module to its device, but keep the table's dtype and values (a cast or `to_empty` spoils them)."""
        super()._apply(fn, recurse)
        if self.inv_freq.device.type != "meta":
            self.inv_freq = self._table.to(self.inv_freq.device, copy=True)
        return self

    @torch.no_grad()
    def forward(self, position_ids_T: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rotation of each token.

        Args:
            position_ids_T: `[T]`, or `[3, T]` (time, height, width) for a multi-axis model.
            cu_seqlens: `[S+1]` boundaries of the packed sequences. Only `dynamic` and `longrope` look at it: their
                frequencies depend on the length of the token's own sequence (its largest position + 1). None: all
                tokens belong to one sequence.

        Returns:
            cos, sin: `[T, D]` fp32.
        """
        inv_freq = self.inv_freq.to(position_ids_T.device)
        if self.rope_type.by_length is None:
            rates = inv_freq[0]
        else:
            rates = self.rope_type.by_length(self.spec, inv_freq, _sequence_lengths(position_ids_T, cu_seqlens))
        angles = position_ids_T[..., None].float() * rates
        if angles.dim() == 3:
            if self._axes is None:
                raise ValueError(
                    f"position_ids have {angles.shape[0]} axes, but the rope parameters have no mrope_section; pass [T]"
                )
            index = self._axes.to(angles.device).expand(1, *angles.shape[1:])
            angles = angles.gather(0, index)[0]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.spec.dim} of {self.spec.head_dim}, theta={self.spec.theta}, {self.spec.parameters['rope_type']}"


def _sequence_lengths(position_ids_T: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Largest position + 1 in each token's own sequence: `[T]`, without a host synchronisation."""
    positions = position_ids_T if position_ids_T.dim() == 1 else position_ids_T.amax(0)
    if positions.numel() == 0:
        return positions
    if cu_seqlens is None:
        return (positions.amax() + 1).expand_as(positions)
    tokens = torch.arange(positions.shape[0], device=positions.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    largest = positions.new_zeros(cu_seqlens.shape[0]).scatter_reduce(0, segment, positions, "amax")
    return largest[segment] + 1


def apply_rotary(x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the first D dims of every head; the rest passes through.

        out = x cos + rotate_half(x) sin,   rotate_half((a, b)) = (-b, a) with a, b the two halves of the D dims

    Computed in fp32 (fp64 for fp64 input), rounded once to x's dtype.

    Args:
        x_TND: Queries or keys `[T, N, head_dim]`.
        cos_TD: `[T, D]` from `RotaryEmbedding`, D <= head_dim.
        sin_TD: `[T, D]`.

    Returns:
        `[T, N, head_dim]` in x's dtype.
    """
    dim = cos_TD.shape[-1]
    wide = torch.promote_types(x_TND.dtype, cos_TD.dtype)
    rotated, rest = (x_TND, None) if dim == x_TND.shape[-1] else (x_TND[..., :dim], x_TND[..., dim:])
    rotated = rotated.to(wide)
    first, second = rotated.chunk(2, dim=-1)
    out = rotated * cos_TD[:, None] + torch.cat((-second, first), dim=-1) * sin_TD[:, None]
    out = out.to(x_TND.dtype)
    return out if rest is None else torch.cat((out, rest), dim=-1)


def rotate_queries_and_keys(q_TQD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary` of both, `[T, Q, head_dim]` and `[T, K, head_dim]`; on CUDA one kernel each way."""
    if use_triton(q_TQD, k_TKD, cos_TD, sin_TD):
        return fused_rotary(q_TQD, k_TKD, cos_TD, sin_TD)
    return apply_rotary(q_TQD, cos_TD, sin_TD), apply_rotary(k_TKD, cos_TD, sin_TD)
