"""Plan the memory of every rank of a native grid from a config alone, and check the checkpoint.

Weights are exact: the layout states the part of every tensor that a rank holds. Activations come from
`rl_train.planner.measure`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ckpt
from ckpt import Checkpoint, Role
from ckpt.transfer import open_source
from parallel_layers import DecoderConfig, ModelConfig, ParallelDims
from parallel_layers.attention import CacheShape
from parallel_layers.inference import PagedKVCache
from parallel_layers.linear_attention import StateShape
from parallel_layers.memory import require_recompute
from parallel_models import CacheOptions, EngineOptions, model_config
from parallel_models.engine import checkpoint_folder, describe
from parallel_models.generation import require_drafts
from parallel_models.model import cache_entries
from parallel_models.training import require_fit, require_predictions
from rl_train.planner.measure import ModelRun, measure
from rl_train.planner.memory import Memory, MemoryOptions
from rl_train.planner.rank import on_rank


def plan_memory(
    config: Mapping[str, Any] | Path | Checkpoint, options: MemoryOptions, *, role: Role, trained: bool
) -> list[Memory]:
    """Return the memory of one model for each pipeline stage, on the fullest rank of the stage.

    Args:
        config: The config of the model, or its checkpoint, whose files show the tensors of a vision tower and whether
            there are multi-token-prediction layers.
        options: The grid and the tokens.
        role: A key of `rl_models.backends.OUTPUTS`.
        trained: False for a reference model, which has no gradients, optimizer state or saved activations.

    Raises:
        ValueError: The family is unknown, the grid does not divide the model, or a target of `lora` matches nothing.
    """
    dims, pipeline = options.dims, options.pipeline
    pipeline.require_pipeline(dims.pp)
    checkpoint = Checkpoint(config) if isinstance(config, Path) else None if isinstance(config, Mapping) else config
    model = ModelConfig.from_hf(config) if checkpoint is None else model_config(checkpoint)
    if dims.ep > 1 and not any(model.moe):
        raise ValueError(f"ep={dims.ep} is for a mixture of experts, which {model.family} is not; leave it out")
    require_recompute(options.recompute, model.num_layers)
    has_files = checkpoint is not None and any(checkpoint.path.glob("*.safetensors"))
    described = checkpoint if checkpoint is not None and has_files else model.hf
    layout = ckpt.layout_for(described, target="parallel", role=role, layers=pipeline.split)
    if not has_files and layout.may_predict:
        layout = replace(layout, prediction_layers=layout.predictions)
    lora = None
    if options.lora is not None and trained:
        adapters = describe(options.lora, layout, "" if checkpoint is None else str(checkpoint))
        lora = adapters.options, adapters.layout
    run = ModelRun(layout, model, lora, options, trained)
    caches = [0] * dims.pp if options.cache is None else _cache_bytes(run, options.cache)
    stages = []
    for stage in range(dims.pp):
        parts = [measure(run, chunk) for chunk in run.chunks(stage)]
        ranks = itertools.product(range(dims.tp), range(dims.ep))
        memory_of_ranks = [on_rank(run, run.chunks(stage, *rank), parts, caches[stage]) for rank in ranks]
        stages.append(max(memory_of_ranks, key=lambda memory: memory.total))
    return stages


def _cache_bytes(run: ModelRun, options: CacheOptions) -> list[int]:
    """Return the bytes of the cache on a rank of each pipeline stage, for its layers."""
    dims, layout = run.options.dims, run.layout
    chunks = layout.chunk_layers(run.chunks(0)[0].grid)
    require_drafts(options.drafts, layout.prediction_layers, dims.pp, images=bool(layout.family.tower))
    samples = []
    for stage in range(dims.pp):
        layers = [run.model.layer(number) for chunk in chunks[stage :: dims.pp] for number in chunk]
        layers = [layers[number] for number in cache_entries(layers)[1]]
        if options.drafts:  # on the only stage
            layers += [run.model.layer(run.model.num_layers - 1)] * layout.prediction_layers
        shapes = [_shape(layer, dims.tp) for layer in layers]
        how: dict[str, Any] = {"dtype": run.dtype, "device": "meta", "float8": options.float8_cache}
        samples.append(PagedKVCache(shapes, 1, 1, num_blocks=1, **how))
    return options.bytes_of_stages(samples)


def _shape(config: DecoderConfig, tp: int) -> CacheShape | StateShape:
    """Return the entry of a layer in a cache, on a rank: that of `DecoderLayer.cache_shape`."""
    if config.mixer == "mlp":
        return CacheShape(0, 0, 0)
    if config.linear_attention is not None:
        return config.linear_attention.state_shape(tp)
    if (sizes := config.latent) is not None:
        return CacheShape(1, sizes.kv_lora_rank + sizes.qk_rope_head_dim, sizes.kv_lora_rank, values_in_keys=True)
    assert config.head_dim is not None
    return CacheShape(max(1, config.num_kv_heads // tp), config.head_dim, config.head_dim)


def check_native_model(
    checkpoint: Checkpoint,
    role: Role,
    dims: ParallelDims,
    options: EngineOptions,
    max_tokens: int,
    cache: CacheOptions | None = None,
) -> list[Memory]:
    """Refuse a checkpoint that the ranks of the native backend would refuse; only headers are read.

    Returns:
        The planned memory of each pipeline stage; with a cache, of a model that generates.

    Raises:
        ValueError: The folder, the config, an option, the grid, the cache or a file of the checkpoint is wrong.
    """
    checkpoint_folder(checkpoint.path)
    config = model_config(checkpoint)
    require_fit(config, dims, options)
    of_engine = {entry.name: getattr(options, entry.name) for entry in fields(EngineOptions)}
    memory = MemoryOptions(**of_engine, dims=dims, tokens=max_tokens, cache=cache)
    planned = plan_memory(checkpoint, memory, role=role, trained=True)
    layout = ckpt.layout_for(checkpoint, target="parallel", role=role)
    require_predictions(layout, options)
    open_source(checkpoint, layout)
    return planned
