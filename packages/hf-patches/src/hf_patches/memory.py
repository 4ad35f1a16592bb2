"""Save memory in the backward: MLPs in tiles, recomputation, and activation offload."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from hf_patches.backbone import decoder_layers
from hf_patches.batch import BatchPlan
from hf_patches.routing import ReplayedRouter
from parallel_layers.memory import Recompute, checkpoint, memory_savings, recompute_call, require_recompute


class RecomputedMLP:
    """Replaces the `forward` of a mixture of experts, and saves only its arguments for the backward.

    The attention of the layer, which hands the batch's plan to the router, does not run again: the plan is an argument.
    """

    def __init__(self, forward: Callable[..., Any], router: ReplayedRouter) -> None:
        self.original, self.router = forward, router

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module."""
        return checkpoint(self._run, self.router.plan, *args, **kwargs)

    def _run(self, plan: BatchPlan | None, *args: Any, **kwargs: Any) -> Any:
        self.router.plan = plan
        return self.original(*args, **kwargs)


def find_mlps(backbone: nn.Module) -> list[nn.Module]:
    """Return the dense MLPs of a text backbone, without routed experts."""
    return [
        module
        for module in backbone.modules()
        if type(module).__name__.endswith("MLP") and isinstance(getattr(module, "down_proj", None), nn.Module)
    ]


def save_memory(
    model: nn.Module,
    backbone: nn.Module,
    replayed: Mapping[int, ReplayedRouter],
    tiled_mlp: int | None,
    recompute: Recompute,
    offload: bool,
) -> Iterator[tuple[nn.Module, Callable[..., Any], str]]:
    """Yield modules with the `forward` that saves memory, as `parallel_layers.memory.savings.memory_savings` does.

    Raises:
        ValueError: Tiles of a model without dense MLPs, or recomputation of layers that do not exist.
    """
    if tiled_mlp is None and recompute is None and not offload:
        return
    layers, mlps = decoder_layers(backbone), find_mlps(backbone)
    require_recompute(recompute, len(layers))
    if tiled_mlp is not None and not mlps:
        raise ValueError(f"tiled_mlp={tiled_mlp}: {type(model).__name__} has no dense MLP; pass tiled_mlp=None")

    def recomputed(submodule: nn.Module, number: int) -> Callable[..., Any]:
        if submodule is layers[number] or number not in replayed:
            return recompute_call(submodule, number)
        return RecomputedMLP(submodule.forward, replayed[number]).forward

    numbered = dict(enumerate(layers))
    yield from memory_savings(
        numbered, mlps=mlps, tiled_mlp=tiled_mlp, recompute=recompute, offload=offload, recomputed=recomputed
    )
