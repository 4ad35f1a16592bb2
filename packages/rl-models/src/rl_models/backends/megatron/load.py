"""Loading a checkpoint onto Megatron-Core's GPTModel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt import agree
from ckpt.layout import Target, classifies_sequences
from megatron_utils import megatron_grid
from megatron_utils.gpt import PackedGPTModel, build_gpt, require_expressible, save_memory
from parallel_layers import ModelConfig
from parallel_layers.linear import RECIPES, require_float8
from parallel_layers.model import LoraOptions
from parallel_models import Grid, Role
from parallel_models.engine import carry, load_heads, require_base, share_base_, stored_dtype
from rl_models.backends.megatron import adapters as low_rank
from rl_models.backends.megatron.engine import ChunkedLayout, MegatronEngine, check_device, places_of, stored_tensors
from rl_models.backends.megatron.optimizer import PRECISIONS
from rl_models.backends.options import BackendOptions

# Forms of context parallelism -> their names in Megatron-Core.
CONTEXT_PARALLEL = {"ring": "p2p", "ulysses": "a2a"}
# Kinds of layers -> their targets in ckpt.
TARGETS: dict[str, Target] = {"local": "megatron", "transformer_engine": "megatron_te"}
# `BackendOptions.float8` -> fields of Megatron-Core's config: the formats are those of Transformer Engine's recipes.
FLOAT8 = {
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "block": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


def load(
    path: str, role: Role, grid: Grid, options: BackendOptions, base: MegatronEngine | None = None
) -> MegatronEngine:
    """Load a checkpoint; each rank reads only its own slices, and refusals are the same on every rank.

    With `base` only the adapters and a value head are new, and the rest is that engine's.
    """
    assert role != "causal_lm_with_value"  # refused by `load_engine`
    dims, pipeline = grid.dims, options.pipeline
    check_device(grid.device)
    if not dist.is_initialized():
        raise ValueError(
            "backend='megatron' needs a process group, also on one rank; call torch.distributed.init_process_group"
        )
    pipeline.require_pipeline(dims.pp)
    if pipeline.schedule != "1f1b":
        raise ValueError(
            f"backend='megatron' does not offer schedule={pipeline.schedule!r}: Megatron-Core 0.16 has none; use "
            "'1f1b' (interleaved where virtual_stages > 1), or backend='parallel'"
        )
    if options.float8 is not None and options.tiled_mlp is not None:
        raise ValueError(
            f"backend='megatron' does not offer float8={options.float8!r} with tiled_mlp={options.tiled_mlp}: FP8 of "
            "Transformer Engine needs a multiple of 16 tokens or more, which a tile may not have; leave one of them "
            "out, or use backend='parallel'"
        )
    dtype = agree(lambda: _dtype(path, options), grid.everyone)
    virtual_stages = pipeline.virtual_stages if pipeline.virtual_stages > 1 else None
    ranks = [dist.get_rank()] if grid.mesh is None else sorted(grid.mesh.mesh.flatten().tolist())
    enter = partial(megatron_grid, dims, ranks=ranks, virtual_stages=virtual_stages)
    layers = options.megatron.layers
    with enter() as megatron:

        def build() -> tuple[list[PackedGPTModel], ckpt.Layout, list[ckpt.Place], ckpt.AdapterLayout | None]:
            model = ModelConfig.from_hf(path)
            require_expressible(model)
            if any(model.moe) and dims.tp > 1 and options.sequence_parallel is False:
                raise ValueError(
                    f"sequence_parallel=False with tp={dims.tp}: Megatron-Core trains a mixture of experts over tp "
                    "with sequence parallelism alone; leave it out, or use backend='parallel'"
                )
            places = places_of(megatron, pipeline.virtual_stages)
            split = pipeline.split
            if base is not None:  # by cost, another head might divide the layers in another way
                split = [len(numbers) for numbers in base.layout.chunk_layers(places[0].grid)]
            layout = ckpt.layout_for(path, target=TARGETS[layers], role=role, layers=split)
            if virtual_stages:
                layout = ChunkedLayout.of(layout)
            counts = [len(numbers) for numbers in layout.chunk_layers(places[0].grid)]
            extra: dict[str, Any] = {} if dims.pp == 1 else {"layers_per_stage": counts}
            if options.float8 is not None:
                if layers != "transformer_engine":
                    raise ValueError(
                        f"float8={options.float8!r} on backend='megatron' needs Transformer Engine's layers; add "
                        "megatron=MegatronOptions(layers='transformer_engine')"
                    )
                require_float8(options.float8)
                extra |= FLOAT8[options.float8]
            if options.tiled_mlp is not None and all(model.moe):
                raise ValueError(f"tiled_mlp={options.tiled_mlp}: {model.family} has no dense MLP; leave it out")
            if dims.cp > 1:
                extra["cp_comm_type"] = CONTEXT_PARALLEL[options.context_parallel]
            chunks = build_gpt(
                model,
                megatron,
                role=role,
                dtype=dtype,
                layer_spec=layers,
                # A reward model's head has no bias.
                value_bias=not classifies_sequences(model.hf),
                sequence_parallel=options.sequence_parallel,
                **extra,
            )
            if options.float8 is not None:
                require_multiples(chunks, options.float8)
            save_memory(
                chunks,
                tiled_mlp=options.tiled_mlp,
                recompute=options.recompute,
                offload=options.offload_activations,
            )
            if options.lora is None:
                return chunks, layout, places, None
            adapters = low_rank.add(chunks, options.lora, layout, places, path)
            if base is not None:
                require_base(nn.ModuleList(chunks), base.module)
            return chunks, layout, places, adapters

        chunks, layout, places, adapters = agree(build, grid.everyone)
    if places[0].chunk == 0:
        carry(chunks[0], layout, path, grid.device)
    if base is None:
        for chunk, place in zip(chunks, places, strict=True):
            into = {name: tensor.detach() for name, tensor in stored_tensors(chunk, place, layout).items()}
            ckpt.load_hf(path, layout, place, into=into, group=grid.everyone)
    engine = MegatronEngine(chunks, layout, places, grid, enter, path, options.megatron, adapters)
    if base is not None:
        load_heads(path, layout, places, engine.shards().parameters, grid)
        share_base_(engine.module, base.module)
    if adapters is not None and not isinstance(options.lora, LoraOptions):
        found = [stored_tensors(chunk, place, adapters) for chunk, place in zip(chunks, places, strict=True)]
        parts = [{name: tensor.detach() for name, tensor in part.items()} for part in found]
        ckpt.load_adapter(str(options.lora), adapters, places, into=parts, group=grid.everyone)
    return engine


def require_multiples(chunks: Sequence[PackedGPTModel], recipe: str) -> None:
    """Raise ValueError unless all products of the layers can be in FP8."""
    multiple = RECIPES[recipe].multiple
    for name, weight in (each for chunk in chunks for each in chunk.decoder.named_parameters()):
        if weight.dim() == 2 and "router" not in name and any(size % multiple for size in weight.shape):
            raise ValueError(
                f"float8={recipe!r} needs weights whose sizes are multiples of {multiple}, and decoder.{name} of this "
                f"rank has {list(weight.shape)}; use another recipe or tp, or backend='parallel', which leaves such a "
                "weight in its dtype"
            )


def _dtype(path: str, options: BackendOptions) -> torch.dtype:
    dtype = options.dtype or stored_dtype(path)
    if dtype not in PRECISIONS:
        raise ValueError(f"backend='megatron' does not offer dtype={dtype}; use {', '.join(map(str, PRECISIONS))}")
    return dtype
