"""Open a step of a training run with its layout, without loading it."""

import dataclasses
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.files.contents import STATE
from ckpt.layout.config import load_config
from ckpt.layout.families.table import ROLES
from ckpt.layout.labels import stored_labels
from ckpt.layout.model_layout import Layout, layout_for
from ckpt.layout.pieces import shapes_of
from ckpt.training.boxes import open_boxes, require_whole
from ckpt.training.checkpoint import open_step
from ckpt.training.runs import LATEST, step_of
from ckpt.transfer.tensor_files import TensorFiles


class SavedStep(NamedTuple):
    """A step of a training run.

    `files` has the weights as `model/NAME` and moments as `optimizer/SLOT/NAME`; `state` is state.json.
    """

    folder: Path
    layout: Layout
    files: TensorFiles
    state: Mapping[str, Any]
    modified: Mapping[Path, int]

    @property
    def slots(self) -> list[str]:
        """The kinds of optimizer state."""
        return sorted({name.split("/")[1] for name in self.files.pieces if name.startswith("optimizer/")})


def is_training(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a training run, or a step of one."""
    return any((Path(path) / name).is_file() for name in (STATE, LATEST))


def open_training(path: str | os.PathLike[str]) -> SavedStep:
    """Open a step's folder, or the latest step of a run's folder.

    Raises:
        ValueError: As `open_step`; or the folder does not hold each element of the weights of its config.json once.
    """
    root, step = Path(path), None
    if (root / STATE).is_file():
        root, step = root.resolve().parent, step_of(root.resolve().name)
    folder, state, modified = open_step(root, step)
    files = open_boxes(folder, state["files"])
    stored = shapes_of(piece for held in files.pieces.values() for _, piece in held)
    shapes = {name.removeprefix("model/"): shape for name, shape in stored.items()}
    weights = {name.removeprefix("model/") for name in files.pieces if name.startswith("model/")}
    layout = _layout_of(folder, weights, stored_labels(shapes))
    towers = {name: shape for name, shape in shapes.items() if name.startswith(layout.family.carried_prefixes)}
    layout = dataclasses.replace(layout, carried=towers)
    known = {name: canonical.shape for name, canonical in layout.canonical.items()}
    # Step counts have one element; the layout has no adapters.
    whole = {name: known.get(name.rpartition("/")[2], shape) if shape else () for name, shape in stored.items()}
    require_whole(files, whole, folder)
    return SavedStep(folder, layout, files, state, modified)


def _layout_of(folder: Path, weights: Set[str], num_labels: int | None) -> Layout:
    """Return the layout of a training checkpoint's model, in the role whose tensors the checkpoint holds."""
    config = load_config(folder)
    if any(".lora_" in name for name in weights):
        return layout_for(config, role="value" if "score.weight" in weights else "causal_lm", num_labels=num_labels)
    for role in ROLES:
        layout = layout_for(config, role=role, num_labels=num_labels).with_prediction_layers_of(weights)
        language_model = {name for name in weights if not name.startswith(layout.family.carried_prefixes)}
        required = {name for name, canonical in layout.canonical.items() if not canonical.optional}
        if required <= language_model <= layout.canonical.keys():
            return layout
    raise ValueError(f"{folder} does not hold the weights that its config.json describes; restore it from a copy")
