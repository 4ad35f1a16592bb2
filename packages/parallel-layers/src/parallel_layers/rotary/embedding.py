"""`RotaryEmbedding`: cos and sin of every token's rotation angles, in fp32 from explicit position ids.

Shape legend: T tokens, D rotary dims of a head (head_dim x partial_rotary_factor), A axes of positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from parallel_layers.rotary.rope_types import ROPE_TYPES, RopeParameters, stated_parameters


class RotaryEmbedding(nn.Module):
    """Compute cos and sin of every token's rotation angles from position ids; one module serves a whole model.

    angle[t, i] = position[t] · inv_freq[i], repeated for both halves of the rotary dims. The frequencies stay fp32 when
    the model is cast, and keep their bits when it is moved. With `axes` (M-RoPE, https://arxiv.org/abs/2409.12191) the
    positions may have several axes: angle[t, i] = position[axes[i], t] · inv_freq[i].

    Args:
        head_dim: Size of a head.
        theta: Base of the frequencies; None: `rope_theta` of the parameters, or 10000.
        parameters: `rope_parameters` (or `rope_scaling`) of a Hugging Face config: `rope_type` and the type's options,
            `partial_rotary_factor`, `llama_4_scaling_beta`. None: the default type.
        max_position_embeddings: Required by `yarn` without a `factor`, and by `yarn` and `llama3` without
            `original_max_position_embeddings`.
        axes: The axis of the positions for each of the D / 2 frequencies; None: positions have one axis.
        device: Device of the frequencies.

    Attributes:
        longest: Tokens of the longest sequence whose rotation this is (LongRoPE); None: any.

    Raises:
        ValueError: The rope type is unknown, an option of the type is missing, theta is given twice, the number of
            rotary dims is odd, or `axes` are not D / 2.
    """

    inv_freq: Tensor
    axes: Tensor | None

    def __init__(
        self,
        head_dim: int,
        theta: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        max_position_embeddings: int | None = None,
        axes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parameters = RopeParameters(parameters, max_position_embeddings=max_position_embeddings)
        name = parameters.setdefault("rope_type", parameters.get("type", "default"))
        if name in ("su", "yarn") and "short_factor" in parameters:
            name = "longrope"  # by its names in older files
        if not isinstance(name, str) or name not in ROPE_TYPES:
            raise ValueError(f"rope_type={name!r} is unknown; known types: {', '.join(sorted(ROPE_TYPES))}")
        in_parameters = parameters.get("rope_theta")
        if theta is not None and in_parameters is not None and theta != in_parameters:
            raise ValueError(f"theta={theta} but the rope parameters say rope_theta={in_parameters}; give one of them")
        rope_type = ROPE_TYPES[name]
        partial = parameters.get("partial_rotary_factor") or 1.0
        dim = head_dim if rope_type.whole_head else int(head_dim * partial)
        if dim % 2 or not 0 < dim <= head_dim:
            raise ValueError(
                f"head_dim={head_dim} x partial_rotary_factor={partial} = {dim} rotary dims; need an even number > 0, "
                "at most head_dim"
            )
        if axes is not None and 2 * len(axes) != dim:
            raise ValueError(
                f"axes are given for {len(axes)} frequencies, and {dim} rotary dims have {dim // 2}; the sum of "
                "mrope_section must be half the rotary dims"
            )
        parameters["rope_theta"] = base = float(theta or in_parameters or 10000.0)
        if parameters.get("original_max_position_embeddings") is None:
            parameters["original_max_position_embeddings"] = max_position_embeddings
        with torch.device("cpu"):  # the bits are the same for all devices, including meta
            powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            self._table = rope_type.frequencies(powers, parameters)
            self._axes = None if axes is None else torch.tensor(axes)
        factor = rope_type.attention_factor
        self.attention_factor = (
            1.0 if factor is None else float(parameters.get("attention_factor") or factor(parameters))
        )
        original = parameters["original_max_position_embeddings"] if rope_type.original_length else None
        self.longest = None if original is None else int(original)
        beta = parameters.get("llama_4_scaling_beta")
        self.scaling = None if beta is None else (float(beta), int(parameters["original_max_position_embeddings"]))
        target = torch.device(device) if device is not None else torch.get_default_device()
        for name, values in (("inv_freq", self._table), ("axes", self._axes)):
            buffer = None if values is None else values.to("cpu" if target.type == "meta" else target, copy=True)
            self.register_buffer(name, buffer, persistent=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, device: torch.device | str | None = None) -> Self:
        """Build from a Hugging Face config as a mapping (`config.to_dict()` or a parsed config.json).

        `original_max_position_embeddings` may stand in the config or in its rope parameters.

        Raises:
            ValueError: The rope parameters differ by layer type (Gemma 3), or the constructor raises.
        """
        parameters = dict(stated_parameters(config))
        if sets := sorted(name for name, values in parameters.items() if isinstance(values, Mapping)):
            raise ValueError(
                f"the rope parameters are by layer type, {', '.join(sets)}; build one module from each set"
            )
        if (original := config.get("original_max_position_embeddings")) is not None:
            parameters["original_max_position_embeddings"] = original
        for name in ("rope_theta", "partial_rotary_factor"):
            if config.get(name) is not None:
                parameters.setdefault(name, config[name])
        return cls(
            # In multi-head latent attention the head of this module is the rotated part only.
            config.get("qk_rope_head_dim")
            or config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            parameters=parameters,
            max_position_embeddings=config.get("max_position_embeddings"),
            axes=config.get("position_axes"),
            device=device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the table with the module, but keep its dtype and values, which a cast or `to_empty` would change."""
        super()._apply(fn, recurse)
        if self.inv_freq.device.type != "meta":
            self.inv_freq = self._table.to(self.inv_freq.device, copy=True)
            self.axes = None if self._axes is None else self._axes.to(self.inv_freq.device, copy=True)
        return self

    @torch.no_grad()
    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each token, `[T, D]` fp32, for positions `[T]`, or `[A, T]` with `axes`."""
        angles = self.angles(position_ids)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def tables(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return cos and sin of each token, and with `llama_4_scaling_beta` the factor of its rotated query `[T]` fp32.

        factor = 1 + beta · ln(1 + floor(position / original_max_position_embeddings))        (Llama 4, Ministral 3)
        """
        if self.scaling is None:
            return self(position_ids)
        beta, length = self.scaling
        # In fp64: on a CPU the last bit of an fp32 logarithm depends on the element's place in the tensor.
        return *self(position_ids), (1 + beta * (position_ids // length).double().log1p()).float()

    def angles(self, position_ids: Tensor) -> Tensor:
        """Return the rotation angles `[T, D]` fp32."""
        if position_ids.dim() == 2 and self.axes is not None:
            positions = position_ids[self.axes].T  # [T, D/2]
        elif position_ids.dim() == 1:
            positions = position_ids[:, None]
        else:
            raise ValueError(
                f"position_ids {list(position_ids.shape)} must be [T]: one position for each token; [axes, T] is for a "
                "rotation with several axes (M-RoPE)"
            )
        angles = positions.float() * self.inv_freq.to(position_ids.device)
        return torch.cat((angles, angles), dim=-1)
