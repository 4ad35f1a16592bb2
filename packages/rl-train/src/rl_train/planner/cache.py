"""Plan the memory of keys and values while responses are drawn."""

from __future__ import annotations

from parallel_layers import DecoderConfig
from parallel_layers.attention import CacheShape
from parallel_layers.inference import PagedKVCache
from parallel_models import CacheOptions
from parallel_models.model import cache_entries
from rl_train.planner.measure import ModelRun


def cache_bytes(run: ModelRun, options: CacheOptions) -> list[int]:
    """Return the bytes of the cache on a rank of each pipeline stage, for its layers.

    Raises:
        ValueError: The memory does not suffice for one sequence.
    """
    dims, chunks = run.options.dims, run.layout.chunk_layers(run.chunks(0)[0].grid)
    samples = []
    for stage in range(dims.pp):
        layers = [run.model.layer(number) for chunk in chunks[stage :: dims.pp] for number in chunk]
        shapes = [_shape(layers[number], dims.tp) for number in cache_entries(layers)[1]]
        samples.append(PagedKVCache(shapes, 1, 1, num_blocks=1, dtype=run.dtype, device="meta"))
    fullest = max(samples, key=lambda sample: sample.block_bytes)
    blocks = options.fitting_blocks(fullest.block_size, fullest.block_bytes, options.limit)
    options.require_room(blocks, fullest.block_size, fullest.block_bytes, options.limit)
    # One more block takes padding.
    return [(blocks + 1) * sample.block_bytes for sample in samples]


def _shape(config: DecoderConfig, tp: int) -> CacheShape:
    """Return the entry of a token in the cache of a layer, on a rank."""
    if (sizes := config.latent) is not None:
        return CacheShape(1, sizes.kv_lora_rank + sizes.qk_rope_head_dim, sizes.kv_lora_rank, values_in_keys=True)
    assert config.head_dim is not None
    return CacheShape(max(1, config.num_kv_heads // tp), config.head_dim, config.head_dim)
