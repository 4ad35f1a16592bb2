"""`Images`: the places and positions of a batch's images in a vision-language model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from rl_models.batch.visual import NUMBERS, PIXELS, Visual, VisualInputs

if TYPE_CHECKING:
    from hf_patches import VisionHooks


class Images:
    """Finds the images of a batch and computes their positions, for one vision-language model.

    Args:
        config: The model's config.
        hooks: hf-patches' knowledge of the model.
    """

    def __init__(self, config: Any, hooks: VisionHooks) -> None:
        self.config, self.hooks = config, hooks
        # The tokens that stand for images and for videos.
        self.placeholders: tuple[int, int] = (config.image_token_id, config.video_token_id)

    def require(self, sequences: Sequence[Tensor], visual: Visual) -> None:
        """Raise ValueError unless the tower takes every image, and each image has the tokens of its size."""
        for number, (tokens, images) in enumerate(zip(sequences, visual, strict=False)):
            if images is not None:
                for name, grid in images.tensors.items():
                    if name.endswith("grid_thw") and not self.hooks.vision.videos and (grid[:, 0] > 1).any():
                        raise ValueError(
                            f"sequence {number}: {name} has {int(grid[:, 0].max())} frames, and transformers takes one "
                            f"for {self.config.model_type}; give each frame as an image"
                        )
                try:
                    images.require_tokens(images.token_types(tokens, *self.placeholders), self.hooks.merged)
                except ValueError as error:
                    raise ValueError(f"sequence {number}: {error}") from None

    def of_prompt(self, tokens: Tensor, visual: VisualInputs) -> tuple[VisualInputs, int]:
        """See `Engine.prompt_images`."""
        types = visual.token_types(tokens.cpu(), *self.placeholders)
        if types[-1] != 0:
            raise ValueError("a prompt ends in an image; a response follows text, such as the end of the user's turn")
        visual = visual if visual.mm_token_type_ids is not None else replace(visual, mm_token_type_ids=types)
        packed = PackedSequence.from_sequences([tokens.cpu()])
        positions, _ = self.hooks.take(packed, packed.position_ids, self.inputs(packed, (visual,), pixels=False))
        # The first row of [4, T] counts tokens.
        return visual, int(positions.reshape(-1, len(tokens))[-3:].max()) + 1 - len(tokens)

    def inputs(self, packed: PackedSequence, visual: Visual, *, pixels: bool = True) -> dict[str, Any]:
        """Return the images of a pack, on the device of `packed`, by their names in transformers; empty without any.

        `mm_token_type_ids` is `[T]`, padding included. `pixels=False` leaves out the pixels, which positions do not
        need. Equal images appear once in the pixels; `image_numbers` or `video_numbers` then list the number of each
        image among the pixels, as hf-patches takes them.
        """
        if not any(images is not None for images in visual):
            return {}
        device = packed.input_ids.device
        types = [
            images.token_types(tokens, *self.placeholders) if images is not None else torch.zeros_like(tokens)
            for tokens, images in zip(packed.split(packed.input_ids), visual, strict=True)
        ]
        types.append(packed.input_ids.new_zeros(packed.padding))
        arguments: dict[str, Any] = {"mm_token_type_ids": torch.cat(types)}
        visual_inputs = [images for images in visual if images is not None]
        for name in (*PIXELS.values(), "second_per_grid_ts"):
            if tensors := [images.tensors[name] for images in visual_inputs if name in images.tensors]:
                arguments[name] = torch.cat(tensors).to(device)
        for name in PIXELS if pixels else ():
            unique: dict[str, Tensor] = {}
            digests = list[str]()
            for images in (images for images in visual_inputs if name in images.tensors):
                for digest, (_, patches) in zip(images.image_digests[name], images.patches_of(name), strict=True):
                    digests.append(digest)
                    unique.setdefault(digest, patches)
            if unique:
                arguments[name] = torch.cat(list(unique.values())).to(device)
            if len(unique) < len(digests):
                numbers = {digest: number for number, digest in enumerate(unique)}
                arguments[NUMBERS[name]] = [numbers[digest] for digest in digests]
        return arguments
