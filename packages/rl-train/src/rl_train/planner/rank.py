"""Plan the memory of one model on one rank: its weights, and what an update holds at the time of its peak."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

import ckpt
from ckpt.files import config_dtype
from ckpt.layout import EXPERTS
from parallel_layers import ModelConfig
from parallel_models.engine import OUTPUTS
from parallel_models.optimizers import BUCKET
from rl_train.planner.head import head_bytes
from rl_train.planner.layer import Division, LayerBytes, Savings, chunk_bytes, layer_bytes
from rl_train.planner.memory import Memory, MemoryOptions
from rl_train.planner.weights import (
    divided_over,
    held_weights,
    hidden_matrices,
    learning,
    state_bytes,
    weight_bytes,
    wide_weights,
)

EMBEDDING = "model.embed_tokens.weight"
# cuBLAS keeps 32 MiB on Hopper for each thread with GEMMs: the thread of the forward and autograd's thread.
WORKSPACES = {"cuda": 2 * (32 << 20), "cpu": 0}
# Bytes of a weight's state in the three buckets of an offloaded optimizer: a master and two fp32 moments at most.
STREAMED = 3 * 12
# Matrices of the largest one's size that Muon holds while it orthogonalises it.
MUON_COPIES = 5


def on_rank(
    layout: ckpt.Layout,
    adapters: ckpt.AdapterLayout | None,
    model: ModelConfig,
    chunks: Sequence[ckpt.Place],
    options: MemoryOptions,
    trained: bool,
    cache: int,
) -> Memory:
    """Return the memory of a model on the rank that has these chunks."""
    dims, place = options.dims, chunks[0]
    dtype = options.dtype or config_dtype(layout.text)
    size, low = dtype.itemsize, dtype in (torch.bfloat16, torch.float16)
    sizes = held_weights(layout, chunks)
    learned = learning(sizes)
    if adapters is not None:
        learned = held_weights(adapters, chunks)
        sizes = sizes | learned
    wide = wide_weights(layout, chunks) if low else set()
    held, operand = weight_bytes(layout, chunks, sizes, size, wide, options.base_format)
    # Number of ranks that hold the same dense layers, and the same experts.
    data = dims.dp * dims.cp
    copies = data * (1 if place.etp is None else dims.tp) // dims.ep
    weights = divided_over(held, data, copies)
    divided = max(data, copies) > 1
    matrices = hidden_matrices(layout, chunks)
    weights += _rounded({name: sizes[name] for name in matrices}, options, trained=trained) if options.float8 else 0

    division = Division(
        dims.tp,
        place.expert_tp[1],
        size,
        fused=options.device == "cuda",
        product=1 if options.float8 else 0,
        lora_rank=0 if adapters is None else adapters.rank,
        adapted_experts=frozenset()
        if adapters is None
        else frozenset(name.rpartition(".")[2] for name in adapters.chosen if name.endswith(EXPERTS)),
        base_float8=options.base_format == "fp8",
    )
    tokens = options.computed
    per_layer = [layer_bytes(model.layer(number), division) for number in range(model.num_layers)]
    numbers = [layout.chunk_layers(place.grid)[chunk.chunk] for chunk in chunks]
    sharded = {name: numel for name, numel in held.items() if copies > 1 or ".experts." not in name} if divided else {}
    gathered = _gathered(sharded, dims.pp)
    outputs = OUTPUTS[layout.role] if place.pp[0] == dims.pp - 1 else ()
    learns = trained and _head(layout) in learned
    workspaces = WORKSPACES[options.device]
    logits = workspaces + head_bytes(model, options, dtype, outputs, trained=trained, learns=learns)
    # int32 ids: in the batch, in its micro-batches, and shifted to the tokens before.
    masks = 3 * 4 * options.mask_width * options.tokens * options.received
    savings = Savings(options.recompute, options.tiled_mlp or 1) if trained else Savings()
    saved = [[per_layer[number].saved(number, savings) for number in chunk] for chunk in numbers]
    working = tokens * _working(per_layer, numbers, saved, savings, offloaded=options.offload_activations)
    layer = workspaces + operand + working
    if not trained:
        return Memory(weights, gathered=gathered, layer=layer, logits=logits, masks=masks)

    ends = division.hidden_norm(model.decoder)
    activations = 0
    chunk_sizes = [chunk_bytes(model, chunk, division) for chunk in numbers]
    for count, saved_by_layer, chunk_size in zip(_in_flight(place.pp, len(chunks)), saved, chunk_sizes, strict=True):
        # Offloaded, the tensors of two layers are on the device.
        saved_on_device = (
            sum(sorted(saved_by_layer)[-2:]) if options.offload_activations else count * sum(saved_by_layer)
        )
        activations += count * (max(ends, chunk_size.behind) + chunk_size.extra) + saved_on_device
        # torch's pipeline stages keep a receive buffer for each micro-batch and each neighbour.
        activations += options.received * (chunk_size.before + chunk_size.behind)
    if options.keep_probabilities and "log_probs" in outputs:
        activations += 2 * -(-model.vocab_size // dims.tp)
    generation = 0
    if options.cache is not None:
        prefill = tokens * max(per_layer[number].backward for chunk in numbers for number in chunk)
        step = max(operand + prefill, 4 * options.cache.sequences * model.vocab_size)
        generation = workspaces + sum(sharded.values()) + step

    masters = learned.keys() - wide if low else set()
    state = divided_over(state_bytes(learned, matrices, options.optimizer, masters), data, copies)
    on_host = state if options.optimizer.offload else 0
    gradient_size = 4 if low else size
    # Embedding and head add to their sums in place, except under FSDP2 and in the head of masks.
    by_autograd = divided or options.mask_width or options.pipeline.schedule == "zero-bubble"
    in_place = () if by_autograd else (EMBEDDING, _head(layout))
    arriving = max((numel for name, numel in learned.items() if name not in in_place), default=0)
    all_gradients = gradient_size * (sum(learned.values()) if divided else divided_over(learned, data, copies))
    common = Memory(
        weights, state - on_host, gathered=gathered, masks=masks, cache=cache, generation=generation, host=on_host
    )
    # Later micro-batches find the gradients of the first.
    moments = [
        replace(
            common, gradients=all_gradients + size * arriving, activations=tokens * activations, layer=layer,
            logits=logits,
        )
    ]  # fmt: skip
    if options.received == 1 and dims.pp == 1 and not divided:
        # The head's gradient comes first, beside all activations; with masks it is then converted to fp32.
        heads = [learned.get(name, 0) for name in (_head(layout), "score.weight")]
        head_gradients, converted = gradient_size * sum(heads), low * size * max(heads) * bool(options.mask_width)
        hidden_gradient = tokens * size * model.decoder.hidden_size
        # The first layer runs backward with its own activations, and before the gradients of its weights.
        first = f"model.layers.{numbers[0][0]}."
        later = {name: numel for name, numel in learned.items() if not name.startswith((first, EMBEDDING))}
        before = gradient_size * (sum(later.values()) + (heads[0] if layout.tied else 0))
        # The gradients of a tiled MLP are summed while the next tile runs.
        tiled = f"{first}mlp." if options.tiled_mlp and per_layer[numbers[0][0]].dense else None
        mlp_sizes = [numel for name, numel in learned.items() if tiled is not None and name.startswith(tiled)]
        summed = gradient_size * sum(mlp_sizes) + (size + gradient_size * low) * max(mlp_sizes, default=0)
        last = tokens * (2 * max(saved[0]) if options.offload_activations else saved[0][0])
        # The gradient of the embedding comes last; a tied one is added to the head's.
        added = gradient_size * heads[0] if layout.tied else 0
        moments = [
            replace(moments[0], gradients=head_gradients - converted, layer=0),
            replace(moments[0], gradients=head_gradients + converted, layer=0, logits=workspaces + hidden_gradient),
            replace(moments[0], gradients=head_gradients + summed, logits=0),
            replace(common, gradients=before + summed, activations=last, layer=layer),
            replace(common, gradients=all_gradients + added, layer=workspaces),
        ]
    if on_host:
        streamed = workspaces + min(on_host, STREAMED * BUCKET)
        moments.append(replace(common, gathered=0, gradients=all_gradients, layer=streamed))
    if options.optimizer.algorithm == "muon":
        largest = max((matrices[name] for name in learned if name in matrices), default=0)
        matrix = workspaces + MUON_COPIES * size * largest
        moments.append(replace(common, gathered=0, gradients=all_gradients, layer=matrix))
    return max(moments, key=attrgetter("total"))


def _head(layout: ckpt.Layout) -> str:
    return EMBEDDING if layout.tied else "lm_head.weight"


def _gathered(sizes: Mapping[str, int], pp: int) -> int:
    """Return the bytes that FSDP2 gathers at once, from the bytes of each tensor."""
    held, layers = sum(sizes.values()), Counter[str]()
    for name, numel in sizes.items():
        if match := re.match(r"(?:model|mtp)\.layers\.(\d+)\.", name):
            layers[match[1]] += numel
    two_layers = held - layers.total() + 2 * max(layers.values(), default=0)
    return held if pp > 1 else min(held, two_layers)


def _rounded(matrices: Mapping[str, int], options: MemoryOptions, *, trained: bool) -> int:
    """Return the bytes of the FP8 copies of linears' weights: two of each weight, quantized by rows and by columns.

    An update keeps them from the forward to the backward. A recomputed layer keeps them for its backward. With several
    micro-batches at once, or with weights that FSDP2 shards, only the copies of one matrix exist at a time.
    """
    linears = {name: numel for name, numel in matrices.items() if ".experts." not in name}
    layers = Counter[str]()
    for name, numel in linears.items():
        layers[".".join(name.split(".")[:3])] += numel
    if not trained or options.dims.dp * options.dims.cp * options.dims.pp > 1:
        return 2 * max(linears.values(), default=0)
    return 2 * (max(layers.values(), default=0) if options.recompute == "full" else layers.total())


def _working(
    per_layer: Sequence[LayerBytes],
    numbers: Sequence[Sequence[int]],
    saved: Sequence[Sequence[int]],
    savings: Savings,
    *,
    offloaded: bool,
) -> int:
    """Return the most bytes for each token that a layer needs beyond the saved tensors.

    When a layer runs backward, the layers after it have freed their activations; offloaded, two layers have some.
    """
    return max(
        per_layer[number].working(number, savings) - (0 if offloaded else sum(saved_by_layer[place_in_chunk + 1 :]))
        for chunk, saved_by_layer in zip(numbers, saved, strict=True)
        for place_in_chunk, number in enumerate(chunk)
    )


def _in_flight(stage: tuple[int, int], virtual_stages: int) -> list[int]:
    """Return the largest number of micro-batches in flight for each chunk of a stage `(rank, size)`.

    1F1B: the number of stages from this stage to the last. Interleaved (arXiv:2104.04473, section 2.2): chunks take
    turns of `size` micro-batches; a rank starts with `size` for each chunk but one, two for each later stage, and one.
    """
    rank, size = stage
    if virtual_stages == 1:
        return [size - rank]
    begun = (virtual_stages - 1) * size + 2 * (size - 1 - rank) + 1
    counts = Counter(n // size % virtual_stages for n in range(begun))
    return [counts[chunk] for chunk in range(virtual_stages)]
