"""Batches in one safetensors file, and the mini-batches of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ckpt.files import replacing, room_for
from parallel_layers.head import SamplingMask
from rl_models import Batch, VisualInputs


def write_batches(path: Path, batches: Mapping[str, Batch]) -> None:
    """Write named batches in one step: after a kill the file is complete or absent."""
    tensors = {f"{name}/{key}": x.contiguous() for name, batch in batches.items() for key, x in _tensors(batch)}
    content = save(tensors)
    with room_for(len(content), path), replacing(path) as file:
        file.write(content)


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield from {
        "tokens": batch.tokens,
        "mask": batch.mask,
        "lengths": torch.tensor(batch.lengths, dtype=torch.int64),
    }.items()
    yield from ((f"fields/{name}", values) for name, values in batch.fields.items())
    if batch.sampling_mask is not None:
        yield from {
            "sampling_mask/ids": batch.sampling_mask.ids,
            "sampling_mask/offsets": batch.sampling_mask.offsets,
        }.items()
    # Sequences that share images have the number of the first of these sequences; -1: no images.
    first = {id(images): number for number, images in reversed(list(enumerate(batch.visual)))}
    numbers = [-1 if images is None else first[id(images)] for images in batch.visual]
    if numbers:
        yield "visual", torch.tensor(numbers)
    for number, images in enumerate(batch.visual):
        if images is not None and numbers[number] == number:
            yield from ((f"visual/{number}/{name}", x) for name, x in images.tensors.items())


def read_batches(path: Path) -> dict[str, Batch]:
    """Return the batches of `write_batches`; ValueError for a broken file."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is broken ({error}); remove it, and its responses are drawn again") from None
    return {name: _batch(_below(name, tensors)) for name in {key.partition("/")[0] for key in tensors}}


def _batch(tensors: Mapping[str, Tensor]) -> Batch:
    numbers = tensors["visual"].tolist() if "visual" in tensors else []
    images = {number: VisualInputs(**_below(f"visual/{number}", tensors)) for number in {*numbers} - {-1}}
    visual = tuple(images.get(number) for number in numbers)
    lengths = tuple(tensors["lengths"].tolist())
    mask = SamplingMask(**kept) if (kept := _below("sampling_mask", tensors)) else None
    return Batch(tensors["tokens"], lengths, tensors["mask"], _below("fields", tensors), visual, mask)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {key.removeprefix(f"{prefix}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{prefix}/")}


def mini_batches(num_drawn: int, num_wanted: int, size: int) -> list[tuple[int, int]]:
    """Return the begin and the end of each mini-batch of a step with `size` of `wanted` responses.

    If dynamic sampling found fewer responses, the number of mini-batches stays and their size shrinks: the schedule of
    the learning rate counts optimizer steps and must end with the run.
    """
    ends = [min(end, num_wanted) * num_drawn // num_wanted for end in range(0, num_wanted + size, size)]
    return [(start, end) for start, end in itertools.pairwise(ends) if start < end]
