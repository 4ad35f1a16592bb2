"""Measure the memory of a chunk of a model: its layers run on the meta device, and the live bytes are counted.

The layers are the same as in the run, with their savings, adapters and kernels, on the first rank of groups that do not
communicate. They run with the number of tokens of the plan. One layer of each kind runs, because layers of one kind
hold the same bytes. Savings of activations by offload are no part of this: see `rl_train.planner.rank`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

import ckpt
from ckpt.files import config_dtype
from ckpt.layout import adaptable
from ckpt.transfer import float8_sides
from parallel_layers import ModelConfig, PackedSequence
from parallel_layers.attention import SharedKeys
from parallel_layers.data import SharedPrefixes
from parallel_layers.head import Distillation, SamplingMask, TeacherHead
from parallel_layers.kernels import planned_for
from parallel_layers.linear import round_again_
from parallel_layers.model import LoraOptions, add_lora_, hold_in_float8_
from parallel_layers.training import sum_in_place_
from parallel_models.model import Chunk, PackedModel
from parallel_models.training import MODELS
from rl_train.planner.live_bytes import LiveBytes, idle_groups
from rl_train.planner.memory import MemoryOptions

# Above this number of tokens bytes are linear in it; the head in tiles of plain torch would take long for more.
MOST_TOKENS = 1 << 18


@dataclass(frozen=True)
class ModelRun:
    """A model and the step that it runs; a model that is not trained runs forward.

    `lora` are the adapters and their layout; None: all weights learn.
    """

    layout: ckpt.Layout
    model: ModelConfig
    lora: tuple[LoraOptions, ckpt.AdapterLayout] | None
    options: MemoryOptions
    trained: bool

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.options.dtype or config_dtype(self.layout.text)

    @property
    def low(self) -> bool:
        """Whether the weights have fp32 master weights and gradients."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def data(self) -> int:
        """The number of ranks that shard the same dense layers, within a replica."""
        return self.options.dims.replica_size // self.options.dims.tp

    @property
    def copies(self) -> int:
        """The number of ranks that shard the same experts, within a replica."""
        dims = self.options.dims
        return dims.replica_size // (dims.ep * (dims.tp if dims.expert_tensor_parallel else 1))

    @property
    def divided(self) -> bool:
        """Whether FSDP2 holds weights; it gathers copies of them also where a replica has one shard."""
        return max(self.data, self.copies) * self.options.dims.replicate > 1

    def chunks(self, stage: int, tp: int = 0, ep: int = 0) -> list[ckpt.Place]:
        """Return the places of the chunks of a rank."""
        dims, count = self.options.dims, self.options.pipeline.virtual_stages
        etp = None if dims.expert_tensor_parallel else (0, 1)
        place = ckpt.Place(tp=(tp, dims.tp), pp=(stage, dims.pp), ep=(ep, dims.ep), etp=etp)
        return [replace(place, vpp=(number, count)) for number in range(count)]

    @cached_property
    def kinds(self) -> list[object]:
        """The kind of each layer; layers of one kind need the same bytes, and one of them is measured.

        The first layer is a separate kind, as its input may need no gradient. So is each layer that shares keys and
        values with another, or that has embeddings per layer.
        """
        adapted = defaultdict[int, list[str]](list)
        for name in () if self.lora is None else self.lora[1].chosen:
            if match := re.search(r"layers\.(\d+)\.(.*)", name):
                adapted[int(match[1])].append(match[2])
        kinds: list[object] = []
        for number in range(self.model.num_layers):
            layer, recompute = self.model.layer(number), self.options.recompute
            listed = recompute is not None and not isinstance(recompute, str) and number in recompute
            different = bool(layer.per_layer_size) or layer.shared_kv is not None
            kinds.append(number if different else (layer, number == 0, listed, tuple(sorted(adapted[number]))))
        return kinds


class PartBytes(NamedTuple):
    """Bytes of a part of a chunk: of its front (the embedding), a layer, or its end (the norm and the heads).

    Attributes:
        saved: Held from the forward of the part until its backward.
        working: The most that is needed beside all saved tensors and all earlier gradients, while the part runs
            backward; of a model that is not trained, while the part runs forward. An end runs forward and backward.
        gradients: The gradients of the part's weights.
    """

    saved: int
    working: int
    gradients: int


def measure(run: ModelRun, place: ckpt.Place) -> list[PartBytes]:
    """Return the bytes of the front, of each layer, and of the end of the chunk at `place`."""
    chunks = run.layout.chunk_layers(place.grid)
    sample = dict(zip(run.kinds, range(run.model.num_layers), strict=True))
    layers = [sample[run.kinds[number]] for number in chunks[place.chunk]]
    chunk = Chunk(tuple(sorted(set(layers))), first=place.chunk == 0, last=place.chunk == len(chunks) - 1)
    parts = _with_tokens(run, chunk, run.options.tokens)
    of_layers = dict(zip(chunk.layers, parts[1:-1], strict=True))
    return [parts[0], *(of_layers[layer] for layer in layers), parts[-1]]


def _with_tokens(run: ModelRun, chunk: Chunk, tokens: int) -> list[PartBytes]:
    """Return the bytes of the parts of a chunk. Above `MOST_TOKENS` they are linear in the number of tokens."""
    if tokens <= MOST_TOKENS:
        run = replace(run, options=replace(run.options, tokens=tokens))
        if (key := _key(run, chunk)) not in _MEASURED:
            _MEASURED[key] = _measured(run, chunk)
        return _MEASURED[key]
    half, most = (_with_tokens(run, chunk, number) for number in (MOST_TOKENS // 2, MOST_TOKENS))
    times = 2 * (tokens - MOST_TOKENS) / MOST_TOKENS
    pairs = [zip(low, high, strict=True) for low, high in zip(half, most, strict=True)]
    return [PartBytes(*(high + int(times * (high - low)) for low, high in pair)) for pair in pairs]


# The bytes of chunks by `_key`.
_MEASURED: dict[str, list[PartBytes]] = {}


def _key(run: ModelRun, chunk: Chunk) -> str:
    """Return a key of every size and option that changes the bytes of a chunk; equal keys are measured once."""
    options, dims = run.options, run.options.dims
    others = ["dims", "micro_batches", "optimizer", "offload_activations", "cache", "pipeline", "recompute"]
    step: list[object] = [value for name, value in vars(options).items() if name not in others]
    step += [dims.tp, dims.cp, dims.ep, dims.expert_tensor_parallel]
    if run.trained:
        again = options.recompute
        step.append(again if again is None or isinstance(again, str) else [n in again for n in chunk.layers])
        step += [run.divided, options.received > 1, options.pipeline.schedule]
    return repr((run.model.hf, run.layout.role, run.dtype, run.trained, chunk, step))


def _measured(run: ModelRun, chunk: Chunk) -> list[PartBytes]:
    options, dims = run.options, run.options.dims
    experts = range(0, dims.tp * dims.ep, dims.tp) if dims.expert_tensor_parallel else range(dims.ep)
    groups = range(dims.tp), range(dims.cp), experts
    with planned_for(options.device), idle_groups(*groups) as (group, context, expert_group):
        module = MODELS[run.layout.role](
            run.model,
            group=group,
            sequence_parallel=group is not None,
            context_group=context,
            expert_group=expert_group,
            expert_tensor_parallel=dims.expert_tensor_parallel,
            chunks=[chunk],
            recompute=options.recompute if run.trained else None,
            tiled_mlp=options.tiled_mlp,
            float8=options.float8,
            keep_probabilities=options.keep_probabilities is True,
            dtype=run.dtype,
            device="meta",
        )
        if run.lora is not None:
            lora, adapters = run.lora
            add_lora_(module, lora, sources=adaptable(run.layout)[0], chosen=adapters.chosen)
        if not run.trained:
            module.requires_grad_(False)
        if options.base_format is not None:
            names = module.state_dict()
            sides = float8_sides(run.layout, [place for stage in range(dims.pp) for place in run.chunks(stage)])
            hold_in_float8_(module, {name: size for name, size in sides.items() if name in names})
        _prepare(module, run)
        return _run(module, chunk, run)


def _prepare(module: PackedModel, run: ModelRun) -> None:
    """Set where the backward puts the gradients, as the engine and its optimizer do."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if run.divided:  # FSDP2 sums gradients elsewhere
        round_again_(module)
        return
    for parameter in learning:
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
        if run.options.received > 1:  # a later micro-batch finds the gradients of the first
            parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
    if run.options.pipeline.schedule != "zero-bubble":
        sum_in_place_(learning)


def _run(module: PackedModel, chunk: Chunk, run: ModelRun) -> list[PartBytes]:
    """Return the bytes of the parts of a chunk that runs forward, and backward if it learns."""
    options = run.options
    tokens = -(-options.computed * options.dims.cp // module.tokens_multiple_of) * module.tokens_multiple_of
    mask = None
    if options.mask_width:
        ids = torch.empty(tokens * options.mask_width, dtype=torch.int32, device="meta")
        mask = SamplingMask(ids, torch.empty(tokens + 1, dtype=torch.int64, device="meta"))
    hidden = None
    if not chunk.first:
        shape = module.boundary_shape(tokens, chunk.layers[0])
        hidden = torch.empty(shape, dtype=module.dtype, device="meta", requires_grad=run.trained)
    earlier = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    others = [] if hidden is None else [hidden]
    others += [] if mask is None else [mask.ids, mask.offsets]
    distillation = None
    if options.teacher_size and chunk.last:
        entries = -(-run.model.vocab_size // options.dims.tp)
        states, rows = (
            torch.empty(n, options.teacher_size, dtype=module.dtype, device="meta") for n in (tokens, entries)
        )
        others += [states, rows]
        teacher = TeacherHead(states, rows, group=module.group, vocab_size=run.model.vocab_size)
        distillation = Distillation(teacher, "reverse_kl")
    with LiveBytes([*module.parameters(), *module.buffers(), *earlier, *others]) as live:
        marks = _Marks(module, chunk, live, sum(gradient.nbytes for gradient in earlier))
        with torch.set_grad_enabled(run.trained):
            packed, shared = _pack(tokens, options)
            if chunk.last:
                outputs = module.outputs(
                    packed, hidden, chunk=chunk, sampling_mask=mask, shared=shared, distillation=distillation
                )
            else:
                outputs = (module(packed, hidden, chunk=chunk),)
                marks.before(outputs[0])
            if run.trained:
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        marks.behind()
    return marks.parts(trained=run.trained)


class _Marks:
    """The peaks and the live bytes at the borders of a chunk's parts.

    Attributes:
        forward: In front of each layer and of the end: the most bytes since the last mark, and the bytes now.
        backward: Behind the backward of the end, of each layer and of the front: the most bytes since the last mark,
            and the gradients of weights so far.
    """

    def __init__(self, module: PackedModel, chunk: Chunk, live: LiveBytes, earlier: int) -> None:
        self.module, self.live, self.earlier = module, live, earlier
        self.forward: list[tuple[int, int]] = []
        self.backward: list[tuple[int, int]] = []
        parts = [module.model.layers[str(number)] for number in chunk.layers]
        for part in [*parts, module.model.norm] if chunk.last else parts:
            part.register_forward_pre_hook(lambda _, arguments: self.before(arguments[0]))

    def before(self, hidden: Tensor) -> None:
        """Mark the front of a part, with its input, whose gradient is the end of its backward."""
        self.forward.append((self.live.cut(), self.live.bytes))
        if hidden.requires_grad:
            hidden.register_hook(self.behind)

    def behind(self, _: Tensor | None = None) -> None:
        """Mark the end of a part's backward."""
        gradients = sum(p.grad.nbytes for p in self.module.parameters() if p.grad is not None)
        self.backward.append((self.live.cut(), gradients - self.earlier))

    def parts(self, *, trained: bool) -> list[PartBytes]:
        """Return the bytes of the parts, the front first."""
        if not trained:
            return [PartBytes(0, peak, 0) for peak, _ in [*self.forward, *self.backward]]
        held = [live_bytes for _, live_bytes in self.forward]
        # Layers before the first adapter have no backward.
        without = len(held) + 1 - len(self.backward)
        backward = [*self.backward, *[(0, self.backward[-1][1])] * without]
        parts, done = [], 0
        for now, before, (peak, gradients) in zip([held[-1], *held[::-1]], [*held[::-1], 0], backward, strict=True):
            parts.append(PartBytes(now - before, peak - now - done, gradients - done))
            done = gradients
        return parts[::-1]


def _pack(tokens: int, options: MemoryOptions) -> tuple[PackedSequence, SharedPrefixes | None]:
    """Return a pack on the meta device; with `repeated`, its tokens attend to repeated tokens of prompts, too."""
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    bounds = torch.empty(2, dtype=torch.int32, device="meta")
    # The length of the sequences decides no bytes, and models refuse long ones.
    if not options.repeated:
        return PackedSequence(ids, torch.empty_like(ids), bounds, 1), None
    keys = SharedKeys(torch.empty(options.tokens, dtype=torch.int64, device="meta"), bounds.clone(), options.tokens)
    packed = PackedSequence(ids, torch.empty_like(ids), bounds, 1, shared_keys=keys)
    return packed, SharedPrefixes(packed, torch.empty_like(ids), ids, (tokens,))
