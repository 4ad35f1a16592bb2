"""Scale, soft-cap and temperature of the logits."""

from typing import NamedTuple

import torch
from torch import Tensor


class LogitTransform(NamedTuple):
    """The map `z = softcap * tanh(scale * raw / softcap) / temperature`, without the tanh if `softcap` is 0.

    `temperature` is a number or a tensor `[T]`, and gets no gradient.
    """

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float | Tensor = 1.0

    def _inverse_temperature(self, tokens: slice, like: Tensor) -> float | Tensor:
        if isinstance(self.temperature, Tensor):
            return self.temperature[tokens].to(like.dtype).reciprocal()[:, None]
        return 1.0 / self.temperature

    def apply_(self, raw_TV: Tensor, tokens: slice) -> tuple[Tensor, Tensor | float]:
        """Turn a tile of raw products of `tokens` into logits, in place; return them and the derivative dz / draw.

        The derivative is a number, a `[T, 1]` column, or (with a soft-cap) a tile.
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
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            inverse = self._inverse_temperature(tokens, raw_TV)
            logits_TV.mul_(inverse)
            derivative = derivative * inverse
        return logits_TV, derivative
