"""Save memory in the backward of Megatron-Core's layers: MLPs in tiles, recomputation, and activation offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from megatron_utils.gpt.model import PackedGPTModel
from parallel_layers.memory import Recompute, TiledMLP, checkpoint, memory_savings, require_recompute


def save_memory(
    chunks: Sequence[PackedGPTModel],
    *,
    tiled_mlp: int | None = None,
    recompute: Recompute = None,
    offload: bool = False,
) -> None:
    """Replace the `forward` of layers and MLPs of a model's chunks on this rank; the numbers do not change.

    This serves both layer specs. Megatron-Core's own offload needs Transformer Engine and excludes recomputation and
    pipelines; its own recomputation has no lists of layers.

    Args:
        chunks: The chunks of `build_gpt`, before they are wrapped for data parallelism.
        tiled_mlp: The number of tiles of this rank's tokens in which each dense MLP is computed. The backward computes
            each tile again. None: all tokens at once.
        recompute: Compute again in the backward: "full", every layer; "selective", every MLP or mixture of experts; or
            the layers of these numbers.
        offload: Keep what layers save for the backward in host memory (`parallel_layers.memory.activations`).

    Raises:
        ValueError: `recompute` is unknown, or names layers that the model does not have.
    """
    config: TransformerConfig = chunks[0].config
    require_recompute(recompute, config.num_layers)
    layers = {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}

    def recomputed(submodule: nn.Module, number: int) -> Callable[..., Any]:
        return partial(checkpoint, _quantized(submodule.forward, config, number))

    for module, forward, _ in memory_savings(
        layers,
        mlps=[layer.mlp for layer in layers.values() if isinstance(layer.mlp, MLP)],
        tiled_mlp=tiled_mlp,
        recompute=recompute,
        offload=offload,
        first_layers=[chunk.decoder.layers[0].layer_number - 1 for chunk in chunks],
        recomputed=recomputed,
        tiled=lambda mlp, tiles: _TiledPair(mlp.forward, tiles).forward,
    ):
        module.forward = forward


def _quantized(forward: Callable[..., Any], config: TransformerConfig, number: int) -> Callable[..., Any]:
    """Return a layer's `forward` in FP8 where the config asks for FP8, also when the backward runs it again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with get_fp8_context(config, number):
            return forward(*args, **kwargs)

    return run if config.fp8 else forward


class _TiledPair:
    """Replaces the `forward` of an MLP of Megatron-Core, which returns its output and a bias to add later."""

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor | None]], tiles: int) -> None:
        self.untiled, self.tiled = forward, TiledMLP(self._tile, tiles)
        self.bias: Tensor | None = None

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Turn `[T, 1, H]` into (`[T, 1, H]`, bias)."""
        return self.tiled.forward(hidden), self.bias

    def _tile(self, hidden: Tensor) -> Tensor:
        output, self.bias = self.untiled(hidden[:, None])
        return output[:, 0]
