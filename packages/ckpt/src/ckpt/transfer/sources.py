"""Describe files as pieces of canonical tensors: a Hugging Face, a sharded or a Megatron-Core checkpoint.

A sharded checkpoint has one safetensors file for each place of a grid, with that place's local tensors. A folder has
config.json, `layout.json` (target, role, grid, placement) and `shard-00000-of-0000N.safetensors`, the places in the
order of `Grid.places()`, each with that place's tensors under their local names.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt.files.contents import LAYOUT
from ckpt.files.folder import Checkpoint
from ckpt.files.header import read_header
from ckpt.layout.config import MOST_LENGTH, load_config, read_json_file
from ckpt.layout.families import family_of
from ckpt.layout.model_layout import Layout, layout_for
from ckpt.layout.pieces import Box, cover_problem
from ckpt.layout.place import Grid
from ckpt.transfer.holdings import check_names
from ckpt.transfer.match import detect_role, in_canonical_order, match
from ckpt.transfer.megatron import open_megatron, step_folder
from ckpt.transfer.tensor_files import Source
from ckpt.transfer.tied import tied_names

# A folder, a file, or a Hugging Face checkpoint that is open.
Openable = str | os.PathLike[str] | Checkpoint


def open_source(
    path: Openable,
    layout: Layout | None = None,
    *,
    pickled: bool = False,
    copy_from: str | os.PathLike[str] | None = None,
) -> Source:
    """Open a Hugging Face folder, a sharded folder, a run of Megatron-Core, or a file of weights.

    A `Checkpoint` is not read again. The files must hold the tensors of `layout`; None: the layout of the config, in
    the role that the heads show. `pickled`: see `Checkpoint`. `copy_from`: see `open_megatron`.

    Raises:
        ValueError: As `Checkpoint.open`, `match`, `open_megatron`; or a sharded folder is broken, or of another model.
    """
    if not isinstance(path, Checkpoint) and (step := step_folder(path)):
        return open_megatron(step, layout, copy_from)
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
