"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on the layers of a sharded model, with a frozen base.

`add_lora_` gives each chosen weight a `LowRank` submodule, whose factors are divided as the weight is:

    layer              A                    B                    one more collective
    column, QKV, head  whole                the weight's rows    backward: all-reduce of A's gradient
    row                the weight's columns whole                backward: all-reduce of B's gradient
    replicated         whole                whole                sequence parallel: all-reduce of both gradients
    embedding          the vocabulary       whole                backward: all-reduce of B's gradient
    experts            as column and row, of each expert of this rank; with `shared_experts` gate_up's A and down's B
                       are shared by all: backward: all-reduce of the gradient over the expert group

The low-rank term is added before the layer's own communication, which serves both terms. Parts of a fused weight
(q, k, v; gate, up) have separate adapters. Layers with adapters multiply and communicate one after the other, as
with `Execution(overlap="serial")`, for every `overlap`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from torch import nn

from parallel_layers.head.embedding import VocabParallelEmbedding, VocabParallelHead
from parallel_layers.linear.layers import LinearLayer, QKVParallelLinear
from parallel_layers.linear.low_rank import LowRank
from parallel_layers.model.options import LoraOptions
from parallel_layers.module.sharding import Block, Sharding, full_shape, get_sharding, is_dtensor, set_sharding
from parallel_layers.moe.experts import GroupedExperts

# The parts of fused projections, by the name of the layer.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def add_lora_(
    model: nn.Module,
    options: LoraOptions,
    *,
    sources: Mapping[str, Sequence[str]] | None = None,
    chosen: Collection[str] | None = None,
) -> list[str]:
    """Freeze all parameters of a model, and give the chosen layers trainable adapters, in place.

    The initial weights depend on the seed and the adapters' names, not on the grid; the adapters change nothing yet. On
    the meta device call each `LowRank.reset_parameters` after `to_empty`.

    Args:
        model: A model of this package's layers, before `fully_shard`.
        options: See `LoraOptions`.
        sources: The name of a parameter -> the name of each part of it, or one name for a whole fused weight or for its
            first parts, where they differ from the modules' names (fused `qkv_proj` has the parts `q_proj`, `k_proj`
            and `v_proj`).
        chosen: The names of the adapted parts, for a model of which this rank has only some layers (default: the parts
            that `options.targets` match).

    Returns:
        The names of the adapted parts in this model, in its order.

    Raises:
        ValueError: A target matches nothing; an adapter cannot be on this layer; or the model is sharded by FSDP2.
    """
    places = list(_places(model))
    names = {path: tuple((sources or {}).get(path, _names(path, owner))) for path, owner, *_ in places}
    linear = {name for path, owner, *_ in places if isinstance(owner, LinearLayer) for name in names[path]}
    if chosen is None:
        chosen = options.choose([name for group in names.values() for name in group], linear)
    model.requires_grad_(False)
    added: list[str] = []
    for path, owner, weight, slot in places:
        adapted = [name if name in chosen else "" for name in names[path]]
        if any(adapted):
            setattr(owner, slot, _adapter(owner, weight, adapted, options))
            added += filter(None, adapted)
    return added


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Yield adaptable weights: the parameter's name in the model, its owner, its own name, the adapter's name."""
    for path, owner in model.named_modules():
        slots: dict[str, str] = {}
        if isinstance(owner, LinearLayer | VocabParallelEmbedding | VocabParallelHead) and owner.weight is not None:
            slots = {"weight": "lora"}
        elif isinstance(owner, GroupedExperts):
            slots = {name: f"{name}_lora" for name in owner.projections}
        for weight, slot in slots.items():
            yield f"{path}.{weight}" if path else weight, owner, weight, slot


def _names(path: str, owner: nn.Module) -> Sequence[str]:
    """Return the names of a parameter's parts by the names of the modules."""
    if not path.endswith("weight"):
        return (path,)
    outer, _, leaf = path.removesuffix(".weight").rpartition(".")
    part_names = _PARTS.get(leaf, (leaf,))
    if isinstance(owner, QKVParallelLinear):
        part_names = part_names[: len(owner.local_sizes)]
    return [f"{outer}.{name}" if outer else name for name in part_names]


def _adapter(owner: nn.Module, weight: str, names: Sequence[str], options: LoraOptions) -> LowRank:
    """Return a new adapter of a weight, divided as the weight is; a part without a name has none."""
    parameter = owner.get_parameter(weight)
    if is_dtensor(parameter):
        raise ValueError(f"{weight} of {type(owner).__name__} is a DTensor already; add adapters before fully_shard")
    if options.dropout and not isinstance(owner, LinearLayer):
        raise ValueError(
            f"dropout={options.dropout} is for adapters of linear layers, and {', '.join(filter(None, names))} is none "
            "(embedding, head or experts); leave out dropout or this target"
        )
    divided = {sharding.dim: sharding for sharding in get_sharding(owner, weight)}
    local_sizes: Sequence[int]
    full_sizes: Sequence[int]
    rank, shape, full, shared = options.rank, list(parameter.shape), full_shape(owner, weight), ""
    of_A: list[Sharding | None]
    of_B: list[Sharding | None]
    if isinstance(owner, VocabParallelEmbedding):
        parts, fan_in, down, up = [(shape[1], names[0])], 0, [rank, shape[0]], [shape[1], rank]
        of_A, of_B = [_moved(divided.get(0), 1)], []
    elif isinstance(owner, GroupedExperts):
        rows, columns = (2, 1) if owner.input_major else (1, 2)
        parts, fan_in = [(shape[rows], names[0])], full[columns]
        down, up = [shape[0] * rank, shape[columns]], [shape[rows], rank, shape[0]]
        of_A = [_moved(divided.get(0), 0, rank), _moved(divided.get(columns), 1)]
        of_B = [_moved(divided.get(rows), 0), _moved(divided.get(0), 2)]
        shared = ("B" if weight == "down_proj" else "A") * options.shared_experts
        if shared == "A":
            down, of_A = [rank, shape[columns]], of_A[1:]
        elif shared == "B":
            up, of_B = [shape[rows], rank, 1], of_B[:1]
    else:
        local_sizes = owner.local_sizes if isinstance(owner, LinearLayer) else [shape[0]]
        full_sizes = owner.full_sizes if isinstance(owner, LinearLayer) else [full[0]]
        # Fewer names than parts: the first weight of the files has the first parts.
        first = len(full_sizes) - len(names) + 1
        local_sizes, full_sizes = ([sum(sizes[:first]), *sizes[first:]] for sizes in (local_sizes, full_sizes))
        parts, fan_in = list(zip(local_sizes, names, strict=True)), full[1]
        down = [rank * sum(map(bool, names)), shape[1]]
        up = [sum(rows for rows, name in parts if name), rank]
        of_A, of_B = [_moved(divided.get(1), 1)], [_rows_of(divided.get(0), local_sizes, full_sizes, names)]
    lora = LowRank(
        down, up, rank=rank, scaling=options.scaling, parts=parts, fan_in=fan_in, seed=options.seed,
        dropout=options.dropout, shared=shared, dtype=parameter.dtype, device=parameter.device,
    )  # fmt: skip
    set_sharding(lora, "A", *of_A)
    set_sharding(lora, "B", *of_B)
    lora.reset_parameters()
    return lora.train(owner.training)


def _moved(sharding: Sharding | None, dim: int, unit: int = 1) -> Sharding | None:
    """Return the division for another dim, in which each element becomes `unit` elements."""
    if sharding is None:
        return None
    blocks = tuple(Block(block.start * unit, block.stop * unit, block.counted) for block in sharding.blocks)
    return Sharding(sharding.group, dim, sharding.full_size * unit, blocks)


def _rows_of(
    sharding: Sharding | None, local: Sequence[int], full_sizes: Sequence[int], names: Sequence[str]
) -> Sharding | None:
    """Return the division of the rows of the parts with names, which follow each other without the other parts."""
    if sharding is None:
        return None
    ends, blocks = list(accumulate(local)), []
    for offset, block in sharding.local_ranges():
        section = next(number for number, end in enumerate(ends) if offset < end)
        if names[section]:
            left_out = sum(rows for rows, name in zip(full_sizes[:section], names[:section], strict=True) if not name)
            blocks.append(Block(block.start - left_out, block.stop - left_out, block.counted))
    full = sum(rows for rows, name in zip(full_sizes, names, strict=True) if name)
    return Sharding(sharding.group, 0, full, tuple(blocks))
