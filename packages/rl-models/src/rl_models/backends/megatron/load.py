"""Loading a checkpoint onto Megatron-Core's GPTModel or HybridModel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

import ckpt
from ckpt import Checkpoint, agree
from ckpt.layout import Target, adaptable, classifies_sequences
from megatron_utils import MegatronGrid, megatron_grid
from megatron_utils.gpt import (
    PackedGPTModel,
    Part,
    add_lora_,
    build_gpt,
    require_expressible,
    require_multiples,
    save_memory,
)
from megatron_utils.hybrid import build_hybrid, describe_hybrid
from parallel_layers.linear import require_float8
from parallel_models import Adapters, Grid, Role, model_config
from parallel_models.engine import (
    Lora,
    carry,
    describe,
    load_heads,
    require_base,
    require_linears,
    share_base_,
    stored_dtype,
)
from rl_models.backends.megatron.engine import (
    ChunkedLayout,
    MegatronEngine,
    check_device,
    local_name,
    places_of,
    stored_tensors,
)
from rl_models.backends.megatron.optimizer import PRECISIONS
from rl_models.backends.options import FLOAT8, BackendOptions

# Forms of context parallelism -> their names in Megatron-Core.
CONTEXT_PARALLEL = {"ring": "p2p", "ulysses": "a2a", "heads": "a2a"}
# Kinds of layers -> their targets in ckpt.
TARGETS: dict[str, Target] = {"local": "megatron", "transformer_engine": "megatron_te"}


def load(
    checkpoint: Checkpoint, role: Role, grid: Grid, options: BackendOptions, base: MegatronEngine | None = None
) -> MegatronEngine:
    """Load a checkpoint; each rank reads only its own slices, and refusals are the same on every rank.

    With `base` only the adapters and a value head are new, and the other tensors belong to `base`.
    """
    _require_grid(grid, options)
    agree(lambda: _require_model(checkpoint, grid, options), grid.everyone)
    virtual_stages = options.pipeline.virtual_stages
    ranks = [dist.get_rank()] if grid.mesh is None else sorted(grid.mesh.mesh.flatten().tolist())
    enter = partial(
        megatron_grid, grid.dims, ranks=ranks, virtual_stages=virtual_stages if virtual_stages > 1 else None
    )
    with enter() as megatron:
        built = agree(lambda: _build(checkpoint, role, grid, options, megatron, base), grid.everyone)
    chunks, layout, places = built.chunks, built.layout, built.places
    if places[0].chunk == 0:
        carry(chunks[0], layout, checkpoint, grid.device)
    if base is None:
        for chunk, place in zip(chunks, places, strict=True):
            targets = {name: tensor.detach() for name, tensor in stored_tensors(chunk, place, layout).items()}
            ckpt.load_hf(checkpoint, layout, place, into=targets, group=grid.everyone)
    engine = MegatronEngine(
        chunks, layout, places, grid, enter, options.megatron, None if built.adapters is None else built.adapters.layout
    )
    if base is not None:
        load_heads(checkpoint, layout, places, engine.shards().parameters, grid)
        share_base_(engine.module, base.module)
    if built.adapters is not None and built.adapters.files is not None:
        shards = engine.adapters()
        assert shards is not None
        factors = [{name: tensor.detach() for name, tensor in tensors.items()} for _, tensors in shards.chunks]
        ckpt.load_adapter(built.adapters.files, built.adapters.layout, places, into=factors, group=grid.everyone)
    return engine


def _require_grid(grid: Grid, options: BackendOptions) -> None:
    """Raise ValueError if the backend does not offer a grid or a combination of options."""
    check_device(grid.device)
    if not dist.is_initialized():
        raise ValueError(
            "backend='megatron' needs a process group, also on one rank; call torch.distributed.init_process_group"
        )
    options.pipeline.require_pipeline(grid.dims.pp)
    if options.pipeline.schedule != "1f1b":
        raise ValueError(
            f"backend='megatron' does not offer schedule={options.pipeline.schedule!r}: Megatron-Core 0.16 has none; "
            "use '1f1b' (interleaved where virtual_stages > 1), or backend='parallel'"
        )
    if options.float8 is not None and options.tiled_mlp is not None:
        raise ValueError(
            f"backend='megatron' does not offer float8={options.float8!r} with tiled_mlp={options.tiled_mlp}: FP8 of "
            "Transformer Engine needs a multiple of 16 tokens or more, which a tile may not have; leave one of them "
            "out, or use backend='parallel'"
        )


def _require_model(checkpoint: Checkpoint, grid: Grid, options: BackendOptions) -> None:
    """Raise ValueError if the backend does not offer a model, its dtype, or an option for this model."""
    if (dtype := options.dtype or stored_dtype(checkpoint)) not in PRECISIONS:
        raise ValueError(f"backend='megatron' does not offer dtype={dtype}; use {', '.join(map(str, PRECISIONS))}")
    model = model_config(checkpoint)
    if model.has_linear_attention:
        describe_hybrid(model, grid.dims.tp)
        _require_hybrid(model.family, options)
    else:
        require_expressible(model)
    if any(model.moe) and grid.dims.tp > 1 and options.sequence_parallel is False:
        raise ValueError(
            f"sequence_parallel=False with tp={grid.dims.tp}: Megatron-Core trains a mixture of experts over tp with "
            "sequence parallelism alone; leave it out, or use backend='parallel'"
        )
    if options.float8 is not None:
        if options.megatron.layers != "transformer_engine":
            raise ValueError(
                f"float8={options.float8!r} on backend='megatron' needs Transformer Engine's layers; add "
                "megatron=MegatronOptions(layers='transformer_engine')"
            )
        require_float8(options.float8)
    if options.tiled_mlp is not None and all(model.moe):
        raise ValueError(f"tiled_mlp={options.tiled_mlp}: {model.family} has no dense MLP; leave it out")


def _require_hybrid(family: str, options: BackendOptions) -> None:
    """Raise ValueError for options that no `HybridModel` offers here."""
    requests = {
        "lora": options.lora is not None,
        "float8": options.float8 is not None,
        "tiled_mlp": options.tiled_mlp is not None,
        "recompute": options.recompute is not None,
        "offload_activations": options.offload_activations,
    }
    if refused := [name for name, is_requested in requests.items() if is_requested]:
        raise ValueError(
            f"backend='megatron' does not offer {', '.join(refused)} on {family}, a model of Megatron-Core's "
            "HybridModel; leave it out, or use backend='parallel'"
        )


class _BuiltModel(NamedTuple):
    """The chunks of this rank without weights, each with its place in the layout, and the adapters."""

    chunks: list[PackedGPTModel]
    layout: ckpt.Layout
    places: list[ckpt.Place]
    adapters: Adapters | None


def _build(
    checkpoint: Checkpoint,
    role: Role,
    grid: Grid,
    options: BackendOptions,
    megatron: MegatronGrid,
    base: MegatronEngine | None,
) -> _BuiltModel:
    """Build this rank's chunks; ValueError for an option that the model does not offer."""
    assert role != "causal_lm_with_value"  # refused by `load_engine`
    model, virtual_stages, split = model_config(checkpoint), options.pipeline.virtual_stages, options.pipeline.split
    places = places_of(megatron, virtual_stages)
    if base is not None:  # by cost, another head might divide the layers in another way
        split = [len(numbers) for numbers in base.layout.chunk_layers(places[0].grid)]
    layout = ckpt.layout_for(
        checkpoint, target=TARGETS[options.megatron.layers], role=role, layers=split, num_labels=options.num_labels
    )
    if virtual_stages > 1:
        layout = ChunkedLayout.of(layout)
    extra: dict[str, Any] = {}
    if grid.dims.pp > 1:
        extra["layers_per_stage"] = [len(numbers) for numbers in layout.chunk_layers(places[0].grid)]
    if grid.dims.cp > 1:
        extra["cp_comm_type"] = CONTEXT_PARALLEL[options.context_parallel]
    if options.float8 is not None:
        extra |= FLOAT8[options.float8]
    build = partial(build_hybrid, model, None) if model.has_linear_attention else partial(build_gpt, model)
    chunks: list[Any] = build(
        megatron,
        role=role,
        dtype=options.dtype or stored_dtype(checkpoint),
        layer_spec=options.megatron.layers,
        value_bias=not classifies_sequences(model.hf),  # a reward model's head has no bias
        num_labels=layout.num_labels,
        sequence_parallel=options.sequence_parallel,
        **extra,
    )
    if options.float8 is not None:
        require_multiples(chunks, options.float8)
    if not model.has_linear_attention:
        save_memory(
            chunks, tiled_mlp=options.tiled_mlp, recompute=options.recompute, offload=options.offload_activations
        )
    adapters = None if options.lora is None else _add_adapters(chunks, options.lora, layout, places, checkpoint)
    if base is not None:
        require_base(nn.ModuleList(chunks), base.module)
    return _BuiltModel(chunks, layout, places, adapters)


def _add_adapters(
    chunks: Sequence[PackedGPTModel],
    lora: Lora,
    layout: ckpt.Layout,
    places: Sequence[ckpt.Place],
    checkpoint: Checkpoint,
) -> Adapters:
    """Freeze the chunks of a model, and give the chosen linears adapters; a value head is trained with them.

    Raises:
        ValueError: A target matches nothing, or is the embedding, the head or an expert.
    """
    native = ckpt.layout_for(checkpoint, target="parallel", role=layout.role, num_labels=layout.num_labels)
    adapters = describe(lora, native, str(checkpoint.path))
    described = adapters.layout
    require_linears("megatron", described, adaptable(native)[1])
    adapter_layout = ckpt.AdapterLayout(native, described.chosen, described.rank, described.settings, placed=layout)
    for chunk, place in zip(chunks, places, strict=True):
        projections = {}
        for local, block in layout.at(place).items():
            if adapted := adapter_layout.adapted(block):
                rows = {
                    name: [piece.local_range[0] for piece in block.pieces if piece.name == name]
                    for name in adapter_layout.fused[block.names[0]]
                }
                projections[local.removeprefix(local_name("", place))] = [
                    Part(adapter_layout.layer(name) if name in adapted else "", ranges) for name, ranges in rows.items()
                ]
        add_lora_(chunk, adapters.options, projections)
        if layout.role == "value" and chunk.post_process:
            chunk.output_layer.requires_grad_(True)
    return adapters._replace(layout=adapter_layout)
