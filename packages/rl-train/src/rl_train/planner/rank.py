"""Plan the memory of one model on one rank: its weights, and what an update holds at the time of its peak."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import ckpt
from ckpt.transfer import float8_sides
from parallel_layers.device import GPU
from parallel_models.model import Boundary
from parallel_models.optimizers import BUCKET, STORAGES, is_hidden_matrix
from rl_train.planner.measure import ModelRun, PartBytes, measure
from rl_train.planner.memory import Memory, MemoryOptions

# cuBLAS keeps 32 MiB on Hopper for each thread with GEMMs: the thread of the forward and autograd's thread.
WORKSPACES = {GPU: 2 * (32 << 20), "cpu": 0}
# Bytes of a weight's state in the three buckets of an offloaded optimizer: a master and two fp32 moments at most.
STREAMED = 3 * 12
# Matrices of the largest one's size that Muon holds while it orthogonalises it.
MUON_COPIES = 5


class _Weight(NamedTuple):
    """A local tensor of a rank.

    Attributes:
        numel: The number of elements.
        wide: Whether the tensor stays fp32 in a model of any dtype, as ERNIE 4.5's routers do.
        matrix: The elements of the largest of the layers' weight matrices that it consists of; 0: it has others.
    """

    numel: int
    wide: bool
    matrix: int


def _local_weights(layout: ckpt.Layout, chunks: Sequence[ckpt.Place]) -> dict[str, _Weight]:
    """Return every local tensor of a rank's chunks; a shared tensor counts once."""
    weights = {}
    for name, block in ((name, block) for chunk in chunks for name, block in layout.at(chunk).items()):
        sources = {source: layout.canonical[source] for source in block.names}
        if sources[block.names[0]].copy_of is None:
            hidden = all(is_hidden_matrix(source, canonical.shape) for source, canonical in sources.items())
            matrix = max(math.prod(canonical.shape[-2:]) for canonical in sources.values()) if hidden else 0
            wide = all(canonical.keep_dtype for canonical in sources.values())
            weights[name] = _Weight(math.prod(block.shape), wide, matrix)
    return weights


def _divided_over(sizes: Mapping[str, int], data: int, copies: int) -> int:
    """Return a rank's share of sizes where `data` ranks divide the dense layers, and `copies` ranks the experts."""
    experts = sum(size for name, size in sizes.items() if ".experts." in name) if copies != data else 0
    return -(-(sum(sizes.values()) - experts) // data) + -(-experts // copies)


def on_rank(run: ModelRun, chunks: Sequence[ckpt.Place], parts: Sequence[Sequence[PartBytes]], cache: int) -> Memory:
    """Return the memory of a model on the rank that has these chunks, with the bytes of their parts and of a cache."""
    options, size = run.options, run.dtype.itemsize
    weights = _local_weights(run.layout, chunks)
    # Multi-token-prediction layers are frozen.
    learned = {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}
    if run.lora is not None:
        learned = _local_weights(run.lora[1], chunks)
        weights |= learned
    held = {name: weight.numel * (4 if run.low and weight.wide else size) for name, weight in weights.items()}
    if options.base_format == "fp8":  # a byte an element, and an fp32 scale for each block
        sides = float8_sides(run.layout, chunks)
        held |= {name: weights[name].numel + 4 * (weights[name].numel // math.prod(sides[name])) for name in sides}
    whole_experts = run.copies * options.dims.replicate == 1
    sharded = {name: numel for name, numel in held.items() if not whole_experts or ".experts." not in name}
    workspaces = WORKSPACES[options.device]
    # The rows of a teacher's head are divided by tp alone, on the last stage; its states are whole on every rank.
    is_last, entries = chunks[-1].pp[0] == options.dims.pp - 1, -(-run.model.vocab_size // options.dims.tp)
    teacher = entries * options.teacher_size * size * is_last
    common = Memory(
        _divided_over(held, run.data, run.copies) + teacher,
        gathered=_gathered(sharded, options.dims.pp) if run.divided else 0,
        # int32 ids and int64 offsets: in the batch, in its micro-batches, and shifted to the tokens before.
        masks=3 * (4 * options.mask_width + 8) * options.tokens * options.received * bool(options.mask_width),
        # In the batch and in its micro-batches, of which one is picked from the batch at a time.
        states=(2 * options.received + 1) * options.tokens * options.teacher_size * size,
        cache=cache,
    )
    if options.cache is not None:
        forward = [part.working for chunk in chunks for part in measure(replace(run, trained=False), chunk)[:-1]]
        step = max(*forward, 4 * options.cache.sequences * entries)
        # Sampling masks of the 16 steps between two looks, a bit for each token of the vocabulary.
        step += 2 * options.cache.sequences * run.model.vocab_size * bool(options.mask_width)
        # The experts of the other ranks; "auto" gathers them into free memory alone.
        others = options.dims.ep - 1 if options.cache.experts == "gather" else 0
        experts = [size for name, size in held.items() if ".experts." in name]
        if options.cache.float8:  # a byte an element of each projection, and a prompt's gathered experts dense
            further = sum(
                weight.numel * (1 + others * (".experts." in name)) for name, weight in weights.items() if weight.matrix
            )
            step += max(experts, default=0) * (1 + others) * bool(others)
        else:
            further = others * sum(experts)
        common = replace(common, generation=workspaces + run.divided * sum(sharded.values()) + further + step)
    if not run.trained:
        layer = max(part.working for chunk in parts for part in chunk[:-1])
        logits = max(chunk[-1].working for chunk in parts)
        return replace(common, layer=workspaces + layer, logits=workspaces + logits)

    state = _divided_over(_state_bytes(learned, run), run.data, run.copies)
    on_host = state if options.optimizer.offload else 0
    sizes = {name: weight.numel for name, weight in learned.items()}
    numel = sum(sizes.values()) if run.divided else _divided_over(sizes, run.data, run.copies)
    common = replace(common, optimizer=state - on_host, host=on_host, gradients=(4 if run.low else size) * numel)
    moments = list(_moments(common, run, chunks, parts))
    if on_host:
        streamed = workspaces + min(on_host, STREAMED * BUCKET)
        moments.append(replace(common, gathered=0, layer=streamed))
    if options.optimizer.algorithm == "muon":
        largest = max((weight.matrix for weight in learned.values()), default=0)
        moments.append(replace(common, gathered=0, layer=workspaces + MUON_COPIES * size * largest))
    return max(moments, key=attrgetter("total"))


def _state_bytes(learned: Mapping[str, _Weight], run: ModelRun) -> dict[str, int]:
    """Return the bytes of the moments and of the fp32 master weight of each trainable tensor."""
    optimizer = run.options.optimizer
    moment = STORAGES[optimizer.moments].bytes_per_element
    bytes_of_tensor = {}
    for name, weight in learned.items():
        count = 1 if optimizer.algorithm == "muon" and weight.matrix else 2
        bytes_of_tensor[name] = int((count * moment + 4 * (run.low and not weight.wide)) * weight.numel)
    return bytes_of_tensor


def _moments(
    common: Memory, run: ModelRun, chunks: Sequence[ckpt.Place], parts: Sequence[Sequence[PartBytes]]
) -> Iterator[Memory]:
    """Yield the memory while each part of each chunk runs backward, the last part of a chunk first.

    The gradients of one micro-batch come part by part; of several micro-batches the later ones find all gradients.
    """
    options = run.options
    alone = options.received == 1 and options.dims.pp == 1 and not run.divided
    saved = [_on_device(chunk, len(chunk) - 1, options) for chunk in parts]
    counts = _in_flight(chunks[0].pp, len(chunks))
    in_flight = _buffers(run, chunks) + sum(count * each for count, each in zip(counts, saved, strict=True))
    for chunk, held in zip(parts, saved, strict=True):
        gradients = 0 if alone else common.gradients
        for number, part in reversed(list(enumerate(chunk))):
            name = "logits" if number == len(chunk) - 1 else "layer"
            needed = {name: WORKSPACES[options.device] + part.working}
            activations = in_flight - held + _on_device(chunk, number, options)
            yield replace(common, activations=activations, gradients=gradients, **needed)
            gradients += part.gradients if alone else 0


def _on_device(parts: Sequence[PartBytes], number: int, options: MemoryOptions) -> int:
    """Return what a chunk has saved on the device when part `number` runs backward; offloaded, for two layers."""
    saved = [part.saved for part in parts]
    if not options.offload_activations:
        return sum(saved[: number + 1])
    last = min(number, len(parts) - 2)
    return saved[0] + sum(saved[max(1, last - 1) : last + 1])


def _buffers(run: ModelRun, chunks: Sequence[ckpt.Place]) -> int:
    """Return the bytes of the receive buffers that torch's pipeline stages keep for each micro-batch and neighbour."""
    tp, columns = run.options.dims.tp, 0
    for chunk in chunks:
        layers = run.layout.chunk_layers(chunk.grid)[chunk.chunk]
        for edge in {layers[0], layers[-1] + 1} - {0, run.model.num_layers}:
            columns += -(-Boundary.before(edge, run.model, tp, sequence_parallel=tp > 1).columns // tp)
    return run.options.received * run.options.computed * run.dtype.itemsize * columns


def _gathered(sizes: Mapping[str, int], pp: int) -> int:
    """Return the bytes that FSDP2 gathers at once, from the bytes of each tensor."""
    held, layers = sum(sizes.values()), Counter[str]()
    for name, numel in sizes.items():
        if match := re.match(r"(?:model|mtp)\.layers\.(\d+)\.", name):
            layers[match[1]] += numel
    two_layers = held - layers.total() + 2 * max(layers.values(), default=0)
    return held if pp > 1 else min(held, two_layers)


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
