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
    """Write named batches in one step: after a kill the file is complete, or not there.

    Raises:
        OSError: See `ckpt.files.disk.room_for`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, batch in batches.items():
        own = {"tokens": batch.tokens, "mask": batch.mask, "lengths": torch.tensor(batch.lengths, dtype=torch.int64)}
        own |= {f"fields/{field}": tensor for field, tensor in batch.fields.items()}
        # Sequences that share images have the number of the first of them; -1: no images.
        numbers = {id(one): number for number, one in reversed(list(enumerate(batch.visual))) if one is not None}
        own |= {"visual": torch.tensor([numbers.get(id(one), -1) for one in batch.visual])} if batch.visual else {}
        for number in numbers.values():
            seen = batch.visual[number]
            own |= {f"visual/{number}/{part}": x for part, x in (seen.tensors if seen is not None else {}).items()}
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in own.items()}
    content = save(tensors)
    with room_for(len(content), path), replacing(path) as file:
        file.write(content)


def read_batches(path: Path) -> dict[str, Batch]:
    """Return the batches of `write_batches`; ValueError for a broken file."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is broken ({error}); remove it, and its responses are drawn again") from None
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.partition("/")
        parts.setdefault(name, {})[part] = tensor
    return {
        name: Batch(own["tokens"], tuple(own["lengths"].tolist()), own["mask"], _below("fields", own), _images(own))
        for name, own in parts.items()
    }


def _below(name: str, own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {part.removeprefix(f"{name}/"): tensor for part, tensor in own.items() if part.startswith(f"{name}/")}


def _images(own: Mapping[str, torch.Tensor]) -> Visual:
    if "visual" not in own:
        return ()
    numbers = own["visual"].tolist()
    found = {number: VisualInputs(**_below(f"visual/{number}", own)) for number in set(numbers) - {-1}}
    return tuple(found.get(number) for number in numbers)


def mini_batches(found: int, wanted: int, size: int) -> list[tuple[int, int]]:
    """Return the begin and the end of each mini-batch of a step with `size` of `wanted` responses.

    If dynamic sampling found fewer responses, the number of mini-batches stays and their size shrinks: the schedule of
    the learning rate counts optimizer steps and must end with the run.
    """
    ends = [min(end, wanted) * found // wanted for end in range(0, wanted + size, size)]
    return [(start, end) for start, end in itertools.pairwise(ends) if start < end]
