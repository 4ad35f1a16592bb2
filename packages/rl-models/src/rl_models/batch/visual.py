"""`VisualInputs`: the images and videos of one sequence, in the form that a processor of transformers returns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# The pixels of each modality, and the grid that says how many patches each of its images or videos has.
PIXELS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
NUMBERS = {"pixel_values": "image_numbers", "pixel_values_videos": "video_numbers"}


@dataclass(frozen=True, eq=False)
class VisualInputs:
    """The images and videos of one sequence, on the CPU until a model computes with them.

    The names come from transformers. P patches, n images or videos, L tokens. Sequences with the same images, such
    as the responses to one prompt, share one object.

    Attributes:
        pixel_values: `[P, ...]`, the patches of all images, one image after another.
        image_grid_thw: `[n, 3]` integers, the frames, rows and columns of patches of each image.
        pixel_values_videos, video_grid_thw: The same for videos.
        second_per_grid_ts: `[n]`, the seconds of a video that each of its frames of patches spans (Qwen2.5-VL).
        mm_token_type_ids: `[L]` integers, the kind of each of the first L tokens: 0 text, 1 image, 2 video. Later
            tokens are text, also a placeholder token that a policy has drawn. None: every placeholder token of the
            sequence belongs to an image or a video.
        images: The images before the processor (`PIL.Image`), for an engine that runs its own processor; they are not
            pickled.
    """

    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None
    second_per_grid_ts: Tensor | None = None
    mm_token_type_ids: Tensor | None = None
    images: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}; use torch.as_tensor(...)")
            object.__setattr__(self, name, tensor.detach().cpu())
        pixel_names = [name for name in PIXELS if name in self.tensors]
        if not pixel_names:
            raise ValueError(f"visual inputs need {' or '.join(PIXELS)}; give None for a sequence without images")
        for name, grid_name in PIXELS.items():
            pixels, grid = getattr(self, name), getattr(self, grid_name)
            if (pixels is None) != (grid is None):
                raise ValueError(f"{name} and {grid_name} belong together; give both, as the processor returns them")
            if pixels is None:
                continue
            if grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
                raise ValueError(f"{grid_name} must be [n, 3] integers, got {list(grid.shape)} {grid.dtype}")
            if int(grid.prod(1).sum()) != len(pixels):
                raise ValueError(
                    f"{name} has {len(pixels)} patches and {grid_name} {grid.tolist()} counts {int(grid.prod(1).sum())}"
                )
        types = self.mm_token_type_ids
        if types is not None and (types.dim() != 1 or types.is_floating_point()):
            raise ValueError(f"mm_token_type_ids must be [L] integers, got {list(types.shape)} {types.dtype}")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"images": ()}

    @classmethod
    def from_processor(cls, inputs: Mapping[str, object]) -> VisualInputs | None:
        """Return the visual inputs among those that a processor returned for one sequence; None without images.

        Raises:
            ValueError: The processor returned a tensor that no model here reads.
        """
        names = {field.name for field in fields(cls) if field.name != "images"}
        text = {"input_ids", "attention_mask", "mm_token_type_ids"}
        tensors: dict[str, Any] = {name: torch.as_tensor(value) for name, value in inputs.items() if name in names}
        if not tensors.keys() & set(PIXELS):
            return None
        if unknown := sorted(name for name, value in inputs.items() if name not in names | text and value is not None):
            raise ValueError(f"the processor returns {', '.join(unknown)}, which no model here reads")
        if "mm_token_type_ids" in tensors:
            tensors["mm_token_type_ids"] = tensors["mm_token_type_ids"].reshape(-1)
        return cls(**tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The given tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "images"}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def digest(self) -> str:
        """A hash of the tensors' names, shapes, dtypes and bytes."""
        text = repr({name: _digest(tensor) for name, tensor in self.tensors.items()})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def image_digests(self) -> dict[str, list[str]]:
        """A hash of the size, dtype and bytes of each image's patches, by the name of the pixels."""
        return {name: [_digest(*image) for image in self.patches_of(name)] for name in PIXELS if name in self.tensors}

    def patches_of(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return the size `[3]` and the patches `[p, ...]` of each image of the pixels `name`."""
        grid, pixels = (self.tensors[key] for key in (PIXELS[name], name))
        return list(zip(grid, pixels.split(grid.prod(1).tolist()), strict=True))

    def token_types(self, tokens: Tensor, image: int, video: int) -> Tensor:
        """Return the kind of each token `[L]` of the sequence, int64; `image` and `video` are the placeholders."""
        if self.mm_token_type_ids is None:
            return (tokens == image).long() + 2 * (tokens == video).long()
        types = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        kinds = self.mm_token_type_ids[: len(tokens)]
        types[: len(kinds)] = kinds.to(types)
        return types

    def require_tokens(self, types: Tensor, merged: int) -> None:
        """Raise ValueError unless each `merged` patches have a token of their kind in `types`, see `token_types`."""
        for kind, (name, grid_name) in enumerate(PIXELS.items(), start=1):
            grid = getattr(self, grid_name)
            expected = 0 if grid is None else int(grid.prod(1).sum()) // merged
            if (count := int((types == kind).sum())) != expected:
                raise ValueError(
                    f"{count} tokens stand for {name}, and {grid_name} asks for {expected}; give the token ids and the "
                    "images of one call of the processor, and cut no images off"
                )


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{list(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# One entry for each sequence, None for one without images; empty if no sequence has images.
Visual = tuple[VisualInputs | None, ...]


def described(visual: Visual) -> str:
    """Describe the images of sequences, so that ranks can compare them."""
    if not visual:
        return "none"
    digests = [images and images.digest for images in visual]
    checksum = hashlib.blake2b(repr(digests).encode(), digest_size=4).hexdigest()
    return f"of {sum(images is not None for images in visual)} sequences (checksum {checksum})"
