"""Read a checkpoint's folder before loading: check that it is one, and find its dtype and its longest sequence."""

from __future__ import annotations

import os

import torch

from ckpt import Checkpoint
from ckpt.layout import PREDICTION_LAYERS
from parallel_layers import ModelConfig
from parallel_layers.rotary import RopeParameters, stated_parameters
from parallel_models.engine import hub
from parallel_models.engine.options import COMPUTED


def checkpoint_folder(path: str | os.PathLike[str], *, weights: bool = True) -> str:
    """Return the folder of a checkpoint, given by its path or by its name on a hub (see `located`).

    Raises:
        ValueError: The folder has no `config.json`, or the name is not found.
    """
    folder = hub.located(path, weights=weights)
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(
            f"{folder!r} is no checkpoint folder (it has no config.json); give a folder with one, or a model's name on "
            "a hub, such as organisation/name"
        )
    return folder


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Return what a checkpoint's config says of the model; errors as `ModelConfig.from_hf`, with the file's name."""
    try:
        return ModelConfig.from_hf(checkpoint.config)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path / 'config.json'}: {error}") from None


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of most of a checkpoint's elements; ValueError if no model computes in this dtype."""
    if str(dtype := checkpoint.dtype) not in COMPUTED:
        raise ValueError(
            f"{checkpoint.path} is stored in {dtype}, in which no model computes; load it with dtype=torch.bfloat16"
        )
    return dtype


def longest_sequence(checkpoint: Checkpoint) -> int | None:
    """Return the length up to which the rotation of a token is the same in every sequence; None: any length.

    In longer sequences the rope types "longrope" and "dynamic" have other frequencies for all tokens.

    Raises:
        ValueError: The config has such a rope type and no length, or its rope parameters are unusable.
    """
    config = checkpoint.text
    rope = RopeParameters(stated_parameters(config))
    if rope.get("rope_type", rope.get("type")) != "dynamic" and "short_factor" not in rope:
        return None
    fields = {**rope, **{name: value for name, value in config.items() if value is not None}}
    longest = fields.get("original_max_position_embeddings") or fields.get("max_position_embeddings")
    if longest is None:
        raise ValueError(
            f"{checkpoint.path}: config.json has neither max_position_embeddings nor original_max_position_embeddings, "
            f"from which the rotation of {rope} changes; add the length that the model was trained with"
        )
    return int(longest)


def prediction_layers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the prefix of each multi-token-prediction layer in a checkpoint's files; they follow the decoder's."""
    if any(name.startswith("mtp.") for name in checkpoint.tensors):
        return ("mtp.",)
    config = checkpoint.text
    num_layers, count = config.get("num_hidden_layers"), config.get(PREDICTION_LAYERS)
    if not isinstance(num_layers, int) or not isinstance(count, int):
        return ()
    prefixes = tuple(f"model.layers.{num_layers + number}." for number in range(count))
    return prefixes if any(name.startswith(prefixes) for name in checkpoint.tensors) else ()


def max_positions(checkpoint: Checkpoint) -> int | None:
    """Return the largest length of sequences that a model supports; None if its config does not say.

    Some checkpoints are extended by the rope parameters alone: then the result is the original positions times
    `factor`. Llama 3's factor stretches wavelengths and does not count.
    """
    if (longest := longest_sequence(checkpoint)) is not None:
        return longest
    config = checkpoint.text
    positions = config.get("max_position_embeddings")
    if positions is None:
        return None
    rope = RopeParameters(stated_parameters(config))
    if rope.get("rope_type", rope.get("type")) == "llama3":
        return int(positions)
    original = rope.get("original_max_position_embeddings") or positions
    return max(int(positions), int(original * (rope.get("factor") or 1)))
