"""Describe files as pieces of canonical tensors: a Hugging Face or a sharded checkpoint.

A sharded checkpoint has one safetensors file for each place of a grid, with that place's local tensors. A folder has
config.json, `layout.json` (target, role, grid, placement) and `shard-00000-of-0000N.safetensors`, the places in the
order of `Grid.places()`, each with that place's tensors under their local names.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.files.boxio import view_of
from ckpt.files.contents import LAYOUT
from ckpt.files.disk import while_unchanged
from ckpt.files.folder import Checkpoint
from ckpt.files.header import Header, TensorInfo, read_header
from ckpt.files.tensor_bytes import check_bytes
from ckpt.layout.config import MOST_LENGTH, load_config, read_json_file
from ckpt.layout.families import family_of
from ckpt.layout.model_layout import Layout, layout_for
from ckpt.layout.pieces import Block, Box, Piece, cover_problem, extents, shared
from ckpt.layout.place import Grid
from ckpt.transfer.holdings import check_names
from ckpt.transfer.match import detect_role, in_canonical_order, match
from ckpt.transfer.parallel_reads import Read, read_all
from ckpt.transfer.tied import tied_names

Index = dict[str, list[tuple[str, Piece]]]
# A folder, a file, or a Hugging Face checkpoint that is open.
Openable = str | os.PathLike[str] | Checkpoint


@dataclass
class TensorFiles:
    """The tensors that files hold, as pieces of canonical tensors.

    Attributes:
        headers: The header of each file.
        tensors: Key -> (file, where the tensor lies in the file).
        pieces: Canonical name -> [(key, piece)], each element once.
    """

    headers: dict[Path, Header] = field(default_factory=dict)
    tensors: dict[str, tuple[Path, TensorInfo]] = field(default_factory=dict)
    pieces: Index = field(default_factory=dict)

    @property
    def files(self) -> dict[Path, int]:
        """The time of each file's last change (`ckpt.files.disk`)."""
        return {path: header.modified_ns for path, header in self.headers.items()}

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a canonical tensor."""
        return self.tensors[self.pieces[name][0][0]][1].dtype

    def check(self, rank: int = 0, size: int = 1) -> None:
        """Compare the bytes of the files with their recorded checksums; each of `size` ranks compares a share."""
        with while_unchanged(self.files):
            check_bytes(self.headers, rank, size)

    def reads(self, tensor: Tensor, block: Block) -> Iterator[Read]:
        """Clear the padding of a tensor, and yield the reads that fill the rest."""
        for piece in block.pieces:
            if piece.is_padding:
                view_of(tensor, piece.local_range).zero_()
        for key, copy in shared(block, self.pieces):
            path, info = self.tensors[key]
            yield Read(key, path, info, copy.source_range, view_of(tensor, copy.destination_range))

    def values(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a canonical tensor, however the files divide the tensor."""
        values = torch.empty(extents(box), dtype=dtype)
        read_all(self.reads(values, Block(extents(box), (Piece.of_box(name, box),))))
        return values


@dataclass
class Source(TensorFiles):
    """A Hugging Face or a sharded checkpoint.

    Attributes:
        layout: The layout of the model.
        copies: Canonical name -> [(key, piece)], for further copies at other places.
        tied: The canonical tensors that several pipeline chunks hold.
        grid: The grid of a sharded checkpoint; None for Hugging Face.
    """

    layout: Layout = field(kw_only=True)
    copies: Index = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    grid: Grid | None = None

    def dtype(self, names: tuple[str, ...], local: str, cast: torch.dtype | None) -> torch.dtype:
        """Return the dtype of a local tensor that joins canonical tensors: `cast` where they may be cast, or their own.

        Raises:
            ValueError: The tensors have several dtypes and are not cast.
        """
        dtypes = {self.tensors[key][1].dtype for name in names for key, _ in self.pieces[name]}
        kept = any(self.layout.canonical[name].keep_dtype for name in names)
        if cast is not None and not kept and all(dtype.is_floating_point for dtype in dtypes):
            return cast
        if len(dtypes) > 1:
            raise ValueError(
                f"{local} joins tensors of types {sorted(map(str, dtypes))}; pass dtype= to cast them to one, or save "
                "them in one type"
            )
        return dtypes.pop()


def open_source(path: Openable, layout: Layout | None = None, *, pickled: bool = False) -> Source:
    """Open a Hugging Face folder, a sharded folder, or a file of weights; a `Checkpoint` is not read again.

    The files must hold the tensors of `layout`; None: the layout of the config, in the role that the heads show.
    `pickled`: see `Checkpoint`.

    Raises:
        ValueError: As `Checkpoint.open`, `match`; or a sharded folder is broken, or of another model.
    """
    if not isinstance(path, Checkpoint) and is_sharded(path):
        source = _sharded(Path(path))
        if layout is not None:
            _require_same_model(layout, source.layout)
        return source
    checkpoint = Checkpoint.open(path, pickled=pickled)
    known = layout or layout_for(checkpoint, role=detect_role(checkpoint))
    checkpoint = in_canonical_order(checkpoint, known)
    return Source(checkpoint.headers, checkpoint.tensors, match(checkpoint, known), layout=known)


def _require_same_model(layout: Layout, other: Layout) -> None:
    """Refuse layouts whose canonical tensors differ."""
    for name, canonical in layout.canonical.items():
        counterpart = other.canonical.get(name)
        if counterpart is None or counterpart.shape != canonical.shape:
            difference = "is not" if counterpart is None else f"has shape {counterpart.shape}"
            raise ValueError(
                f"the layouts are of different models: {name} {canonical.shape} {difference} in the other layout"
            )
    extra = [name for name in other.canonical if name not in layout.canonical]
    if extra:
        raise ValueError(f"the layouts are of different models: only the second has {extra[:3]}")


def _sharded(folder: Path) -> Source:
    """Open a sharded checkpoint and check every header against the layout.

    Raises:
        ValueError: A file is missing or broken, its tensors do not fit its place, or places hold a tensor in
            several dtypes or only a part of it; names the file and the tensor.
    """
    layout, grid = read_layout(folder)
    source = Source(layout=layout, tied=tied_names(layout, grid.places()), grid=grid)
    boxes: dict[str, set[Box]] = {}
    types: dict[str, dict[torch.dtype, Path]] = {}
    for index, place in enumerate(grid.places()):
        path = folder / shard_name(index, grid.size)
        source.headers[path] = header = read_header(path)
        blocks = layout.at(place)
        check_names(header.tensors, blocks, layout, f"{place} in {path}")
        for local, info in header.tensors.items():
            if info.shape != blocks[local].shape:
                raise ValueError(f"{local} has shape {info.shape} in {path}, the layout has {blocks[local].shape}")
            key = f"{index}:{local}"
            source.tensors[key] = (path, info)
            for piece in blocks[local].pieces:
                if piece.canonical_range is not None:
                    seen = boxes.setdefault(piece.name, set())
                    index_of_kind = source.copies if piece.canonical_range in seen else source.pieces
                    index_of_kind.setdefault(piece.name, []).append((key, piece))
                    seen.add(piece.canonical_range)
                    types.setdefault(piece.name, {}).setdefault(info.dtype, path)
    for name, files_of_dtypes in types.items():
        problem = cover_problem(sorted(boxes[name]), layout.canonical[name].shape)
        if problem:
            raise ValueError(f"{folder} does not hold all of {name}: {problem}; a place has not saved it")
        if len(files_of_dtypes) > 1:
            listed = " and ".join(f"{dtype} in {file}" for dtype, file in files_of_dtypes.items())
            raise ValueError(f"{name} is of several types: {listed}; save all places in one")
    return source


_VERSION = 3


def shard_name(index: int, count: int) -> str:
    """Return the file name of a place."""
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def layout_json(layout: Layout, grid: Grid) -> dict[str, Any]:
    """Return the content of `layout.json`."""
    return {
        "version": _VERSION,
        "target": layout.target,
        "role": layout.role,
        "layers": [len(layers) for layers in layout.chunk_layers(grid)],
        "vocab_multiple": layout.vocab_multiple,
        "carried": {name: list(shape) for name, shape in layout.carried.items()},
        "prediction_layers": layout.prediction_layers,
        "transposes": layout.transposes,
        "grid": {"tp": grid.tp, "pp": grid.pp, "vpp": grid.vpp, "ep": grid.ep, "etp": grid.etp},
    }


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a sharded checkpoint."""
    return (Path(path) / LAYOUT).is_file()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LENGTH


def _is_list(value: object, of: Callable[[object], bool] = _is_count) -> bool:
    return isinstance(value, list) and all(map(of, value))


# For each entry of layout.json, a description and a check of its value.
_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "version": (f"{_VERSION}, the version that is known", lambda value: _is_count(value) and value == _VERSION),
    "target": ("a text", lambda value: isinstance(value, str)),
    "role": ("a text", lambda value: isinstance(value, str)),
    "layers": ("a list of counts", _is_list),
    "vocab_multiple": ("a count", _is_count),
    "carried": (
        "shapes by name",
        lambda value: isinstance(value, dict) and all(map(_is_list, value.values())),
    ),
    "prediction_layers": ("a count", _is_count),
    "transposes": ("true or false", lambda value: isinstance(value, bool)),
    "grid": (
        "the sizes of tp, pp, vpp, ep and etp",
        lambda value: isinstance(value, dict) and value.keys() == {"tp", "pp", "vpp", "ep", "etp"},
    ),
}


def read_layout(folder: Path) -> tuple[Layout, Grid]:
    """Return the layout and the grid of a sharded checkpoint.

    Raises:
        ValueError: layout.json or config.json is damaged, or a file is missing; names the file and the entry.
    """
    config = load_config(folder)
    family = family_of(config)
    # Older folders lack entries.
    facts = {"prediction_layers": 0, "transposes": False, **read_json_file(folder / LAYOUT)}
    try:
        for name, (what, fits) in _FACTS.items():
            if name not in facts or not fits(facts[name]):
                problem = f"{name}={facts[name]!r:.200}" if name in facts else f"{name!r} is missing, and it"
                raise ValueError(f"{problem} must be {what}; copy the file from the original folder")
        grid = Grid(**facts["grid"])
        layout = Layout(
            family,
            facts["target"],
            facts["role"],
            config,
            facts["layers"],
            facts["vocab_multiple"],
            {name: tuple(shape) for name, shape in facts["carried"].items()},
            facts["prediction_layers"],
            transposes=facts["transposes"],
        )
        layout.chunk_layers(grid)
        lost = layout.missing_carried()
        if lost:
            raise ValueError(f"{len(lost)} tensors of the vision tower are not in it: {lost[:3]}; shard it again")
    except ValueError as error:
        raise ValueError(f"{folder / LAYOUT}: {error}") from None
    files = (folder / shard_name(index, grid.size) for index in range(grid.size))
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise ValueError(f"{absent} does not exist, and {LAYOUT} says {grid}; copy the missing file into the folder")
    return layout, grid
