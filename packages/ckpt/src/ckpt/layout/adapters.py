"""`AdapterLayout`: the low-rank adapters (LoRA) of a model's weights on the native layers, as pieces of PEFT's tensors.

An adapter's tensors follow from the pieces of the weight that it changes: B has the weight's rows, A its columns. The
canonical tensors have PEFT's names without the prefix "base_model.model.". Layers are named as the modules of
transformers, whose names differ from the names in files for some families:

    a linear layer     X.lora_A.weight [r, I], X.lora_B.weight [O, r], for each Hugging Face layer X in a fused weight
    the embedding      X.lora_embedding_A [r, V], X.lora_embedding_B [H, r]
    stacked experts    X.lora_A.weight [E r, I], X.lora_B.weight [O, r, E], in files [O, r E]. A factor that all experts
                       of a layer share is [r, I] or [O, r, 1], and files repeat it for each expert.

On the native layers `Y.lora.A` holds the A of the fused layers one after another, and `Y.lora.B` their rows. The
linears of Megatron-Core have the same tensors; there the rows of B are not in the order of the weight's.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Block, Box, Canonical, Piece, Shape
from ckpt.layout.place import Place

EXPERTS = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")
_ROUTER, _EMBEDDING = ".mlp.gate.weight", "model.embed_tokens.weight"
# Layers of mixtures that PEFT's `target_modules` do not reach, see `peft_targets`.
_TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
# Value heads have no adapters and are trained whole.
HEADS = ("score.weight", "score.bias")

# (canonical weights, box, values [N, ...] of this box in each of the N weights) -> the values with the adapter merged.
# Several weights are neighbouring experts of a layer.
Change = Callable[[Sequence[str], Box, Tensor], Tensor]


def _whole(layout: Layout) -> Iterator[tuple[bool, str, Block]]:
    """Yield the local tensors of a whole model, and whether each is of a decoder layer.

    Multi-token-prediction layers are left out, which PEFT's models do not have, and tables that chunks divide.
    """
    rows = layout._walk(range(layout.num_layers), first=True, last=True)
    left_out = ("predicting", "predicting_first", "chunk")
    for row, layer, index in (entry for entry in rows if entry[0].row.where not in left_out):
        for name, block in row.local(Place(), layer, index):
            yield row.row.where == "layers", name, block


def adaptable(layout: Layout) -> tuple[dict[str, list[str]], set[str]]:
    """Return the layers that can have an adapter: local weight -> names of transformers' layers in it; and all linears.

    The linears are the projections of the decoder layers, without routers and routed experts. A layer to which PEFT
    gives no adapter is left out.
    """
    layers: dict[str, list[str]] = {}
    linear: set[str] = set()
    left_out = (_ROUTER, *layout.family.without_adapter)
    for in_layer, local, block in _whole(layout):
        if local.endswith(EXPERTS):
            layers[local] = [_expert_name(layout, local, block)]
        elif (
            len(block.shape) == 2 and local.endswith(".weight") and not local.endswith(left_out) and local not in HEADS
        ):
            layers[local] = [_layer_name(layout, name) for name in block.names]
            linear |= set(layers[local]) if in_layer else set()
    return layers, linear


def _layer_name(layout: Layout, weight: str) -> str:
    """Return the name of the layer of transformers that has a weight of the files."""
    return layout.family.module_name(weight).removesuffix(".weight")


def _expert_name(layout: Layout, local: str, block: Block) -> str:
    """Return the name of stacked experts in transformers, whose files may have a tensor for each expert."""
    (piece, *_) = block.pieces
    name = local.replace(".mlp.", f".{layout.family.expert_module}.")
    if piece.canonical_range is not None and len(piece.canonical_range) == len(block.shape):
        name = piece.name
        if not name.endswith(EXPERTS):
            # GraniteMoE's files have the names of older versions of transformers.
            name = name.rsplit(".", 2)[0] + local[local.rindex(".experts.") :]
    return layout.family.module_name(name)


@dataclass(frozen=True)
class _Source:
    """The part of an adapter for a canonical weight: rows of B from `first` on, for experts from number `expert` on."""

    down: str
    up: str
    kind: str
    first: int = 0
    expert: int = 0


class AdapterLayout(Layout):
    """The layout of the adapters of a model's `chosen` layers (names of `adaptable`), of one rank r.

    A value head belongs to them, because it is trained with them.

    Attributes:
        base: The layout of the model, with target "parallel".
        placed: The layout of the model that has the adapters (default: `base`). On another target than "parallel" only
            linears have adapters.
        rank: r.
        chosen: The names of the adapted layers.
        settings: The fields of adapter_config.json beside the rank and the names: `lora_alpha`, `use_rslora`, ...; and
            `shared_experts`: all experts of a layer share A of gate_up and B of down.
        repeated: The canonical tensors that files repeat for each expert.
        fused: A canonical weight -> all canonical weights in its local tensor, also weights of other ranks.
    """

    base: Layout
    placed: Layout
    rank: int
    chosen: frozenset[str]
    settings: Mapping[str, Any]
    repeated: frozenset[str]
    fused: Mapping[str, tuple[str, ...]]

    def __init__(
        self,
        base: Layout,
        chosen: Collection[str],
        rank: int,
        settings: Mapping[str, Any],
        placed: Layout | None = None,
    ) -> None:
        unknown = set(chosen).difference(*adaptable(base)[0].values())
        if unknown:
            raise ValueError(f"{min(unknown)!r} is no layer that can have an adapter; use names of adaptable(base)[0]")
        placed = placed or base
        fields = {"base": base, "placed": placed, "chosen": frozenset(chosen), "rank": rank, "settings": dict(settings)}
        fields["fused"] = {name: block.names for _, _, block in _whole(placed) for name in block.names}
        shared = {name: getattr(base, name) for name in ("family", "target", "role", "config")}
        for name, value in {**fields, **shared, "kept": {}, "_places": {}}.items():
            object.__setattr__(self, name, value)
        shapes: dict[str, list[int]] = {}
        repeated: set[str] = set()
        for _, local, block in _whole(base):
            for factor, adapter in self._of(local, block, Place()):
                repeated |= set(adapter.names) if self._is_shared(factor) else set()
                for piece in adapter.pieces:
                    stops = [stop for _, stop in piece.canonical_range or ()]
                    shapes[piece.name] = [max(pair) for pair in zip(shapes.get(piece.name, stops), stops, strict=True)]
        canonical = {name: Canonical(tuple(shape), optional=name in HEADS) for name, shape in shapes.items()}
        object.__setattr__(self, "canonical", canonical)
        object.__setattr__(self, "repeated", frozenset(repeated))

    def _is_shared(self, factor: str) -> bool:
        """Say whether a local tensor is a factor that all experts of a layer share."""
        return bool(self.settings.get("shared_experts")) and factor.endswith(("up_proj_lora.A", "down_proj_lora.B"))

    def stored_shape(self, name: str) -> Shape:
        """Return the shape of a canonical tensor with its repetitions: `[E r, I]` or `[O, r, E]`."""
        shape, experts = self.canonical[name].shape, self.base.num_experts
        if name not in self.repeated:
            return shape
        return (shape[0] * experts, shape[1]) if len(shape) == 2 else (*shape[:2], experts)

    def in_file(self, name: str, tensor: Tensor) -> Tensor:
        """Return a canonical tensor as PEFT's files have it."""
        if name in self.repeated:
            experts = self.base.num_experts
            tensor = tensor.repeat(experts, 1) if tensor.dim() == 2 else tensor.expand(-1, -1, experts)
        return tensor.reshape(file_shape(tuple(tensor.shape)))

    def from_file(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of PEFT's files as the canonical tensor; refuse repetitions that differ."""
        shape = self.canonical[name].shape
        values = tensor.view(self.stored_shape(name))[tuple(slice(side) for side in shape)].contiguous()
        if name in self.repeated and not torch.equal(self.in_file(name, values), tensor):
            raise ValueError(
                f"{name} differs between experts, and shared_experts says that they share it; remove shared_experts "
                "from adapter_config.json to read each expert's own"
            )
        return values

    def at(self, place: Place) -> dict[str, Block]:
        """Return the local tensors of the adapters at `place`, and the value head's."""
        if place not in self._places:
            blocks = (self._of(local, block, place) for local, block in self.placed.at(place).items())
            self._places[place] = {name: adapter for of_weight in blocks for name, adapter in of_weight}
        return self._places[place]

    def _of(self, local: str, block: Block, place: Place) -> Iterator[tuple[str, Block]]:
        """Yield the local tensors of the adapter of one local weight."""
        if any(name in HEADS for name in block.names):
            yield local, block
        elif local.endswith(EXPERTS):
            if _expert_name(self.base, local, block) in self.chosen:
                yield from self._of_experts(local, block, place)
        elif local == _EMBEDDING:
            if _layer_name(self.base, local) in self.chosen:
                yield from self._of_embedding(block)
        elif local.endswith(".weight"):
            yield from self._of_linear(local, block)

    def adapted(self, block: Block) -> list[str]:
        """Return the adapted weights in a local tensor, in the order of their parts of A and of B."""
        every = self.fused.get(block.names[0], ()) if block.names else ()
        return [name for name in every if self.layer(name) in self.chosen]

    def layer(self, weight: str) -> str:
        """Return the name of the layer that has a weight of the files."""
        return _layer_name(self.base, weight)

    def _of_linear(self, local: str, block: Block) -> Iterator[tuple[str, Block]]:
        names = self.adapted(block)
        if not names:
            return
        r, down, up = self.rank, dict[Piece, None](), list[Piece]()
        rows = 0
        for number, weight in enumerate(names):
            name, here = self.layer(weight), (number * r, (number + 1) * r)
            for piece in block.pieces:
                # A has all its parts on every rank, also those without a row here.
                there = piece.canonical_range
                if there is not None:
                    down[Piece(f"{name}.lora_A.weight", ((0, r), there[1]), (here, piece.local_range[1]))] = None
                if piece.name == weight:
                    start, stop = piece.local_range[0]
                    box = None if there is None else (there[0], (0, r))
                    up.append(Piece(f"{name}.lora_B.weight", box, ((rows, rows + stop - start), (0, r))))
                    rows += stop - start
        path = local.removesuffix("weight")
        yield f"{path}lora.A", Block((len(names) * r, block.shape[1]), tuple(down))
        yield f"{path}lora.B", Block((rows, r), tuple(up))

    def _of_embedding(self, block: Block) -> Iterator[tuple[str, Block]]:
        r, (rows, hidden) = self.rank, block.shape
        name, local = self.layer(block.names[0]), _EMBEDDING.removesuffix("weight")
        turned = [
            Piece(
                f"{name}.lora_embedding_A",
                None if piece.canonical_range is None else ((0, r), piece.canonical_range[0]),
                ((0, r), piece.local_range[0]),
            )
            for piece in block.pieces
        ]
        yield f"{local}lora.A", Block((r, rows), tuple(turned))
        yield f"{local}lora.B", Block.whole(f"{name}.lora_embedding_B", (hidden, r))

    def _of_experts(self, local: str, block: Block, place: Place) -> Iterator[tuple[str, Block]]:
        r, count = self.rank, block.shape[0]
        rows, columns = self._sides()
        first = place.ep[0] * count
        (of_A, in_A), (of_B, in_B) = (
            ((0, 1), 1) if self._is_shared(f"{local}_lora.{factor}") else ((first, first + count), count)
            for factor in "AB"
        )
        path = self._expert_path(local, block)
        down, up, offset, last = dict[Piece, None](), dict[Piece, None](), 0, ""
        for piece in block.pieces:
            assert piece.canonical_range is not None
            if piece.local_range[0][0]:
                break  # all experts are divided alike
            there = piece.canonical_range
            if piece.name != last and last:
                offset += self.base.canonical[last].shape[rows - 3]
            last, (start, stop) = piece.name, there[rows - 3]
            there_up = ((start + offset, stop + offset), (0, r), of_B)
            there_down = ((of_A[0] * r, of_A[1] * r), there[columns - 3])
            up[Piece(f"{path}.lora_B.weight", there_up, (piece.local_range[rows], (0, r), (0, in_B)))] = None
            down[Piece(f"{path}.lora_A.weight", there_down, ((0, in_A * r), piece.local_range[columns]))] = None
        yield f"{local}_lora.A", Block((in_A * r, block.shape[columns]), tuple(down))
        yield f"{local}_lora.B", Block((block.shape[rows], r, in_B), tuple(up))

    def _sides(self) -> tuple[int, int]:
        """Return the dims of the outputs and the inputs of stacked experts; gpt-oss stacks transposed weights."""
        shapes = [shape for row in self.family.rows for name, shape in row.sources.items() if name.endswith(EXPERTS[0])]
        return (2, 1) if any(shape.split()[1] == "H" for shape in shapes) else (1, 2)

    def _expert_path(self, local: str, block: Block) -> str:
        """Return the layer of PEFT's tensors; of two parameters of one layer PEFT wraps the second around the first."""
        module, _, last = _expert_name(self.base, local, block).rpartition(".")
        is_inner = last != "down_proj" and f"{module}.down_proj" in self.chosen
        return f"{module}.base_layer" if is_inner else module

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        alpha = float(self.settings["lora_alpha"])
        return alpha / (self.rank**0.5 if self.settings.get("use_rslora") else self.rank)

    def merging(self, tensors: Mapping[str, Tensor]) -> Change:
        """Return the function that merges whole adapters, by canonical name, into boxes of the model's weights.

        A value head in the adapter replaces the value head of the model.

        W + scaling · B A is computed in fp64 and rounded once, so it does not depend on how the weights are divided.
        """
        sources: dict[str, _Source] = {}
        for _, local, block in _whole(self.base):
            sources |= self._sources(local, block)
        copies = ((name, entry.copy_of) for name, entry in self.base.canonical.items())
        sources |= {name: sources[original] for name, original in copies if original in sources}
        # The weights may have their names in files or in transformers.
        sources = {self.base.family.module_name(name): source for name, source in sources.items()}

        def change(names: Sequence[str], box: Box, values: Tensor) -> Tensor:
            if names[0] in HEADS and names[0] in tensors:
                return tensors[names[0]][tuple(slice(*side) for side in box)].to(values).view(values.shape)
            if (source := sources.get(self.base.family.module_name(names[0]))) is None:
                return values
            assert len(names) == 1 or source.kind in ("stack", "turned")
            down, up = (tensors[factor].to(values.device) for factor in (source.down, source.up))
            delta = self._delta(source, down, up, box, len(names))
            return (values.double() + self.scaling * delta.reshape(values.shape)).to(values.dtype)

        return change

    def _delta(self, source: _Source, down: Tensor, up: Tensor, box: Box, count: int) -> Tensor:
        """Return a box of B A in fp64, for `count` weights from the source's on."""
        if source.kind == "embedding":
            return _product(down.T, up.T, box[0], box[1])
        if source.kind == "linear":
            return _product(up, down, box[0], box[1])
        turned = source.kind == "turned"
        row, column = box[-2:][::-1] if turned else box[-2:]
        row = (row[0] + source.first, row[1] + source.first)
        experts = slice(*box[0]) if len(box) == 3 else slice(source.expert, source.expert + count)
        # [E, O, r] and [E, r, I]; a factor that all experts share is stored once.
        stacks = up.permute(2, 0, 1)[:, slice(*row)], down.view(-1, self.rank, down.shape[1])[..., slice(*column)]
        of_B, of_A = ((stack if len(stack) == 1 else stack[experts]).double() for stack in stacks)
        delta = of_B @ of_A
        return delta.mT if turned else delta

    def _sources(self, local: str, block: Block) -> Iterator[tuple[str, _Source]]:
        if local.endswith(EXPERTS):
            if _expert_name(self.base, local, block) not in self.chosen:
                return
            path, (rows, _), seen = self._expert_path(local, block), self._sides(), dict[int, int]()
            # A stack in files has several pieces, of gate and of up.
            numbers = {p.name: p.local_range[0][0] for p in reversed(block.pieces) if p.canonical_range is not None}
            for name, expert in reversed(numbers.items()):
                yield name, _Source(
                    f"{path}.lora_A.weight", f"{path}.lora_B.weight", "turned" if rows == 2 else "stack",
                    seen.get(expert, 0), expert,
                )  # fmt: skip
                seen[expert] = seen.get(expert, 0) + self.base.canonical[name].shape[rows - 3]
            return
        for weight in block.names if local.endswith(".weight") else ():
            if (name := self.layer(weight)) in self.chosen:
                kind = "embedding" if local == _EMBEDDING else "linear"
                ends = ("embedding_A", "embedding_B") if kind == "embedding" else ("A.weight", "B.weight")
                yield weight, _Source(f"{name}.lora_{ends[0]}", f"{name}.lora_{ends[1]}", kind)


def _product(up: Tensor, down: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    return up[slice(*rows)].double() @ down[:, slice(*columns)].double()


def file_shape(shape: Shape) -> Shape:
    """Return the shape of an adapter's tensor in PEFT's files, which flatten the experts' B."""
    return (shape[0], shape[1] * shape[2]) if len(shape) == 3 else shape


def peft_targets(layout: AdapterLayout) -> tuple[list[str], list[str]]:
    """Return the `target_modules` and the `target_parameters` of PEFT's config: in short, or else whole names.

    In a mixture of experts PEFT takes the modules gate_proj, up_proj and down_proj for the routed experts of an older
    transformers, so that dense MLPs and shared experts must be named as parameters. A short name matches the layers
    whose names end with it; the layers of a vision tower would be among them.
    """
    names: dict[bool, dict[str, str]] = {False: {}, True: {}}  # layer -> target
    for local, layers in adaptable(layout.base)[0].items():
        for layer in layers:
            is_stack = local.endswith(EXPERTS)
            is_parameter = is_stack or bool(layout.base.num_experts and layer.endswith(_TAKEN_FOR_EXPERTS))
            names[is_parameter][layer] = layer if is_stack or not is_parameter else f"{layer}.weight"
    modules, parameters = (
        _shortened(targets, layout.chosen, short if not layout.base.family.carried else str)
        for targets, short in ((names[False], _last_part), (names[True], _in_layer))
    )
    return modules, parameters


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _in_layer(name: str) -> str:
    return re.sub(r"^.*\.\d+\.", "", name)


def _shortened(targets: Mapping[str, str], chosen: Collection[str], short: Callable[[str], str]) -> list[str]:
    """Return the targets of the chosen layers, in short where all layers with the same short target are chosen."""
    others = {short(target) for layer, target in targets.items() if layer not in chosen}
    kept = [target for layer, target in targets.items() if layer in chosen]
    return list(dict.fromkeys(target if short(target) in others else short(target) for target in kept))
