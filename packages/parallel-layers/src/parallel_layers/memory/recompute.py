"""Activation recomputation: run a function again in the backward instead of saving its intermediate tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from parallel_layers.memory.random_states import RngStates
from parallel_layers.model.options import Recompute

# The names of the MLP or the mixture of experts in a decoder layer, and the classes of a layer's only mixer.
_MLPS, _MIXERS = ("mlp", "block_sparse_moe", "shared_mlp"), ("MLP", "MoE")


def checkpoint(fn: Callable[..., Any], *args: Any, rng: RngStates | None = None, **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)`, save only the arguments, and run `fn` again in the backward.

    This is torch's non-reentrant checkpoint. The second run draws the same random numbers from torch's default
    generators and from the streams `rng`, and gradients are bitwise equal to a plain call's. Without gradients this is
    a plain call.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if rng is None:
        return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)
    contexts = contextlib.nullcontext(), _Replay(rng, rng.state_dict())
    # The snapshot includes the default generators.
    return torch_checkpoint(
        fn, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts, **kwargs
    )


def recomputed_part(layer: nn.Module, number: int, recompute: Recompute) -> nn.Module | None:
    """Return the part of a decoder layer that `recompute` names: the layer, its MLP or mixture of experts, or None."""
    if recompute == "selective":
        for name, child in layer.named_children():
            if name in _MLPS or (name == "mixer" and type(child).__name__.endswith(_MIXERS)):
                return child
        return None
    return layer if recompute == "full" or (recompute is not None and number in recompute) else None


def recompute_call(module: nn.Module, number: int) -> Callable[..., Any]:
    """Return the `forward` of a module in layer `number`, which runs again in the backward."""
    return partial(checkpoint, module.forward)


class _Replay(contextlib.ExitStack):
    """Draw as at the snapshot inside the block; backwards through a retained graph enter the block again."""

    def __init__(self, rng: RngStates, snapshot: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._rng, self._snapshot = rng, snapshot

    def __enter__(self) -> Self:
        self.enter_context(self._rng.replay(self._snapshot))
        return self
