"""Batches in one safetensors file, and the mini-batches of a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ckpt.files import replacing, room_for
from rl_models import Batch, VisualInputs
from rl_models.batch import Visual


def write_batches(path: Path, batches: Mapping[str, Batch]) -> None:
    """Write named batches in one step: after a kill the file is complete or absent.

    Raises:
        OSError: See `ckpt.files.disk.room_for`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, batch in batches.items():
        batch_tensors = {
            "tokens": batch.tokens,
            "mask": batch.mask,
            "lengths": torch.tensor(batch.lengths, dtype=torch.int64),
        }
        batch_tensors |= {f"fields/{field}": tensor for field, tensor in batch.fields.items()}
        # Sequences that share images have the number of the first such sequence; -1: no images.
        numbers = {
            id(inputs): number for number, inputs in reversed(list(enumerate(batch.visual))) if inputs is not None
        }
        batch_tensors |= (
            {"visual": torch.tensor([numbers.get(id(inputs), -1) for inputs in batch.visual])} if batch.visual else {}
        )
        for number in numbers.values():
            visual_inputs = batch.visual[number]
            batch_tensors |= {
                f"visual/{number}/{key}": x
                for key, x in (visual_inputs.tensors if visual_inputs is not None else {}).items()
            }
        tensors |= {f"{name}/{key}": tensor.contiguous() for key, tensor in batch_tensors.items()}
    content = save(tensors)
    with room_for(len(content), path), replacing(path) as file:
        file.write(content)


def read_batches(path: Path) -> dict[str, Batch]:
    """Return the batches of `write_batches`; ValueError for a broken file."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is broken ({error}); remove it, and its responses are drawn again") from None
    tensors_by_batch: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, tensor_name = key.partition("/")
        tensors_by_batch.setdefault(name, {})[tensor_name] = tensor
    return {
        name: Batch(
            values["tokens"],
            tuple(values["lengths"].tolist()),
            values["mask"],
            _below("fields", values),
            _images(values),
        )
        for name, values in tensors_by_batch.items()
    }


def _below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {key.removeprefix(f"{prefix}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{prefix}/")}


def _images(tensors: Mapping[str, torch.Tensor]) -> Visual:
    if "visual" not in tensors:
        return ()
    numbers = tensors["visual"].tolist()
    inputs_by_number = {number: VisualInputs(**_below(f"visual/{number}", tensors)) for number in set(numbers) - {-1}}
    return tuple(inputs_by_number.get(number) for number in numbers)


def mini_batches(num_drawn: int, num_wanted: int, size: int) -> list[tuple[int, int]]:
    """Return the begin and the end of each mini-batch of a step with `size` of `wanted` responses.

    If dynamic sampling found fewer responses, the number of mini-batches stays and their size shrinks: the schedule of
    the learning rate counts optimizer steps and must end with the run.
    """
    ends = [min(end, num_wanted) * num_drawn // num_wanted for end in range(0, num_wanted + size, size)]
    return [(start, end) for start, end in itertools.pairwise(ends) if start < end]
