"""The causal convolution of `fla-core` in plain torch, for tests on a CPU."""

import itertools

import torch
from torch import Tensor, nn


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """Convolve each sequence of `[1, T, D]` with the window `[D, W]`, and apply SiLU."""
    assert activation in ("silu", "swish")
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = []
    for begin, end in itertools.pairwise(bounds):
        padded = nn.functional.pad(x[:, begin:end].mT, (weight.shape[1] - 1, 0))
        if end > begin:
            parts.append(nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight)).mT)
    return nn.functional.silu(torch.cat(parts, 1)), None
