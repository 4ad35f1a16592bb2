"""Say which pieces of canonical tensors make up every local tensor of a place.

`layout_for` reads a family's entry (`ckpt.layout.families`) with a configuration. The result is pure data, without
file, process group or device. `Layout.at(place)` gives a place's local tensors, each a `Block` of pieces.
"""

import dataclasses
import functools
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from ckpt.files.folder import Checkpoint
from ckpt.layout.blocks import DoesNotDivide, SizedRow, dimensions
from ckpt.layout.config import (
    PREDICTION_LAYERS,
    Config,
    ConfigLike,
    count_or_zero,
    integer,
    is_weights,
    load_config,
    refuse_unread,
    text_config,
    with_plain_weights,
)
from ckpt.layout.families import family_of
from ckpt.layout.families.table import ROLES, TARGETS, Family, Layers, Role, Row, Target
from ckpt.layout.families.towers import tower_names
from ckpt.layout.labels import labels_of
from ckpt.layout.layer_kinds import layer_kinds
from ckpt.layout.pieces import Block, Canonical, Shape, other_order
from ckpt.layout.place import Cost, Grid, LayerPlacement, Place, is_integer, place_layers, split_by_cost

# The largest product of layers and experts; a damaged configuration with more would take minutes to read.
_MOST_MATRICES = 1_000_000
_OPTIONS = ("target", "role", "layers", "vocab_multiple", "transposes")  # in the fingerprint
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Layout:
    """The local tensors of every place, for one model on one target. Make one with `layout_for`.

    Attributes:
        family: The architecture's entry.
        target: The module whose names and order the local tensors have.
        role: "causal_lm", "value" or "causal_lm_with_value".
        config: The Hugging Face configuration, as given.
        layers: The number of layers of each pipeline chunk; None: by cost (`ckpt.layout.place.split_by_cost`).
        vocab_multiple: Each rank's vocabulary rows are padded up to a multiple of this.
        carried: Shapes of the tensors carried whole (a vision tower), read from a checkpoint.
        prediction_layers: The number of multi-token-prediction layers, which lie on the last stage.
        predicts: Whether these layers are computed: the last of several chunks then holds the embedding, too.
        num_labels: The rows of the value head.
        transposes: Whether saves write the `transposable` matrices in the other order, as the source does
            (`ckpt.layout.pieces.other_order`).
        kept: Plans of transfers between ranks, kept for the next transfer of the same tensors.

    Raises:
        ValueError: A config field is missing, unusable or not described by the family's entry.
    """

    family: Family
    target: Target
    role: Role
    config: Config
    layers: LayerPlacement = None
    vocab_multiple: int = 1
    carried: Mapping[str, Shape] = field(default_factory=dict)
    prediction_layers: int = 0
    predicts: bool = False
    transposes: bool = False
    num_labels: int = 1
    _places: dict[Place, dict[str, Block]] = field(init=False, repr=False, compare=False, default_factory=dict)
    kept: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target={self.target!r} is unknown; use one of {TARGETS}")
        if self.role not in ROLES:
            raise ValueError(f"role={self.role!r} is unknown; use one of {ROLES}")
        if self.role == "causal_lm_with_value" and self.target != "parallel":
            raise ValueError(
                f"role={self.role!r} has two heads, and a GPTModel has one output layer; use target='parallel', or one "
                "of role='causal_lm' and role='value'"
            )
        if self.prediction_layers and not self.may_predict:
            raise ValueError(
                f"prediction_layers={self.prediction_layers}: {self.family.name} with target={self.target!r} and "
                f"role={self.role!r} has no multi-token-prediction layers; leave them out"
            )
        if not is_integer(self.vocab_multiple) or self.vocab_multiple < 1:
            raise ValueError(f"vocab_multiple={self.vocab_multiple!r} must be an integer of at least 1")
        refuse_unread(self.text, self.family.fields, self.family.name)
        absent = [row for row in self.family.rows if self._active(row) and not row.local_name(self.target, 0, 0)]
        if absent:
            names = ", ".join(name for row in absent for name in row.sources)
            raise ValueError(
                f"target={self.target!r}: Megatron-Core has no tensor for {names} of {self.family.name}; use "
                "target='parallel'"
            )
        if (self.num_layers + self.prediction_layers) * max(1, self.num_experts) > _MOST_MATRICES:
            raise ValueError(
                f"num_hidden_layers={self.num_layers} and {self.prediction_layers} prediction layers with "
                f"{self.num_experts} experts are more than any model has; correct config.json"
            )
        _ = self.canonical  # reading it checks the sizes

    @functools.cached_property
    def text(self) -> Config:
        """The language model's configuration with its defaults filled in."""
        return {**text_config(self.config), "num_labels": self.num_labels}

    @functools.cached_property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return integer(self.text, "num_hidden_layers")

    @functools.cached_property
    def num_experts(self) -> int:
        """The number of routed experts; 0 for a dense model."""
        field = self.family.experts
        may_have = self.family.has_experts and (not field or self.text.get(field))
        return count_or_zero(self.text, "num_experts") if may_have else 0

    @property
    def predictions(self) -> int:
        """The number of multi-token-prediction layers in complete files; such a layer has the last layer's rows."""
        if not self.family.predicting or "linear" in self.kinds(self.num_layers - 1):
            return 0
        unstated = self.text[PREDICTION_LAYERS] is None and bool(self.family.prediction)
        return 1 if unstated else count_or_zero(self.text, PREDICTION_LAYERS)

    @property
    def may_predict(self) -> bool:
        """Return whether this target and role can have the model's multi-token-prediction layers."""
        return self.predictions > 0 and self.target == "parallel" and self.role != "value"

    def with_prediction_layers_of(self, names: Collection[str]) -> "Layout":
        """Return the layout with the config's multi-token-prediction layers if `names` has one of their tensors.

        transformers saves the count and no such layer.
        """
        prefix = self.family.prediction or f"model.layers.{self.num_layers}."
        held = self.may_predict and any(name.startswith(prefix) for name in names)
        return dataclasses.replace(self, prediction_layers=self.predictions if held else 0)

    @property
    def transposed(self) -> frozenset[str]:
        """Return the tensors that saves write with their last two dimensions exchanged."""
        return frozenset(name for name, entry in self.canonical.items() if entry.transposable and self.transposes)

    @property
    def tied(self) -> bool:
        """Return whether the head is the embedding."""
        return self.family.ties_embeddings(self.config)

    def kinds(self, layer: int) -> tuple[Layers, ...]:
        """Return the values of `Row.layers` that are true of a layer."""
        return layer_kinds(self.family, self.text, layer, self.num_layers, has_experts=self.num_experts > 0)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a short text that is the same on ranks with the same layout."""
        shapes = zlib.crc32(repr([(name, entry.shape) for name, entry in self.canonical.items()]).encode())
        # A subclass for models without a table has no target.
        options = {name: getattr(self, name, None) for name in _OPTIONS}
        return f"{self.config.get('model_type')}, {options}, shapes {shapes:08x}"

    def at(self, place: Place) -> dict[str, Block]:
        """Return the local tensors of `place`, name -> `Block`.

        Raises:
            ValueError: Heads, layers or experts do not divide over the grid; names the values and the values that work.
        """
        if place not in self._places:
            self._check(place.grid)
            self._places[place] = dict(self._local(place))
        return self._places[place]

    def chunk_layers(self, grid: Grid) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each pipeline chunk of `grid`."""
        layers = split_by_cost(*self._costs, grid.chunks) if self.layers is None else self.layers
        return place_layers(self.num_layers, grid.chunks, layers)

    @property
    def active_share(self) -> Fraction:
        """Return the share of the routed experts that a token goes to; without experts 1."""
        return Fraction(count_or_zero(self.text, "num_experts_per_tok") or 1, max(1, self.num_experts))

    @functools.cached_property
    def _costs(self) -> tuple[list[Cost], Cost, Cost]:
        """The costs of each layer, of the first chunk's other tensors, and of the last chunk's."""
        share = self.active_share

        def cost(layers: Sequence[int], *, first: bool = False, last: bool = False) -> Cost:
            rows = [row for row, _, _ in self._walk(layers, first=first, last=last)]
            # A token goes to some of the experts, and looks its embedding up.
            looked_up = [first or row.row.where == "chunk" for row in rows]
            idle = [
                is_lookup or (row.row.where == "predicting" and not self.predicts)
                for is_lookup, row in zip(looked_up, rows, strict=True)
            ]
            shares = (0 if is_idle else share if row.of_experts else 1 for row, is_idle in zip(rows, idle, strict=True))
            return Cost(
                int(sum(row.numel * row_share for row, row_share in zip(rows, shares, strict=True))),
                sum(row.numel for row in rows if row.row.copy_of is None),
            )

        whole = [cost((layer,)) for layer in range(self.num_layers)]
        tower = sum(math.prod(shape) for shape in self.carried.values())
        embedding = cost((), first=True)
        return whole, Cost(embedding.computed, embedding.held + tower), cost((), last=True)

    def is_optional(self, block: Block) -> bool:
        """Return whether a rank and a file may lack a local tensor."""
        return all(self.canonical[name].optional for name in block.names)

    def is_carried(self, block: Block) -> bool:
        """Return whether a local tensor is carried whole, without a known structure and dtype."""
        return any(self.canonical[name].carried for name in block.names)

    def missing_carried(self) -> list[str]:
        """Return the names of the vision tower's tensors that this layout does not carry."""
        every = tower_names(self.family.tower, self.config.get("vision_config"))
        return [name for name in every if name not in self.carried]

    def _active(self, row: Row) -> bool:
        if self.target not in row.targets or self.role not in row.roles:
            return False
        if row.tied != "any" and (row.tied == "yes") != self.tied:
            return False
        if row.when is None:
            return True
        negated, flag = row.when.startswith("not "), row.when.removeprefix("not ")
        return self.family.flag(flag, self.text) != negated

    @functools.cached_property
    def _rows(self) -> list[SizedRow]:
        """The rows of this model's layers and of both of its ends."""
        kinds = {kind for layer in range(self.num_layers) for kind in self.kinds(layer)}
        rows = [*self.family.rows]
        if self.prediction_layers:
            like = self.kinds(self.num_layers - 1)
            of_layer = (row for row in rows if row.where == "layers" and row.layers in like)
            rows += [row.predicting(self.family.prediction) for row in of_layer]
            rows += [row for row in self.family.predicting if row.where != "last" or self.predicts]
        sized = []
        for row in rows:
            if row.layers in kinds and self._active(row):
                sources = {name: dimensions(shape, self.text) for name, shape in row.sources.items()}
                experts = self.num_experts if row.of_experts else 0
                groups = dimensions(row.interleaved, self.text)[0][0].count if row.interleaved else 1
                sized.append(SizedRow(row, self.family, self.target, sources, experts, self.vocab_multiple, groups))
        return sized

    def _walk(self, layers: Sequence[int], *, first: bool, last: bool) -> Iterator[tuple[SizedRow, int, int]]:
        """Yield (row, layer in the model, layer in the chunk) for a chunk that has these layers and ends."""
        for row in self._rows:
            if row.row.where == "first" and first:
                yield row, 0, 0
            elif row.row.where == "chunk" and layers:
                yield row.of_layers(layers, self.num_layers), layers[0], 0
        for index, layer in enumerate(layers):
            kinds = self.kinds(layer)
            for row in self._rows:
                if row.row.where == "layers" and row.row.layers in kinds:
                    yield row, layer, index
        for row in self._rows:
            # A single chunk holds the embedding once.
            if row.row.where == "last" and last and not (EMBEDDING in row.row.sources and first):
                yield row, 0, 0
        held = ("predicting",) * last + ("predicting_first",) * first
        for layer in range(self.num_layers, self.num_layers + self.prediction_layers):
            for row in self._rows:
                if row.row.where in held:
                    yield row, layer, 0

    @functools.cached_property
    def canonical(self) -> dict[str, Canonical]:
        """Every canonical tensor of the model, in the model's order."""
        tensors = {}
        for sized, layer, _ in self._walk(range(self.num_layers), first=True, last=True):
            row = sized.row
            for (name, *others), shape in sized.canonical(layer):
                aliases = tuple(others)
                tensors[name] = Canonical(shape, row.optional, aliases, row.transposable, row.keep_dtype, row.copy_of)
        for name, shape in self.carried.items():
            aliases = tuple(other for other in self.family.file_names(name) if other != name)
            tensors[name] = Canonical(tuple(shape), aliases=aliases, carried=True)
        return tensors

    def _local(self, place: Place) -> Iterator[tuple[str, Block]]:
        chunks = self.chunk_layers(place.grid)
        first, last = place.chunk == 0, place.chunk == len(chunks) - 1
        for row, layer, index in self._walk(chunks[place.chunk], first=first, last=last):
            yield from row.local(place, layer, index)
        for name, shape in self.carried.items() if first else ():
            yield name, Block.whole(name, shape)

    def require_tp(self, tp: int, etp: int | None = None) -> None:
        """Refuse a size of tensor parallelism over which a size of the model does not divide.

        Args:
            tp: The size of tensor parallelism.
            etp: The split of each expert's matrices; None: as `tp`.

        Raises:
            ValueError: Names the model's size, and all sizes of tensor parallelism that the model allows.
        """

        def misfit(tp: int, etp: int | None) -> DoesNotDivide | None:
            place = Place(tp=(0, tp), etp=None if etp is None else (0, etp))
            try:
                for row in self._rows:
                    next(row.local(place), None)
            except DoesNotDivide as error:
                return error
            return None

        error = misfit(tp, etp)
        if error is None:
            return
        if error.axis == "etp":
            fits = [size for size in range(1, (etp or 1) + 1) if misfit(tp, size) is None]
        else:
            heads = integer(self.text, "num_attention_heads")
            fits = [size for size in range(1, heads + 1) if heads % size == 0 and misfit(size, etp) is None]
        raise ValueError(f"{error}; use {error.axis} in {{{', '.join(map(str, fits))}}}")

    def _check(self, grid: Grid) -> None:
        """Refuse a grid over which heads, layers or experts do not divide."""
        self.chunk_layers(grid)
        if not self.num_experts and (grid.ep > 1 or grid.etp not in (None, 1, grid.tp)):
            sizes = " and ".join(
                f"{axis}={n}" for axis, n in (("ep", grid.ep), ("etp", grid.etp)) if n not in (1, None)
            )
            raise ValueError(f"{sizes} would divide experts, and this {self.family.name} model has none; leave it out")
        if (count := self.num_experts) % grid.ep:
            fits = ", ".join(str(size) for size in range(1, min(count, 1024) + 1) if count % size == 0)
            raise ValueError(f"{count} experts are not divisible by ep={grid.ep}; use ep in {{{fits}}}")
        self.require_tp(grid.tp, grid.etp)


def layout_for(
    config: ConfigLike | Checkpoint,
    target: Target = "parallel",
    role: Role = "causal_lm",
    *,
    layers: LayerPlacement = None,
    vocab_multiple: int = 1,
    num_labels: int | None = None,
) -> Layout:
    """Return the layout of a model on a target.

    Args:
        config: The Hugging Face configuration: a mapping, an object with `to_dict()`, or a checkpoint (a folder, one
            file of weights, or an opened checkpoint). The headers of a checkpoint are read, too, for a vision tower and
            for multi-token-prediction layers.
        target: "parallel": the native layers (`rl_models.CausalLM`'s state dict); "megatron": a Megatron-Core 0.16
            GPTModel of the local spec; "megatron_te": of the Transformer Engine spec.
        role: "causal_lm"; "value": no language-model head, but `score.weight` [num_labels, H] (and `score.bias` where
            there is one); or "causal_lm_with_value": both heads (target "parallel" alone).
        layers: The number of layers of each pipeline chunk; None: by cost (`ckpt.layout.place.split_by_cost`).
        vocab_multiple: Pad each rank's vocabulary rows up to a multiple of this (Megatron's
            `make_vocab_size_divisible_by`).
        num_labels: The rows of a value head (None: as a checkpoint has them, else 1).

    Returns:
        The layout; `layout.at(Place(...))` gives a place's tensors.

    Raises:
        ValueError: The architecture is unknown, or a config field is missing or would change the layout in a way that
            the family's entry does not describe; names the field and the fix.
    """
    if isinstance(config, str | os.PathLike) and (Path(config).is_dir() or is_weights(config)):
        config = Checkpoint(config)
    loaded = with_plain_weights(config.config if isinstance(config, Checkpoint) else load_config(config))
    family = family_of(loaded)
    labels = num_labels or 1
    if isinstance(config, Checkpoint) and role != "causal_lm":
        labels = labels_of(config, num_labels)
    layout = Layout(family, target, role, loaded, layers, vocab_multiple, num_labels=labels)
    if not (family.carried or layout.may_predict) or not isinstance(config, Checkpoint):
        return layout
    shapes = config.shapes
    tower = [name for name in shapes if name.startswith(family.carried_prefixes)]
    carried = {family.file_names(name)[0]: shapes[name] for name in tower}
    layout = dataclasses.replace(layout, carried=carried, transposes=other_order(layout.canonical, shapes) == "kept")
    return layout.with_prediction_layers_of(shapes)
