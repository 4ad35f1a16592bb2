"""`rl-train plan`: the memory of every rank of a grid of the native backend, from a config alone.

Weights are exact: the layout says which part of every tensor a place holds. What layers save comes from
`rl_train.planner.layer`.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

import ckpt
from ckpt.layout.families import Role
from ckpt.transfer.memory_plan import config_dtype
from parallel_layers import ParallelDims
from parallel_layers.model import ModelConfig
from rl_models.engines import OUTPUTS, PipelineOptions
from rl_models.models.decoder import Recompute, require_layers
from rl_train.planner.layer import Division, layer_bytes

GIB = 2**30
# Elements of the logits that exist at once (`parallel_layers.head.chunked`), of a CPU and of a GPU.
LOGITS_TILE = {"cpu": 1 << 21, "cuda": 1 << 25}
# Moments of AdamW, in fp32; a master in fp32 for what is stored in less.
MOMENTS, MASTER = 8, 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one model on one rank.

    Attributes:
        weights: Bytes of this rank's weights.
        optimizer: Moments and fp32 masters.
        gradients: Gradients of all weights as kept between micro-batches, and the largest one as it arrives. FSDP2
            divides them after the last micro-batch alone.
        gathered: Weights that FSDP2 gathers at once: the ends of the model, and two layers; in a pipeline all of it.
        activations: What the forward saves for the backward.
        layer: What one layer needs beside it while it runs, backward if it is trained.
        logits: The tile of the head, and the hidden states in fp32 where it makes a copy; of two heads the larger.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    layer: int = 0
    logits: int = 0

    @property
    def resting(self) -> int:
        """Return the bytes held between two calls."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """At the peak of an update: the head is done when the first layer runs backward."""
        return sum(getattr(self, entry.name) for entry in fields(self)) - min(self.layer, self.logits)


@dataclass(frozen=True)
class MemoryOptions:
    """The training step to plan for.

    Attributes:
        dims: The grid.
        tokens: Of a micro-batch.
        dtype: Of the weights; None: as the config says.
        sequence_parallel: Default where tp > 1.
        recompute: What runs again backward, as `Actor.from_pretrained` takes it.
        pipeline: Virtual stages and the split of the layers, as well.
        micro_batches: Of an update, for the pipeline; None: two for each stage.
        device: "cuda" or "cpu": their heads work on tiles of another size.
    """

    dims: ParallelDims
    tokens: int
    dtype: torch.dtype | None = None
    sequence_parallel: bool | None = None
    recompute: Recompute = None
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    micro_batches: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_batches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    @property
    def received(self) -> int:
        """Micro-batches of an update."""
        return 2 * self.dims.pp if self.micro_batches is None else self.micro_batches


def plan_memory(config: Mapping[str, Any] | Path, options: MemoryOptions, *, role: Role, trained: bool) -> list[Memory]:
    """Return the memory of one model for each pipeline stage: that of the stage's fullest rank.

    Args:
        config: Of the model, or its folder.
        options: The grid and the tokens.
        role: A key of `rl_models.engines.OUTPUTS`.
        trained: False for a reference, which has neither gradients nor optimizer and saves nothing.

    Raises:
        ValueError: The family is unknown, or the grid does not divide the model.
    """
    dims, pipeline = options.dims, options.pipeline
    pipeline.require_pipeline(dims.pp)
    model = ModelConfig.from_hf(config)
    if dims.ep > 1 and not any(model.moe):
        raise ValueError(f"ep={dims.ep} is for a mixture of experts, which {model.family} is not; leave it out")
    require_layers(options.recompute, model.num_layers)
    split = "balanced" if pipeline.split is None else list(pipeline.split)
    layout = ckpt.layout_for(model.hf, target="parallel", role=role, layers=split)
    whole = dims.pp * pipeline.virtual_stages
    if model.num_layers < whole:
        raise ValueError(
            f"num_hidden_layers={model.num_layers} is fewer than pp * virtual_stages = {whole}; every chunk needs a "
            f"layer: use pp * virtual_stages up to {model.num_layers}"
        )
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
            of_stage.append(_on_rank(layout, model, chunks, options, trained))
        stages.append(max(of_stage, key=lambda memory: memory.total))
    return stages


def _on_rank(
    layout: ckpt.Layout, model: ModelConfig, chunks: Sequence[ckpt.Place], options: MemoryOptions, trained: bool
) -> Memory:
    dims, place = options.dims, chunks[0]
    dtype = options.dtype or config_dtype(layout.config)
    size, low = dtype.itemsize, dtype in (torch.bfloat16, torch.float16)
    sizes = {name: block.numel for chunk in chunks for name, block in layout.at(chunk).items()}
    held = sum(sizes.values())
    experts = sum(numel for name, numel in sizes.items() if ".experts." in name) if dims.ep > 1 else 0
    # The ranks that hold the same: of the dense layers, and of the experts.
    data = dims.dp * dims.cp
    copies = data * (1 if place.etp is None else dims.tp) // dims.ep
    own = -(-(held - experts) // data) + -(-experts // copies)
    divided = max(data, copies) > 1

    sequence_parallel = dims.tp > 1 and options.sequence_parallel is not False
    division = Division(dims.tp, sequence_parallel, place.expert_tp[1], size)
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
        logits = max(logits, 4 * (tile + low * tokens * hidden))

    gathered = 0
    if divided:
        layers: Counter[str] = Counter()
        for name, numel in sizes.items():
            if match := re.match(r"model\.layers\.(\d+)\.", name):
                layers[match[1]] += numel
        two_layers = held - layers.total() + 2 * max(layers.values(), default=0)
        gathered = size * (held if dims.pp > 1 else min(held, two_layers))
    recompute = options.recompute if trained else None
    saved = [[per_layer[number].saved(number, recompute) for number in chunk] for chunk in numbers]
    # When a layer runs backward, those after it have done so and hold nothing any more.
    layer = tokens * max(
        per_layer[number].working(number, recompute) - sum(of_chunk[place_in_chunk + 1 :])
        for chunk, of_chunk in zip(numbers, saved, strict=True)
        for place_in_chunk, number in enumerate(chunk)
    )
    if not trained:
        return Memory(size * own, gathered=gathered, layer=layer, logits=logits)
    ends = division.norm(division.hidden(model.decoder))
    in_flight = _in_flight(place.pp, len(chunks))
    activations = sum(count * (ends + sum(of_chunk)) for count, of_chunk in zip(in_flight, saved, strict=True))
    # torch's pipeline stages have a buffer for each micro-batch and each neighbour that they receive from.
    whole = dims.pp * len(chunks)
    neighbours = sum((chunk.chunk > 0) + (chunk.chunk < whole - 1) for chunk in chunks)
    activations += options.received * neighbours * size * division.hidden(model.decoder)
    return Memory(
        weights=size * own,
        optimizer=(MOMENTS + MASTER * low) * own,
        gradients=(4 if low else size) * (held if divided else own) + size * max(sizes.values()),
        gathered=gathered,
        activations=tokens * activations,
        layer=layer,
        logits=logits,
    )


def _in_flight(stage: tuple[int, int], virtual_stages: int) -> list[int]:
    """Micro-batches that each chunk of a stage `(rank, size)` has run forward and not yet backward, at most.

    1F1B: as many as stages are left, itself included. Interleaved (arXiv:2104.04473, section 2.2), chunks take turns of
    as many micro-batches as there are stages, and a rank begins as many as would fill its own chunks but one, and two
    for each stage that is left.
    """
    rank, size = stage
    if virtual_stages == 1:
        return [size - rank]
    begun = (virtual_stages - 1) * size + 2 * (size - 1 - rank) + 1
    turns = Counter(n // size % virtual_stages for n in range(begun))
    return [turns[chunk] for chunk in range(virtual_stages)]


@dataclass(frozen=True)
class Planned:
    """An actor with what stands beside it on the same devices.

    Attributes:
        options: What was planned for.
        models: Name -> its memory on each stage.
        offload: Each model is on the host while another works.
    """

    options: MemoryOptions
    models: Mapping[str, list[Memory]]
    offload: bool = False

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most: what rests, and on top of it the model that works."""
        return max(self._peak(stage) for stage in range(self.options.dims.pp))

    def _peak(self, stage: int) -> int:
        models = [memory[stage] for memory in self.models.values()]
        resting = 0 if self.offload else sum(memory.resting for memory in models)
        return max(memory.total if self.offload else resting + memory.total - memory.resting for memory in models)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, in bytes."""
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
    """An actor, and a critic and a reference of the same size where there are some; see `plan_memory`.

    With `share_backbone` actor and critic are one model, an `ActorCritic`.

    Raises:
        ValueError: Two critics are asked for; or as `plan_memory`.
    """
    if critic and share_backbone:
        raise ValueError(
            "critic and share_backbone are two kinds of critic, a model of its own and a head on the actor's layers; "
            "leave one of them out"
        )
    trained: dict[str, Role] = {"actor": "causal_lm"}
    if critic:
        trained["critic"] = "value"
    if share_backbone:
        trained = {"actor_critic": "causal_lm_with_value"}
    models = {name: plan_memory(model, options, role=role, trained=True) for name, role in trained.items()}
    if reference:
        models["reference"] = plan_memory(model, options, role="causal_lm", trained=False)
    return Planned(options, models, offload)


def fitting(
    model: Path, options: MemoryOptions, limit: int, most_ranks: int = 1024, **models: bool
) -> Iterator[Planned]:
    """Return the grids of the fewest ranks whose peak is at most `limit` bytes, those with the least traffic first."""
    expert_sizes = (1, 2, 4, 8, 16, 32, 64) if any(ModelConfig.from_hf(model).moe) else (1,)
    for ranks in (2**power for power in range(most_ranks.bit_length())):
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
            yield from sorted(found, key=operator.attrgetter("options.dims.pp", "options.dims.tp", "options.dims.ep"))
            return


def dims_text(dims: ParallelDims) -> str:
    """Return the grid as text that `ParallelDims.parse` reads."""
    sizes = {name: getattr(dims, name) for name in ("dp", "pp", "cp", "tp", "ep")}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name on the command line.

    Raises:
        ValueError: It is neither float32 nor bfloat16.
    """
    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype={name!r} must be float32 or bfloat16")
    return known[name]
