"""vLLM in FP8 on any CPU. vLLM's own kernel there needs AMX; this one multiplies by the dequantized weights.

vLLM makes, loads and reloads the layers as on a GPU. As GPU kernels do, this one keeps the weight in another form. The
worker processes of vLLM import this file, because their extension class stands here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from rl_train.engines.vllm_worker import VllmWorker


class Dequantizing(linear.CPUFp8BlockScaledMMKernel):  # type: ignore[misc]
    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        replace_parameter(layer, "weight", layer.weight.t().contiguous())

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        assert layer.weight.dtype == torch.float8_e4m3fn
        scales = layer.weight_scale_inv.t()
        blocks = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = layer.weight.shape
        weight = layer.weight.float() * blocks[:rows, :columns]
        return (x.float() @ weight + (0 if bias is None else bias)).to(x.dtype)


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Dequantizing]


class Fp8Worker(VllmWorker):
    """The worker of an engine in FP8."""
