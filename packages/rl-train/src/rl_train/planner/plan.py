"""Plan the memory of every rank of a grid of the native backend, from a config alone, and check the checkpoint.

Weights are exact: the layout states the part of every tensor that a rank holds. Activations come from
`rl_train.planner.layer`.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

import ckpt
from ckpt.files.dtypes import config_dtype
from ckpt.layout.config import PREDICTION_LAYERS
from ckpt.layout.families import Role
from ckpt.transfer.sources import open_source
from parallel_layers import ParallelDims
from parallel_layers.memory.recompute import Recompute, require_recompute
from parallel_layers.model import ModelConfig
from rl_models.engines import OUTPUTS, EngineOptions, PipelineOptions
from rl_models.engines.adapters import describe
from rl_models.engines.checkpoint import checkpoint_folder
from rl_models.engines.decoding import CacheOptions
from rl_models.engines.parallel.load import require_fit, require_predictions
from rl_train.planner.cache import cache_bytes
from rl_train.planner.layer import Division, Savings, layer_bytes
from rl_train.planner.pipeline import in_flight
from rl_train.planner.weights import divided_over, held_weights, learning

GIB = 2**30
# Elements of a tile of logits (`parallel_layers.head.chunked`), by device type.
LOGITS_TILE = {"cpu": 1 << 21, "cuda": 1 << 25}
# Bytes of a parameter: the fp32 moments of AdamW, and the fp32 master weight of a 16-bit parameter.
MOMENTS, MASTER = 8, 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one model on one rank.

    Attributes:
        weights: Bytes of this rank's weights.
        optimizer: Moments and fp32 master weights.
        gradients: Gradients of all weights between micro-batches, and the largest gradient as it arrives. FSDP2
            shards them only after the last micro-batch.
        gathered: Weights that FSDP2 gathers at once: embedding, head and two layers; in a pipeline the whole model.
        activations: Saved by the forward for the backward.
        layer: Needed in addition while one layer runs (backward, if the model is trained).
        logits: A tile of the head, and the fp32 copy of the hidden states; the larger head counts.
        masks: Sampling masks of the batch, and their copies in its micro-batches.
        cache: Keys and values while responses are drawn, with nothing of the update beside them.
        generation: Needed in addition then: all weights gathered, and a prompt's layer or a step's fp32 logits.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    layer: int = 0
    logits: int = 0
    masks: int = 0
    cache: int = 0
    generation: int = 0

    @property
    def resting(self) -> int:
        """Return the bytes held between two calls."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """Return the bytes at the peak: of an update, whose head ends before a layer runs backward, or of a draw."""
        update = self.gradients + self.gathered + self.activations + self.masks + max(self.layer, self.logits)
        return self.resting + max(update, self.cache + self.generation)


@dataclass(frozen=True)
class MemoryOptions:
    """The training step to plan for.

    Attributes:
        dims: The grid.
        tokens: Number of tokens in a micro-batch.
        dtype: The dtype of the weights; None: the dtype of the config.
        recompute, tiled_mlp, offload_activations: See `Actor.from_pretrained`.
        pipeline: The schedule, the virtual stages and the split of the layers.
        micro_batches: Number of micro-batches in an update, for a pipeline; None: two for each stage.
        device: "cuda" or "cpu", which decides the size of the head's tiles.
        cache: The cache of an actor that generates; None: the actor does not.
        mask_width: `top_k` of the batch's sampling masks; 0: the batch has none.
    """

    dims: ParallelDims
    tokens: int
    dtype: torch.dtype | None = None
    recompute: Recompute = None
    tiled_mlp: int | None = None
    offload_activations: bool = False
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    micro_batches: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    cache: CacheOptions | None = None
    mask_width: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_batches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    @property
    def received(self) -> int:
        """Return the number of micro-batches in an update."""
        return 2 * self.dims.pp if self.micro_batches is None else self.micro_batches


def plan_memory(config: Mapping[str, Any] | Path, options: MemoryOptions, *, role: Role, trained: bool) -> list[Memory]:
    """Return the memory of one model for each pipeline stage, on the fullest rank of the stage.

    Args:
        config: The config of the model, or its folder, whose files show the tensors of a vision tower.
        options: The grid and the tokens.
        role: A key of `rl_models.engines.OUTPUTS`.
        trained: False for a reference model, which has no gradients, optimizer state or saved activations.

    Raises:
        ValueError: The family is unknown, or the grid does not divide the model.
    """
    dims, pipeline = options.dims, options.pipeline
    pipeline.require_pipeline(dims.pp)
    model = ModelConfig.from_hf(config)
    if dims.ep > 1 and not any(model.moe):
        raise ValueError(f"ep={dims.ep} is for a mixture of experts, which {model.family} is not; leave it out")
    require_recompute(options.recompute, model.num_layers)
    shown = isinstance(config, Path) and "vision_config" in model.hf and any(config.glob("*.safetensors"))
    layout = ckpt.layout_for(config if shown else model.hf, target="parallel", role=role, layers=pipeline.split)
    if layout.may_predict:
        layout = replace(layout, prediction_layers=model.hf[PREDICTION_LAYERS])
    caches = [0] * dims.pp
    if options.cache is not None:
        grid = ckpt.Place(pp=(0, dims.pp), vpp=(0, pipeline.virtual_stages)).grid
        of_chunks = layout.chunk_layers(grid)
        of_stages = [
            [model.layer(n) for numbers in of_chunks[stage :: dims.pp] for n in numbers] for stage in range(dims.pp)
        ]
        caches = cache_bytes(of_stages, dims.tp, options.dtype or config_dtype(layout.text), options.cache)
    # See `rl_models.grid.Grid.expert_tensor_parallel`.
    divided_experts = dims.dp * dims.cp % dims.ep == 0
    stages = []
    for stage in range(dims.pp):
        of_stage = []
        for tensor, expert in itertools.product(range(dims.tp), range(dims.ep)):
            place = ckpt.Place(
                tp=(tensor, dims.tp), pp=(stage, dims.pp), ep=(expert, dims.ep), etp=None if divided_experts else (0, 1)
            )
            chunks = [replace(place, vpp=(n, pipeline.virtual_stages)) for n in range(pipeline.virtual_stages)]
            of_stage.append(_on_rank(layout, model, chunks, options, trained, caches[stage]))
        stages.append(max(of_stage, key=lambda memory: memory.total))
    return stages


def _on_rank(
    layout: ckpt.Layout,
    model: ModelConfig,
    chunks: Sequence[ckpt.Place],
    options: MemoryOptions,
    trained: bool,
    cache: int,
) -> Memory:
    dims, place = options.dims, chunks[0]
    dtype = options.dtype or config_dtype(layout.text)
    size, low = dtype.itemsize, dtype in (torch.bfloat16, torch.float16)
    sizes = held_weights(layout, chunks)
    learned, held = learning(sizes), sum(sizes.values())
    # Number of ranks that hold the same dense layers, and the same experts.
    data = dims.dp * dims.cp
    copies = data * (1 if place.etp is None else dims.tp) // dims.ep
    own, trainable = divided_over(sizes, data, copies), divided_over(learned, data, copies)
    divided = max(data, copies) > 1

    division = Division(dims.tp, place.expert_tp[1], size)
    tokens = -(-options.tokens // dims.cp)
    per_layer = [layer_bytes(model.layer(number), division) for number in range(model.num_layers)]
    numbers = [layout.chunk_layers(place.grid)[chunk.chunk] for chunk in chunks]
    last = place.pp[0] == dims.pp - 1
    hidden = model.decoder.hidden_size
    outputs = OUTPUTS[layout.role] if last else ()
    # The heads compute in fp32, one after the other.
    logits = 4 * tokens * hidden * ("values" in outputs)
    if "log_probs" in outputs:
        vocab = -(-model.vocab_size // dims.tp)
        tile = min(tokens * vocab, max(vocab, LOGITS_TILE[options.device]))
        if width := options.mask_width:
            # fp32: rows of the head for a tile of tokens and their gradients, and rows for the next tile with a 16-bit
            # copy; gradients of the hidden states and of a 16-bit head; for each kept token its row and four numbers.
            total = tokens * width * hidden
            rows = min(total, max(width * hidden, LOGITS_TILE[options.device]))
            tile = 2 * rows + (2 + low) * min(rows, total - rows) // 2
            tile += tokens * (hidden + 6 * width) + low * vocab * hidden
        logits = max(logits, 4 * (tile + low * tokens * hidden))
    # int32 ids: in the batch, in its parts, and shifted to the tokens before.
    masks = 3 * 4 * options.mask_width * options.tokens * options.received

    gathered = 0
    if divided:
        layers: Counter[str] = Counter()
        for name, numel in sizes.items():
            if match := re.match(r"(?:model|mtp)\.layers\.(\d+)\.", name):
                layers[match[1]] += numel
        two_layers = held - layers.total() + 2 * max(layers.values(), default=0)
        gathered = size * (held if dims.pp > 1 else min(held, two_layers))
    savings = Savings(options.recompute, options.tiled_mlp or 1) if trained else Savings()
    saved = [[per_layer[number].saved(number, savings) for number in chunk] for chunk in numbers]
    # When a layer runs backward, the layers after it have freed their activations; offloaded, two layers have some.
    layer = tokens * max(
        per_layer[number].working(number, savings)
        - (0 if options.offload_activations else sum(of_chunk[place_in_chunk + 1 :]))
        for chunk, of_chunk in zip(numbers, saved, strict=True)
        for place_in_chunk, number in enumerate(chunk)
    )
    if not trained:
        return Memory(size * own, gathered=gathered, layer=layer, logits=logits, masks=masks)
    ends = division.hidden_norm(model.decoder)
    activations = 0
    for count, of_chunk in zip(in_flight(place.pp, len(chunks)), saved, strict=True):
        # Offloaded, the tensors of two layers are on the device.
        here = sum(sorted(of_chunk)[-2:]) if options.offload_activations else count * sum(of_chunk)
        activations += count * ends + here
    # torch's pipeline stages keep a receive buffer for each micro-batch and each neighbour.
    whole = dims.pp * len(chunks)
    neighbours = sum((chunk.chunk > 0) + (chunk.chunk < whole - 1) for chunk in chunks)
    activations += options.received * neighbours * size * division.hidden(model.decoder)
    generation = 0
    if options.cache is not None:
        prefill = tokens * max(per_layer[number].backward for chunk in numbers for number in chunk)
        generation = size * held * divided + max(prefill, 4 * options.cache.sequences * model.vocab_size)
    return Memory(
        weights=size * own,
        optimizer=(MOMENTS + MASTER * low) * trainable,
        gradients=(4 if low else size) * (sum(learned.values()) if divided else trainable) + size * max(sizes.values()),
        gathered=gathered,
        activations=tokens * activations,
        layer=layer,
        logits=logits,
        masks=masks,
        cache=cache,
        generation=generation,
    )


def check_native_model(
    path: Path,
    role: Role,
    dims: ParallelDims,
    options: EngineOptions,
    max_tokens: int,
    cache: CacheOptions | None = None,
) -> list[Memory]:
    """Refuse a checkpoint that the ranks of the native backend would refuse; only headers are read.

    Returns:
        The planned memory of each pipeline stage, of a model that generates if a cache is given.

    Raises:
        ValueError: The folder, the config, an option, the grid, the cache or a file of the checkpoint is wrong.
    """
    folder = checkpoint_folder(path)
    config = ModelConfig.from_hf(folder)
    require_fit(config, dims, options)
    memory = MemoryOptions(
        dims,
        max_tokens,
        options.dtype,
        options.recompute,
        options.tiled_mlp,
        options.offload_activations,
        options.pipeline,
        cache=cache,
    )
    planned = plan_memory(Path(folder), memory, role=role, trained=True)
    layout = ckpt.layout_for(folder, target="parallel", role=role)
    require_predictions(layout, options)
    open_source(folder, layout)
    if options.lora is not None:
        describe(options.lora, layout, str(folder))  # refuses targets that match nothing
    return planned


@dataclass(frozen=True)
class Planned:
    """The planned memory of an actor and of the other models on the same devices, of each model on each stage.

    With `offload` one model is on the devices at a time.
    """

    options: MemoryOptions
    models: Mapping[str, list[Memory]]
    offload: bool = False

    @property
    def peak(self) -> int:
        """Return the bytes of the fullest rank: all resting models, plus the working memory of one model."""
        return max(self._peak(stage) for stage in range(self.options.dims.pp))

    def _peak(self, stage: int) -> int:
        models = [memory[stage] for memory in self.models.values()]
        resting = 0 if self.offload else sum(memory.resting for memory in models)
        return max(memory.total if self.offload else resting + memory.total - memory.resting for memory in models)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, in bytes."""
        dims = self.options.dims
        return {
            "dims": dims_text(dims),
            "ranks": dims.world_size,
            "tokens": self.options.tokens,
            "offload": self.offload,
            "peak": self.peak,
            "models": {
                name: [
                    {entry.name: getattr(memory, entry.name) for entry in fields(memory)} | {"total": memory.total}
                    for memory in stages
                ]
                for name, stages in self.models.items()
            },
        }


def plan_models(
    model: Path,
    options: MemoryOptions,
    *,
    critic: bool,
    reference: bool,
    share_backbone: bool = False,
    offload: bool = False,
) -> Planned:
    """Plan an actor, and on request a critic and a reference of the same size; see `plan_memory`.

    With `share_backbone`, actor and critic are one model, an `ActorCritic`.
    """
    if critic and share_backbone:
        raise ValueError(
            "critic (a separate model) and share_backbone (a head on the actor's layers) exclude each other; "
            "leave one of them out"
        )
    trained: dict[str, Role] = {"actor": "causal_lm"}
    if critic:
        trained["critic"] = "value"
    if share_backbone:
        trained = {"actor_critic": "causal_lm_with_value"}
    without = replace(options, cache=None)
    models = {
        name: plan_memory(model, without if role == "value" else options, role=role, trained=True)
        for name, role in trained.items()
    }
    if reference:
        models["reference"] = plan_memory(model, without, role="causal_lm", trained=False)
    return Planned(options, models, offload)


def fitting(model: Path, options: MemoryOptions, limit: int, **models: bool) -> list[Planned]:
    """Return the grids with the fewest ranks, up to 1024, whose peak is at most `limit` bytes; least traffic first."""
    expert_sizes = (1, 2, 4, 8, 16, 32, 64) if any(ModelConfig.from_hf(model).moe) else (1,)
    for ranks in (2**power for power in range(11)):
        found = []
        for tp, pp, ep in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), expert_sizes):
            if ranks % (tp * pp):
                continue
            try:
                dims = ParallelDims(dp=ranks // (tp * pp), tp=tp, pp=pp, ep=ep)
                planned = plan_models(model, replace(options, dims=dims), **models)
            except ValueError:
                continue  # heads, layers or experts do not divide
            if planned.peak <= limit:
                found.append(planned)
        if found:
            return sorted(found, key=operator.attrgetter("options.dims.pp", "options.dims.tp", "options.dims.ep"))
    return []


def dims_text(dims: ParallelDims) -> str:
    """Return the grid as text that `ParallelDims.parse` reads."""
    sizes = {name: getattr(dims, name) for name in ("dp", "pp", "cp", "tp", "ep")}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name on the command line."""
    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype={name!r} must be float32 or bfloat16")
    return known[name]
