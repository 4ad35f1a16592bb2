"""What happens to the product of hidden state and head before the softmax: scale, soft-cap, temperature."""

from typing import NamedTuple

import torch
from torch import Tensor


class LogitTransform(NamedTuple):
    """`z = softcap * tanh(scale * raw / softcap) / temperature`, without the tanh where `softcap` is 0.

    `temperature` is one number or a tensor `[T]`. It is a constant: no gradient flows to it.
    """

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float | Tensor = 1.0

    @property
    def is_identity(self) -> bool:
        """Whether the logits are the raw product."""
        return self.scale == 1.0 and self.softcap == 0.0 and self._is_number(1.0)

    def _is_number(self, value: float) -> bool:
        return not isinstance(self.temperature, Tensor) and self.temperature == value

    def _inverse_temperature(self, tokens: slice, like: Tensor) -> float | Tensor:
        if isinstance(self.temperature, Tensor):
            return self.temperature[tokens].to(like.dtype).reciprocal()[:, None]
        return 1.0 / self.temperature

    def apply_(self, raw_TV: Tensor, tokens: slice) -> tuple[Tensor, Tensor | float]:
        """Turn a tile of raw products for `tokens` into logits, in place; returns them and the derivative dz / draw.

        The derivative is a number, a `[T, 1]` column, or (under a soft-cap) a tile of its own.
        """
        derivative: Tensor | float = self.scale
        if self.softcap:
            tanh_TV = raw_TV.mul_(self.scale / self.softcap).tanh_()
            derivative = torch.addcmul(
                torch.ones((), dtype=raw_TV.dtype, device=raw_TV.device), tanh_TV, tanh_TV, value=-1.0
            )
            derivative.mul_(self.scale)
            logits_TV = tanh_TV.mul_(self.softcap)
        elif self.scale != 1.0:
            logits_TV = raw_TV.mul_(self.scale)
        else:
            logits_TV = raw_TV
        if not self._is_number(1.0):
            inverse = self._inverse_temperature(tokens, raw_TV)
            logits_TV.mul_(inverse)
            derivative = derivative * inverse
        return logits_TV, derivative
