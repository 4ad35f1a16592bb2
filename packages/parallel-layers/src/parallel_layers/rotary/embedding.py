"""`RotaryEmbedding`: cos and sin of every token's rotation angles, in fp32 from explicit position ids.

Shape legend: T tokens, D rotary dims of a head (head_dim x partial_rotary_factor).
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from parallel_layers.rotary.rope_types import ROPE_TYPES, RopeParameters


class RotaryEmbedding(nn.Module):
    """Compute cos and sin of every token's rotation angles from position ids; one module serves a whole model.

    angle[t, i] = position[t] · inv_freq[i], repeated for both halves of the rotary dims. The frequencies stay fp32 when
    the model is cast, and keep their bits when it is moved.

    Args:
        head_dim: Size of a head.
        theta: Base of the frequencies; None: `rope_theta` of the parameters, or 10000.
        parameters: `rope_parameters` (or `rope_scaling`) of a Hugging Face config: `rope_type` and the type's options,
            `partial_rotary_factor`. None: the default type.
        max_position_embeddings: Required by `yarn` without a `factor`, and by `yarn` and `llama3` without
            `original_max_position_embeddings`.
        device: Device of the frequencies.

    Raises:
        ValueError: The rope type is unknown, an option of the type is missing, theta is given twice, or the number of
            rotary dims is odd.
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
        parameters = RopeParameters(parameters or {})
        name = parameters.setdefault("rope_type", parameters.get("type", "default"))
        if name not in ROPE_TYPES:
            raise ValueError(f"rope_type={name!r} is unknown; known types: {', '.join(sorted(ROPE_TYPES))}")
        in_parameters = parameters.get("rope_theta")
        if theta is not None and in_parameters is not None and theta != in_parameters:
            raise ValueError(f"theta={theta} but the rope parameters say rope_theta={in_parameters}; give only one")
        rope_type = ROPE_TYPES[name]
        partial = parameters.get("partial_rotary_factor") or 1.0
        dim = int(head_dim * partial)
        if dim % 2 or dim == 0:
            raise ValueError(
                f"head_dim={head_dim} x partial_rotary_factor={partial} = {dim} rotary dims; need an even > 0"
            )
        parameters["rope_theta"] = base = float(theta or in_parameters or 10000.0)
        parameters["max_position_embeddings"] = max_position_embeddings
        if parameters.get("original_max_position_embeddings") is None:
            parameters["original_max_position_embeddings"] = max_position_embeddings
        with torch.device("cpu"):  # the bits are the same for all devices, including meta
            powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            self._table = rope_type.frequencies(powers, parameters)
        factor = rope_type.attention_factor
        self.attention_factor = (
            1.0 if factor is None else float(parameters.get("attention_factor") or factor(parameters))
        )
        target = torch.device(device) if device is not None else torch.get_default_device()
        self.register_buffer(
            "inv_freq", self._table.to("cpu" if target.type == "meta" else target, copy=True), persistent=False
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, device: torch.device | str | None = None) -> Self:
        """Build from a Hugging Face config as a mapping (`config.to_dict()` or a parsed config.json).

        As in transformers, the config's own `original_max_position_embeddings` overrides that of its rope parameters.

        Raises:
            ValueError: The rope parameters differ by layer type (Gemma 3), or the constructor raises.
        """
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
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
            device=device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the table with the module, but keep its dtype and values, which a cast or `to_empty` would change."""
        super()._apply(fn, recurse)
        if self.inv_freq.device.type != "meta":
            self.inv_freq = self._table.to(self.inv_freq.device, copy=True)
        return self

    @torch.no_grad()
    def forward(self, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each token, `[T, D]` fp32, for positions `[T]`."""
        angles = self.angles(position_ids_T)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def angles(self, position_ids_T: Tensor) -> Tensor:
        """Return the rotation angles `[T, D]` fp32."""
        if position_ids_T.dim() != 1:
            raise ValueError(f"position_ids {list(position_ids_T.shape)} must be [T]: one position for each token")
        angles = position_ids_T[:, None].float() * self.inv_freq.to(position_ids_T.device)
        return torch.cat((angles, angles), dim=-1)
