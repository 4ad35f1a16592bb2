"""`Decoder`: embedding, layers and final norm, whole or as the chunks of a pipeline stage.

Shape legend: T tokens of a packed batch with its padding, T' this rank's tokens under sequence and context parallelism,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    Execution,
    ModelConfig,
    PackedSequence,
    ParallelMLP,
    Placement,
    RotaryEmbedding,
    VocabParallelEmbedding,
)
from parallel_layers.attention import Layout, SharedKeysValues, split_sequence
from parallel_layers.distributed import scatter_to_sequence_parallel
from parallel_layers.inference import SequenceCache
from parallel_layers.invariant import tp_invariant
from parallel_layers.linear import with_float8
from parallel_layers.memory import Recompute, memory_savings, require_recompute
from parallel_layers.moe import RoutingContext
from parallel_layers.rotary import require_length
from parallel_models.model.boundary import Boundary
from parallel_models.model.per_layer_inputs import PerLayerProjection, PerLayerTable


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of a pipeline stage, numbered in the whole model.

    The first chunk begins with the embedding, the last ends with the final norm and the head.
    """

    layers: tuple[int, ...]
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class VisualStates:
    """A vision tower's output for a packed batch: V of its T tokens stand for images.

    Attributes:
        places: `[V]` int64, which tokens.
        rows: `[V, 1 + D, H]`: the embedding of each of these tokens, and the rows that are added to the outputs of
            the first D layers (DeepStack, https://arxiv.org/abs/2406.04334).
    """

    places: Tensor
    rows: Tensor


class ModelOptions(TypedDict, total=False):
    """Keywords that divide a model over ranks and choose how it computes (default: one rank).

    Attributes:
        group: The tensor-parallel group.
        sequence_parallel: Keep `[T/tp, H]` between the blocks.
        execution: How the linear layers compute and communicate (default: `Execution()`).
        context_group: The context-parallel group, which divides the tokens of every pack.
        expert_group: The ranks that share the experts of a mixture of experts.
        expert_tensor_parallel: Divide each expert over `group` (default: True). See `parallel_layers.moe.MoE`.
        chunks: This rank's chunks of a pipeline (default: the whole model).
        recompute, tiled_mlp, offload_activations, float8, keep_probabilities, tp_invariant: See
            `parallel_models.EngineOptions`.
        prediction_layers: The number of multi-token-prediction layers of a language model (default: 0).
        mtp_loss: Train these layers.
        dtype, device: The dtype and the device of the parameters.
    """

    group: ProcessGroup | None
    sequence_parallel: bool
    execution: Execution
    context_group: ProcessGroup | None
    expert_group: ProcessGroup | None
    expert_tensor_parallel: bool
    chunks: Sequence[Chunk]
    recompute: Recompute
    tiled_mlp: int | None
    offload_activations: bool
    float8: str | None
    keep_probabilities: bool | Literal["auto"]
    tp_invariant: bool
    prediction_layers: int
    mtp_loss: bool
    dtype: torch.dtype | None
    device: torch.device | str | None


def layer_options(options: ModelOptions) -> dict[str, Any]:
    """Return the keywords that every decoder layer of a model takes."""
    return {
        "placement": Placement(options.get("group"), options.get("sequence_parallel", False)),
        "execution": options.get("execution", Execution()),
        "context_group": options.get("context_group"),
        "expert_group": options.get("expert_group"),
        "expert_tensor_parallel": options.get("expert_tensor_parallel", True),
        "dtype": options.get("dtype"),
        "device": options.get("device"),
    }


def cache_entries(layers: Sequence[DecoderConfig]) -> tuple[list[int], list[int]]:
    """Return the number of the cache entry of each of a rank's layers, and for each entry a layer that has its shape.

    Layers that reuse keys and values share the entry of the layer that stores them; if another pipeline stage has this
    layer, the first layer that reuses them has the entry.
    """
    numbers: list[int] = []
    owners: list[int] = []
    shared: dict[int | None, int] = {}
    for number, layer in enumerate(layers):
        entry = shared.get(layer.window) if layer.shared_kv == "reuse" else None
        if entry is None:
            entry = len(owners)
            owners.append(number)
        if layer.shared_kv is not None:
            shared[layer.window] = entry
        numbers.append(entry)
    return numbers, owners


class Decoder(nn.Module):
    """Embedding, layers and final norm: ids `[T]` -> hidden states `[T', H]`.

    Each rank holds its shards of every layer. Communication: one reduction for the embedding; for each attention and
    MLP one all-gather and one reduce-scatter (without sequence parallelism one all-reduce), and their conjugates in the
    backward; the exchanges of context and expert parallelism.
    """

    def __init__(self, config: ModelConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__()
        require_recompute(options.get("recompute"), config.num_layers)
        group, dtype, device = options.get("group"), options.get("dtype"), options.get("device")
        sequence_parallel = options.get("sequence_parallel", False)
        self.context_group = options.get("context_group")
        self.context_layout: Layout = config.decoder.context_layout
        self.chunks = tuple(options.get("chunks") or [Chunk(tuple(range(config.num_layers)))])
        hidden = config.decoder.hidden_size
        if any(chunk.first for chunk in self.chunks):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, hidden, group=group, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )
        placement = Placement(group, sequence_parallel)
        self.per_layer: PerLayerProjection | None = None
        if config.decoder.per_layer_size and hasattr(self, "embed_tokens"):
            self.per_layer = PerLayerProjection(config, placement, dtype=dtype, device=device)
        # By a chunk's first layer.
        self.per_layer_tables = nn.ModuleDict(
            {
                str(chunk.layers[0]): PerLayerTable(config, len(chunk.layers), placement, dtype=dtype, device=device)
                for chunk in self.chunks
                if config.decoder.per_layer_size
            }
        )
        edges = {edge for chunk in self.chunks for edge in (chunk.layers[0], chunk.layers[-1] + 1)}
        tp = 1 if group is None else group.size()
        self.boundaries = {
            edge: Boundary.before(edge, config, tp, sequence_parallel=sequence_parallel) for edge in edges
        }
        # Keys are numbers in the whole model, as in checkpoints.
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(config.layer(i), layer_number=i, **layer_options(options))
                for chunk in self.chunks
                for i in chunk.layers
            }
        )
        if any(chunk.last for chunk in self.chunks):
            self.norm = config.decoder.build_norm(placement, dtype=dtype, device=device)
        self.embedding_scale = config.embedding_scale
        # Layers take more than hidden states from the embedding or from earlier layers.
        configs = [config.layer(int(i)) for i in self.layers]
        self.hands_over = any(layer.per_layer_size or layer.shared_kv is not None for layer in configs)
        # One module for all layers that rotate alike.
        of_layers = [config.ropes[int(i)] for i in self.layers]
        ropes = [rope for n, rope in enumerate(of_layers) if rope is not None and rope not in of_layers[:n]]
        self.rotaries = nn.ModuleList(RotaryEmbedding.from_config(rope, device=device) for rope in ropes)
        self.longest = min((rotary.longest for rotary in self._rotaries if rotary.longest is not None), default=None)
        self.cache_of, self.with_cache = cache_entries(configs)
        self.rotary_of = [None if rope is None else ropes.index(rope) for rope in of_layers]
        if options.get("tp_invariant"):
            for name, child in list(self.named_children()):
                setattr(self, name, tp_invariant(child))
        if (recipe := options.get("float8")) is not None:
            self.layers = with_float8(self.layers, recipe)
        mlps = [module for module in self.layers.modules() if isinstance(module, ParallelMLP)]
        whole = (config.layer(i) for i in range(config.num_layers))
        if options.get("tiled_mlp") is not None and not any(
            layer.moe is None and layer.mixer != "attention" for layer in whole
        ):
            raise ValueError(f"tiled_mlp={options.get('tiled_mlp')}: {config.family} has no dense MLP; leave it out")
        for module, forward, _ in memory_savings(
            {int(name): layer for name, layer in self.layers.items()},
            mlps=mlps,
            tiled_mlp=options.get("tiled_mlp"),
            recompute=options.get("recompute"),
            offload=options.get("offload_activations", False),
            first_layers=[chunk.layers[0] for chunk in self.chunks],
        ):
            module.forward = forward

    def forward(
        self,
        packed: PackedSequence,
        hidden: Tensor | None = None,
        *,
        chunk: Chunk | None = None,
        cache: SequenceCache | None = None,
        routing: RoutingContext | None = None,
        visual: VisualStates | None = None,
    ) -> Tensor:
        """Compute hidden states of every token; with a cache, of the tokens that follow the tokens in the cache.

        Args:
            packed: The batch, the same on every rank of the tensor-, context- and pipeline-parallel groups.
            hidden: `[T', columns]`, the result of the chunk before (see `Boundary`); None in the first chunk.
            chunk: One of this rank's chunks (default: the first).
            cache: The cache of this rank's layers, which the caller advances. Every context-parallel rank then computes
                all tokens.
            routing: The context of the routers of a mixture of experts.
            visual: The images of the pack, for the first chunk. Its gradient is complete on every tensor-parallel rank;
                each context-parallel rank has the gradient of its tokens.

        Returns:
            `[T', H]` behind the final norm; of a chunk that is not the last `[T', columns]` (see `Boundary`).
        """
        chunk = self.chunks[0] if chunk is None else chunk
        if packed.padding < packed.max_seqlen:  # the padding of a pipeline's short batches is no sequence
            require_length(packed.longest, self.longest)
        tables = self.tables(packed, whole=cache is not None)
        if chunk.first:
            hidden = self.embed_tokens(packed.input_ids if cache is not None else self.split(packed.input_ids))
            if self.embedding_scale != 1:
                hidden = hidden * torch.tensor(self.embedding_scale, dtype=hidden.dtype).item()
        shared_kv, inputs = SharedKeysValues(), None
        if not chunk.first:
            assert hidden is not None
            hidden, inputs, shared_kv = self.boundaries[chunk.layers[0]].split(hidden)
        elif self.per_layer is not None:
            inputs = self.per_layer(hidden)
        per_layer: Sequence[Tensor | None] = (None,) * len(chunk.layers)
        if inputs is not None:
            table = self.per_layer_tables[str(chunk.layers[0])]
            assert isinstance(table, PerLayerTable)
            chunk_inputs, inputs = inputs.tensor_split([table.embedding_dim], 1)
            per_layer = table.inputs(
                packed.input_ids if cache is not None else self.split(packed.input_ids), chunk_inputs
            )
        deep: Sequence[Tensor] = ()
        if visual is not None and hidden is not None:
            has_image, embedded, *deep = self._at_places(visual, packed.num_tokens, whole=cache is not None)
            hidden = torch.where(has_image, embedded, hidden)
        if routing is not None and routing.segments is not None and cache is None:
            routing = replace(routing, segments=self.split(routing.segments))
        for (number, layer), further_input in zip(self._numbered(chunk), per_layer, strict=True):
            layer_cache = None if cache is None else cache.layer(self.cache_of[number])
            of_layer = self.rotary_of[number]
            rotary = None if of_layer is None else tables[of_layer]
            further = (shared_kv, further_input) if self.hands_over else ()
            bounds = packed.cu_seqlens, packed.max_seqlen
            hidden = layer(hidden, rotary, *bounds, layer_cache, routing, packed.shared_keys, *further)
            if number < len(deep):
                hidden = hidden + deep[number]
        assert hidden is not None
        return (
            self.norm(hidden) if chunk.last else self.boundaries[chunk.layers[-1] + 1].join(hidden, inputs, shared_kv)
        )

    @property
    def _rotaries(self) -> list[RotaryEmbedding]:
        return [rotary for rotary in self.rotaries if isinstance(rotary, RotaryEmbedding)]

    def tables(self, packed: PackedSequence, *, whole: bool = False) -> list[tuple[Tensor, ...]]:
        """Return the tables of each rotary embedding, of this rank's tokens or of the whole batch."""
        positions = packed.position_ids if packed.rotary_positions is None else packed.rotary_positions
        tables = [rotary.tables(positions) for rotary in self._rotaries]
        return tables if whole else [tuple(map(self.split, of_kind)) for of_kind in tables]

    def _at_places(self, visual: VisualStates, num_tokens: int, *, whole: bool) -> list[Tensor]:
        """Return a mask of this rank's tokens with images, `[T', 1]`, then `[T', H]` for each kind of rows, else 0."""
        rows, places = visual.rows, visual.places
        dense = rows.new_zeros(num_tokens, *rows.shape[1:]).index_copy(0, places, rows)
        has_image = rows.new_zeros(num_tokens, 1).index_fill(0, places, 1)
        if not whole:
            # Not `split` of the rows, whose backward gathers: FSDP2 sums the gradients over context parallelism.
            token_numbers = self.split(torch.arange(num_tokens, device=places.device))
            dense, has_image = dense[token_numbers], has_image[token_numbers]
        if self.embed_tokens.sequence_parallel:
            dense, has_image = (scatter_to_sequence_parallel(x, self.embed_tokens.group) for x in (dense, has_image))
        return [has_image.bool(), *dense.unbind(1)]

    def split(self, per_token: Tensor) -> Tensor:
        """Return this rank's tokens of a `[T, ...]` tensor under context parallelism."""
        return split_sequence(per_token, self.context_group, layout=self.context_layout)

    def _numbered(self, chunk: Chunk) -> Iterator[tuple[int, nn.Module]]:
        """Yield the layers of a chunk, each with its number among the layers of this rank."""
        for number, (name, layer) in enumerate(self.layers.items()):
            if int(name) in chunk.layers:
                yield number, layer
