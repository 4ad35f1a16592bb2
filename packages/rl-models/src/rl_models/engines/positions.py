"""How long the sequences are that a checkpoint's model was made for."""

from __future__ import annotations

import os

from ckpt.layout.config import load_config, text_config


def max_positions(path: str | os.PathLike[str]) -> int | None:
    """The number of positions by a checkpoint's `config.json`; None where it does not say.

    `max_position_embeddings`, or as many as the rope parameters' `factor` makes of the original ones, if that is more:
    some checkpoints are extended by these alone. Llama 3's factor stretches wavelengths, and says nothing of positions.
    """
    config = text_config(load_config(path))
    positions = config.get("max_position_embeddings")
    if positions is None:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "llama3":
        return int(positions)
    original = rope.get("original_max_position_embeddings") or positions
    return max(int(positions), int(original * (rope.get("factor") or 1)))
