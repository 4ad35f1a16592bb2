"""The weights that a rank holds, by their names in the layout, their optimizer state, and their division by FSDP2."""

import math
from collections.abc import Collection, Mapping, Sequence

import ckpt
from ckpt.transfer import float8_sides
from parallel_models.optimizers import STORAGES, is_hidden_matrix
from rl_models import OptimizerOptions


def held_weights(layout: ckpt.Layout, chunks: Sequence[ckpt.Place]) -> dict[str, int]:
    """Return the number of elements of every local tensor of a rank's chunks; a shared tensor counts once."""
    return {
        name: math.prod(block.shape)
        for chunk in chunks
        for name, block in layout.at(chunk).items()
        if layout.canonical[block.names[0]].copy_of is None
    }


def wide_weights(layout: ckpt.Layout, chunks: Sequence[ckpt.Place]) -> set[str]:
    """Return the local tensors that stay fp32 in a model of any dtype, such as ERNIE 4.5's routers."""
    return {
        name
        for chunk in chunks
        for name, block in layout.at(chunk).items()
        if all(layout.canonical[source].keep_dtype for source in block.names)
    }


def weight_bytes(
    layout: ckpt.Layout,
    chunks: Sequence[ckpt.Place],
    sizes: Mapping[str, int],
    size: int,
    wide: Collection[str],
    base_format: str | None,
) -> dict[str, int]:
    """Return the bytes of each local tensor.

    Elements have `size` bytes, and 4 bytes in the `wide` tensors. With `base_format="fp8"` projections have a byte an
    element, and an fp32 scale for each block.
    """
    bytes_of_tensor = {name: numel * (4 if name in wide else size) for name, numel in sizes.items()}
    for name, sides in float8_sides(layout, chunks).items() if base_format == "fp8" else ():
        bytes_of_tensor[name] = sizes[name] + 4 * (sizes[name] // math.prod(sides))
    return bytes_of_tensor


def learning(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the weights that learn; multi-token-prediction layers are frozen."""
    return {name: numel for name, numel in sizes.items() if not name.startswith("mtp.")}


def hidden_matrices(layout: ckpt.Layout, chunks: Sequence[ckpt.Place]) -> dict[str, int]:
    """Return the local tensors that consist of weight matrices of layers: name -> elements of the largest matrix."""
    largest_matrices = {}
    for name, block in ((name, block) for chunk in chunks for name, block in layout.at(chunk).items()):
        shapes = {source: layout.canonical[source].shape for source in block.names}
        if all(is_hidden_matrix(source, shape) for source, shape in shapes.items()):
            largest_matrices[name] = max(shape[-1] * shape[-2] for shape in shapes.values())
    return largest_matrices


def state_bytes(
    learned: Mapping[str, int], matrices: Mapping[str, int], options: OptimizerOptions, masters: Collection[str]
) -> dict[str, int]:
    """Return the bytes of the moments and of the master weight of each tensor that learns.

    `matrices` come from `hidden_matrices`; `masters` are the tensors with an fp32 master weight.
    """
    moment = STORAGES[options.moments].bytes_per_element
    muon = matrices if options.algorithm == "muon" else {}
    return {
        name: int(((1 if name in muon else 2) * moment + 4 * (name in masters)) * numel)
        for name, numel in learned.items()
    }


def divided_over(sizes: Mapping[str, int], data: int, copies: int) -> int:
    """Return a rank's elements where `data` ranks divide the dense layers, and `copies` ranks the experts."""
    experts = sum(numel for name, numel in sizes.items() if ".experts." in name) if copies != data else 0
    return -(-(sum(sizes.values()) - experts) // data) + -(-experts // copies)
