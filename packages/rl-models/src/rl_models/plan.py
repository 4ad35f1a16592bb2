"""`rl-models plan`: the memory of every rank of a grid, from a config alone.

Weights are exact: the layout says which part of every tensor a place holds. Activations are what torch's own kernels
save for the backward; the fused kernels on a GPU save less. Legend: T tokens of a micro-batch, H hidden, Q and K the
query and key-value heads times their size, I the MLP's width (of the experts that a token visits, all together), V
vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

import ckpt
from ckpt.families import Role
from ckpt.plan import config_dtype
from parallel_layers import ParallelDims

GIB = 2**30
# Elements of the logits that exist at once (`parallel_layers.losses.chunked`), of a CPU and of a GPU.
LOGITS_TILE = {"cpu": 1 << 21, "cuda": 1 << 25}
# Moments of AdamW, in fp32; a master in fp32 for what is stored in less.
MOMENTS, MASTER = 8, 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one model on one rank.

    Attributes:
        weights: this rank's part.
        optimizer: moments and fp32 masters.
        gradients: of all weights, as they are kept between micro-batches, and the largest one as it arrives.
        gathered: what FSDP2 makes whole at once: the ends of the model, and two layers.
        activations: what the forward saves for the backward.
        layer: what one layer needs beside it while it runs, backward if it is trained.
        logits: the tile of the head, and the hidden states in fp32 where the head makes a copy.
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
        """Between two calls."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """At the peak of an update: the head is done when the first layer runs backward."""
        return sum(getattr(self, entry.name) for entry in fields(self)) - min(self.layer, self.logits)


@dataclass(frozen=True)
class MemoryOptions:
    """What to plan for.

    Attributes:
        dims: the grid.
        tokens: of a micro-batch.
        dtype: of the weights; None: as the config says.
        sequence_parallel: default where tp > 1.
        recompute: `recompute="full"`: layers save their input alone and run again backward.
        device: "cuda" or "cpu": their heads work on tiles of another size.
    """

    dims: ParallelDims
    tokens: int
    dtype: torch.dtype | None = None
    sequence_parallel: bool | None = None
    recompute: bool = False
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be at least 1")


def plan_memory(config: Mapping[str, Any] | Path, options: MemoryOptions, *, role: Role, trained: bool) -> list[Memory]:
    """The memory of one model on the ranks of each pipeline stage, the largest of the stage.

    Args:
        config: of the model, or its folder.
        options: the grid and the tokens.
        role: "causal_lm" or "value".
        trained: False for a reference, which has neither gradients nor optimizer and saves nothing.

    Raises:
        ValueError: the family is unknown, or the grid does not divide the model.
    """
    dims = options.dims
    layout = ckpt.layout_for(config, target="parallel", role=role, layers="balanced")
    ep = dims.ep
    stages = []
    for stage in range(dims.pp):
        places = (
            ckpt.Place(tp=(rank, dims.tp), pp=(stage, dims.pp), ep=(expert, ep))
            for rank, expert in itertools.product(range(dims.tp), range(ep))
        )
        of_stage = [_on_place(layout, place, options, trained) for place in places]
        stages.append(max(of_stage, key=lambda memory: memory.total))
    return stages


def _on_place(layout: ckpt.Layout, place: ckpt.Place, options: MemoryOptions, trained: bool) -> Memory:
    dims, text = options.dims, layout.text
    dtype = options.dtype or config_dtype(layout.config)
    size, data = dtype.itemsize, dims.dp * dims.cp
    low = dtype in (torch.bfloat16, torch.float16)
    sizes = {name: block.numel for name, block in layout.at(place).items()}
    layers: dict[str, int] = {}
    for name, numel in sizes.items():
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            layers[match[1]] = layers.get(match[1], 0) + numel
    held = sum(sizes.values())
    own = -(-held // data)
    ends = held - sum(layers.values())
    gathered = 0 if data == 1 else size * (ends + 2 * max(layers.values(), default=0))
    tokens = -(-options.tokens // dims.cp)
    last = place.pp[0] == dims.pp - 1
    vocab = -(-int(text["vocab_size"]) // dims.tp) if last and layout.role == "causal_lm" else 0
    logits = 4 * min(tokens * vocab, max(vocab, LOGITS_TILE[options.device]))
    per_layer, working, ends_per_token = _per_token(text, options, size)
    if last and (low or layout.role == "value"):
        # The heads compute in fp32.
        logits += 4 * tokens * int(text["hidden_size"])
    if not trained:
        return Memory(size * own, gathered=gathered, layer=tokens * working, logits=logits)
    if options.recompute:
        parts = dims.tp if (options.sequence_parallel is None or options.sequence_parallel) else 1
        working += per_layer
        per_layer = size * -(-int(text["hidden_size"]) // parts)
    # 1F1B: a stage has begun as many micro-batches as stages are left, itself included.
    in_flight = dims.pp - place.pp[0]
    activations = in_flight * tokens * (per_layer * len(layers) + ends_per_token)
    gradient = 4 if low and data == 1 else size
    return Memory(
        weights=size * own,
        optimizer=(MOMENTS + MASTER * low) * own,
        gradients=gradient * own + size * max(sizes.values()),
        gathered=2 * gathered,
        activations=activations,
        layer=tokens * working,
        logits=logits,
    )


def _per_token(text: Mapping[str, Any], options: MemoryOptions, size: int) -> tuple[int, int, int]:
    """Bytes for each token: saved by a layer, needed while one runs backward, saved by the ends of the model."""
    tp = options.dims.tp
    divided = tp if (options.sequence_parallel is None or options.sequence_parallel) else 1
    hidden, heads, head = int(text["hidden_size"]), int(text["num_attention_heads"]), int(text["head_dim"])
    queries, keys = heads * head // tp, max(1, int(text["num_key_value_heads"]) // tp) * head
    experts = int(text.get("num_experts_per_tok") or 0) if text.get("num_experts") else 0
    width = experts * int(text["moe_intermediate_size"]) if experts else int(text["intermediate_size"])
    width = -(-width // tp)
    # A norm's input and its normalised form, both in fp32, and its output; under sequence parallelism they are divided.
    norm = (2 * 4 + size) * -(-hidden // divided)
    # The fused projection, the rotated queries and keys, the output; gate and up, the activation and the product.
    inside = 3 * queries + 3 * keys + 4 * width
    if experts:
        # Every token goes to its experts as often as there are experts for it, and comes back.
        inside += 2 * experts * hidden
    statistics = 4 * (2 + heads // tp)
    return 2 * norm + size * inside + statistics, size * 2 * width, norm


@dataclass(frozen=True)
class Planned:
    """An actor with what stands beside it on the same devices.

    Attributes:
        options: what was planned for.
        models: name -> its memory on each stage.
        offload: each model is on the host while another works.
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
    model: Path, options: MemoryOptions, *, critic: bool, reference: bool, offload: bool = False
) -> Planned:
    """An actor, and a critic and a reference of the same size where there are some; see `plan_memory`."""
    models = {"actor": plan_memory(model, options, role="causal_lm", trained=True)}
    if critic:
        models["critic"] = plan_memory(model, options, role="value", trained=True)
    if reference:
        models["reference"] = plan_memory(model, options, role="causal_lm", trained=False)
    return Planned(options, models, offload)


def fitting(
    model: Path, options: MemoryOptions, limit: int, most_ranks: int = 1024, **models: bool
) -> Iterator[Planned]:
    """The grids of the fewest ranks whose peak is at most `limit` bytes, the fastest links used the least first."""
    for ranks in (2**power for power in range(most_ranks.bit_length())):
        found = []
        for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
            if ranks % (tp * pp):
                continue
            dims = ParallelDims(dp=ranks // (tp * pp), tp=tp, pp=pp)
            try:
                planned = plan_models(model, replace(options, dims=dims), **models)
            except ValueError:
                continue  # heads or layers do not divide
            if planned.peak <= limit:
                found.append(planned)
        if found:
            yield from sorted(found, key=lambda planned: (planned.options.dims.pp, planned.options.dims.tp))
            return


def dims_text(dims: ParallelDims) -> str:
    """As `ParallelDims.parse` reads it."""
    sizes = {name: getattr(dims, name) for name in ("dp", "pp", "cp", "tp", "ep")}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The type of a name on the command line.

    Raises:
        ValueError: it is neither float32 nor bfloat16.
    """
    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype={name!r} must be float32 or bfloat16")
    return known[name]
