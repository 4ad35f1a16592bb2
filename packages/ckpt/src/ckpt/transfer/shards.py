"""Sharded checkpoints: one safetensors file for each place of a grid, with that place's local tensors.

A folder has config.json, `layout.json` (target, role, grid, placement) and `shard-00000-of-0000N.safetensors`, the
places in the order of `Grid.places()`, each with that place's tensors under their local names.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.files.contents import LAYOUT
from ckpt.layout.config import MOST_LENGTH, load_config, read_json_file
from ckpt.layout.families import family_of
from ckpt.layout.model_layout import Layout
from ckpt.layout.place import Grid

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
