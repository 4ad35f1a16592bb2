"""Recomputation: run a decoder layer, or its MLP or mixture of experts, again in the backward."""

from collections.abc import Callable
from typing import Any

from hf_patches.batch import BatchPlan
from hf_patches.routing import ReplayedRouter
from parallel_layers.memory.recompute import checkpoint


class Recomputed:
    """Replaces the `forward` of one module, and saves only its arguments for the backward.

    `router` is the router of an MLP without its attention, which would hand the batch's plan to the router again.
    """

    def __init__(self, forward: Callable[..., Any], router: ReplayedRouter | None) -> None:
        self.own, self.router = forward, router

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module."""
        return checkpoint(self._run, None if self.router is None else self.router.plan, *args, **kwargs)

    def _run(self, plan: BatchPlan | None, *args: Any, **kwargs: Any) -> Any:
        if self.router is not None:
            self.router.plan = plan
        return self.own(*args, **kwargs)
