"""Activation recomputation: run a function again in the backward instead of saving its intermediate tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from parallel_layers.memory.random_states import RngStates


def checkpoint(fn: Callable[..., Any], *args: Any, rng: RngStates | None = None, **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)`, save only the arguments, and run `fn` again in the backward.

    This is torch's non-reentrant checkpoint. The second run draws the same random numbers from torch's default
    generators and from the streams `rng`, and gradients are bitwise those of a plain call.
    """
    if rng is None:
        return torch_checkpoint(fn, *args, use_reentrant=False, **kwargs)
    contexts = contextlib.nullcontext(), _Replay(rng, rng.state_dict())
    # The snapshot includes the default generators.
    return torch_checkpoint(
        fn, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts, **kwargs
    )


class _Replay(contextlib.ExitStack):
    """Draw as at the snapshot inside the block; backwards through a retained graph enter the block again."""

    def __init__(self, rng: RngStates, snapshot: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._rng, self._snapshot = rng, snapshot

    def __enter__(self) -> Self:
        self.enter_context(self._rng.replay(self._snapshot))
        return self
