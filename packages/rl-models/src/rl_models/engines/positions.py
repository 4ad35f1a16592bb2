"""The largest length of sequences that the model of a checkpoint supports."""

from __future__ import annotations

import os

from ckpt.layout.config import load_config, text_config


def max_positions(path: str | os.PathLike[str]) -> int | None:
    """Return the number of positions in a checkpoint's `config.json`; None if it has no `max_position_embeddings`.

    Some checkpoints are extended by the rope parameters alone: then the number is the original positions times
    `factor`. Llama 3's factor stretches wavelengths and does not count.
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
