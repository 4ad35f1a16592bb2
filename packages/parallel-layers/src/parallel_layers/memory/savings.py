"""Replace the `forward` of layers and MLPs to save memory: MLPs in tiles, recomputation, activation offload."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import nn

from parallel_layers.memory.activations import ActivationOffload, OffloadedLayer
from parallel_layers.memory.recompute import recompute_call, recomputed_part
from parallel_layers.memory.tiles import tile_call
from parallel_layers.model.options import Recompute

Forward = Callable[..., Any]


def memory_savings(
    layers: Mapping[int, nn.Module],
    *,
    mlps: Collection[nn.Module] = (),
    tiled_mlp: int | None = None,
    recompute: Recompute = None,
    offload: bool = False,
    first_layers: Collection[int] = (0,),
    recomputed: Callable[[nn.Module, int], Forward] = recompute_call,
    tiled: Callable[[nn.Module, int], Forward] = tile_call,
) -> Iterator[tuple[nn.Module, Forward, str]]:
    """Yield (module, new `forward`, description), innermost wrapper first.

    The caller sets each `forward` before it asks for the next, which wraps it. Set on the module itself, a `forward`
    runs inside the module's hooks, so that FSDP2 gathers the parameters once for both runs of a recomputation.

    Args:
        layers: The decoder layers, by number.
        mlps: The dense MLPs.
        tiled_mlp: The number of tiles of each MLP, see `TiledMLP`.
        recompute: What to compute again; "selective" leaves out MLPs in tiles, which are recomputed tile by tile.
        offload: Keep what layers save in host memory, see `ActivationOffload`.
        first_layers: The layers that begin a forward (the first of each pipeline chunk).
        recomputed: Returns the recomputed `forward` of a layer or of its MLP, given the layer's number.
        tiled: Returns the `forward` of an MLP in a number of tiles.
    """
    in_tiles = list(mlps) if tiled_mlp is not None else []
    for mlp in in_tiles:
        yield mlp, tiled(mlp, tiled_mlp or 1), f"MLP in {tiled_mlp} tiles of tokens"
    for number, layer in layers.items():
        submodule = recomputed_part(layer, number, recompute)
        if submodule is not None and submodule not in in_tiles:
            yield submodule, recomputed(submodule, number), "recomputed in the backward"
    activations = ActivationOffload()
    for number, layer in layers.items() if offload else ():
        forward = OffloadedLayer(layer, layer.forward, activations, first=number in first_layers).forward
        yield layer, forward, "activations in host memory"
