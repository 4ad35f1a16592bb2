"""Sharded checkpoints: one safetensors file for each place of a grid, with that place's local tensors.

A folder has config.json, `layout.json` (target, role, grid, placement) and `shard-00000-of-0000N.safetensors`, the
places in the order of `Grid.places()`, each with that place's tensors under their local names.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.atomic import FolderWriter
from ckpt.files.boxio import IOCounter, StagingPool, read_box
from ckpt.files.contents import CONFIG, LAYOUT
from ckpt.files.disk import bytes_in, room_for
from ckpt.files.header import Header, TensorInfo, read_header
from ckpt.files.tensor_bytes import check_bytes
from ckpt.files.unchanged import while_unchanged
from ckpt.files.written_files import write_json
from ckpt.layout.config import MOST_LENGTH, load_config, read_json_file
from ckpt.layout.families import family_of
from ckpt.layout.model_layout import Layout
from ckpt.layout.overlaps import is_dtensor
from ckpt.layout.pieces import Box, cover_problem, full_box
from ckpt.layout.place import Grid, Place
from ckpt.transfer.agreement import agree, all_gather_json
from ckpt.transfer.relay import write_own_file

_VERSION = 2


@dataclass(frozen=True)
class Shards:
    """An opened sharded checkpoint, of which only headers have been read.

    Attributes:
        path: The folder.
        layout: The layout of the tensors.
        grid: The grid whose places have the files.
        headers: Each place's header, in the order of `grid.places()`.
    """

    path: Path
    layout: Layout
    grid: Grid
    headers: list[Header]

    @property
    def files(self) -> dict[Path, int]:
        """The time of each file's last change (`ckpt.files.unchanged`)."""
        return {self.file(index): header.modified_ns for index, header in enumerate(self.headers)}

    def file(self, index: int) -> Path:
        """Return the file of a place."""
        return self.path / shard_name(index, len(self.headers))

    def tensors(self, index: int) -> dict[str, TensorInfo]:
        """Return the tensors of a place: local name -> where it lies."""
        return self.headers[index].tensors


def shard_name(index: int, count: int) -> str:
    """Return the file name of a place."""
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def layout_json(layout: Layout, grid: Grid) -> dict[str, Any]:
    """Return the content of `layout.json`."""
    return {
        "version": _VERSION,
        "target": layout.target,
        "role": layout.role,
        "layers": layout.layers,
        "vocab_multiple": layout.vocab_multiple,
        "carried": {name: list(shape) for name, shape in layout.carried.items()},
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
    "layers": (
        "null, 'balanced', or a list of counts or of lists of layers",
        lambda value: value in (None, "balanced") or _is_list(value) or _is_list(value, _is_list),
    ),
    "vocab_multiple": ("a count", _is_count),
    "carried": (
        "shapes by name",
        lambda value: isinstance(value, dict) and all(map(_is_list, value.values())),
    ),
    "grid": (
        "the sizes of tp, pp, vpp, ep and etp",
        lambda value: isinstance(value, dict) and value.keys() == {"tp", "pp", "vpp", "ep", "etp"},
    ),
}


def _read_facts(file: Path) -> dict[str, Any]:
    """Read layout.json and check the type of every entry.

    Raises:
        ValueError: An entry is missing or of another type; names the file, the entry, its value and the allowed values.
    """
    facts = read_json_file(file)
    if not isinstance(facts, dict):
        raise ValueError(f"{file} holds {type(facts).__name__}, not a JSON object")
    for name, (what, fits) in _FACTS.items():
        if name not in facts:
            raise ValueError(f"{file} has no {name!r}, which must be {what}; copy the file from the original folder")
        if not fits(facts[name]):
            raise ValueError(f"{file}: {name}={facts[name]!r:.200} must be {what}")
    return facts


def open_shards(path: str | os.PathLike[str]) -> Shards:
    """Open a sharded checkpoint and check every header against the layout.

    Raises:
        ValueError: A file is missing or broken, its tensors are not those of its place, or places hold a tensor in
            several dtypes; names the file and the tensor.
    """
    folder = Path(path)
    if not is_sharded(folder):
        raise ValueError(f"{folder} has no {LAYOUT}; pass a folder that save_shards or `ckpt shard` has written")
    config = load_config(folder)
    family = family_of(config)
    facts = _read_facts(folder / LAYOUT)
    try:
        grid = Grid(**facts["grid"])
        layout = Layout(
            family,
            facts["target"],
            facts["role"],
            config,
            facts["layers"],
            facts["vocab_multiple"],
            {name: tuple(shape) for name, shape in facts["carried"].items()},
        )
        layout.chunk_layers(grid)
        lost = layout.missing_carried()
        if lost:
            raise ValueError(f"{len(lost)} tensors of the vision tower are not in it: {lost[:3]}; shard it again")
    except ValueError as error:
        raise ValueError(f"{folder / LAYOUT}: {error}") from None
    absent = next(
        (file for file in (shard_name(i, grid.size) for i in range(grid.size)) if not (folder / file).is_file()), None
    )
    if absent is not None:
        raise ValueError(
            f"{folder / absent} does not exist, and {LAYOUT} says {grid}; copy the missing file into the folder"
        )
    places = list(grid.places())
    shards = Shards(
        folder, layout, grid, [read_header(folder / shard_name(i, len(places))) for i in range(len(places))]
    )
    for index, place in enumerate(places):
        _check_place(shards, index, place)
    _check_types(shards)
    return shards


def _check_place(shards: Shards, index: int, place: Place) -> None:
    blocks, held = shards.layout.at(place), shards.tensors(index)
    missing = [name for name, block in blocks.items() if name not in held and not shards.layout.is_optional(block)]
    unexpected = [name for name in held if name not in blocks]
    wrong = [name for name, info in held.items() if name in blocks and info.shape != blocks[name].shape]
    if missing or unexpected or wrong:
        raise ValueError(
            f"{shards.file(index)} does not hold the tensors of {place}: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}, wrong shape {wrong[:3]}"
        )


def _check_types(shards: Shards) -> None:
    """Refuse places that hold a canonical tensor in several dtypes, or together only a part of an optional tensor."""
    boxes: dict[str, set[Box]] = {}
    types: dict[str, dict[torch.dtype, Path]] = {}
    for index, place in enumerate(shards.grid.places()):
        blocks = shards.layout.at(place)
        for local, info in shards.tensors(index).items():
            for piece in blocks[local].pieces:
                if piece.canonical_range is not None:
                    boxes.setdefault(piece.name, set()).add(piece.canonical_range)
                    types.setdefault(piece.name, {}).setdefault(info.dtype, shards.file(index))
    for name, held in boxes.items():
        problem = cover_problem(sorted(held), shards.layout.canonical[name].shape)
        if problem:
            raise ValueError(f"{shards.path} does not hold all of {name}: {problem}; a place has not saved it")
        if len(types[name]) > 1:
            found = " and ".join(f"{dtype} in {file}" for dtype, file in types[name].items())
            raise ValueError(f"{name} is of several types: {found}; save all places in one")


def save_shards(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    layout: Layout,
    place: Place,
    *,
    group: ProcessGroup | None = None,
    counter: IOCounter | None = None,
) -> None:
    """Write a sharded checkpoint with a file for each place; the folder appears at once.

    The first rank at a place writes. A rank that reaches the folder writes the files of ranks that do not.

    Raises:
        ValueError: The ranks' places are not a whole grid, or tensors do not fit the layout; on every rank.
        OSError: The disk is full; the old checkpoint at `path` is intact.
    """
    messages = all_gather_json(place.to_json(), group)
    held = [Place(**entry) for entry in messages]
    rank = 0 if group is None else group.rank()
    places = list(place.grid.places())

    def check() -> dict[str, Tensor]:
        absent = [str(at) for at in places if at not in held]
        if absent:
            raise ValueError(
                f"no rank of the group stands at {absent[:3]}; save with a group that spans the whole grid"
            )
        blocks = layout.at(place)
        unknown = [name for name in tensors if name not in blocks]
        if unknown:
            raise ValueError(f"{unknown[:3]} are not in the layout at {place}")
        divided = [name for name, tensor in tensors.items() if is_dtensor(tensor)]
        if divided:
            raise ValueError(
                f"{divided[:3]} are DTensors, of which a rank has a part; a place's file holds whole tensors. "
                "Use save_training and save_hf, which take DTensors"
            )
        return {name: tensor.detach() for name, tensor in tensors.items()}

    own = agree(check, group)
    needed = sum(tensor.nbytes for tensor in own.values())
    writer = agree(room_for(needed, Path(path).parent)(lambda: FolderWriter(Path(path)) if rank == 0 else None), group)
    try:
        folder = Path(all_gather_json(None if writer is None else str(writer.path), group)[0])
        count = IOCounter() if counter is None else counter

        def write() -> None:
            mine = held.index(place) == rank
            file = shard_name(places.index(place), len(places)) if mine else None
            write_own_file(folder, file, own, group, count)

        agree(write, group)

        def finish() -> None:
            if writer is not None:
                with room_for(bytes_in(folder), folder.parent):
                    write_json(folder / CONFIG, layout.config)
                    write_json(folder / LAYOUT, layout_json(layout, place.grid))
                    open_shards(folder)
                    writer.commit()

        agree(finish, group)
    except BaseException:
        if writer is not None:
            writer.discard()
        raise


def load_shards(
    path: str | os.PathLike[str],
    place: Place,
    *,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
    check: bool = False,
    counter: IOCounter | None = None,
) -> dict[str, Tensor]:
    """Return a place's tensors, as `save_shards` wrote them; the place must be of the saved grid.

    With `check`, each rank first compares the bytes of its file with the recorded checksums.

    Raises:
        ValueError: The checkpoint is broken or damaged, was replaced meanwhile, or is of another grid (`reshard` it);
            on every rank of `group`.
    """

    def read() -> dict[str, Tensor]:
        shards = open_shards(path)
        places = list(shards.grid.places())
        if place not in places:
            raise ValueError(f"{path} was saved on {shards.grid}, which has no place {place}; use ckpt.reshard first")
        index = places.index(place)
        stagings, count = StagingPool(), IOCounter() if counter is None else counter
        tensors: dict[str, Tensor] = {}
        with while_unchanged(shards.files), open(shards.file(index), "rb", buffering=0) as file:
            if check:
                check_bytes({shards.file(index): shards.headers[index]})
            for name, info in shards.tensors(index).items():
                tensors[name] = tensor = torch.empty(info.shape, dtype=info.dtype, device=device)
                if tensor.numel():
                    read_box(file.fileno(), info, full_box(info.shape), tensor, stagings.on(tensor.device), count)
        return tensors

    return agree(read, group)
