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
        for number, (tokens, one) in enumerate(zip(sequences, visual, strict=False)):
            if one is not None:
                for name, grid in one.tensors.items():
                    if name.endswith("grid_thw") and not self.hooks.vision.videos and (grid[:, 0] > 1).any():
                        raise ValueError(
                            f"sequence {number}: {name} has {int(grid[:, 0].max())} frames, and transformers takes one "
                            f"for {self.config.model_type}; give each frame as an image"
                        )
                try:
                    one.require_tokens(one.token_types(tokens, *self.placeholders), self.hooks.merged)
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

        `mm_token_type_ids` is `[T]`, padding included. `pixels`: False for what positions need alone. Where some images
        are equal, the pixels have each once, and `image_numbers` or `video_numbers` (lists) say which of them each
        image is, as hf-patches takes them.
        """
        if not any(one is not None for one in visual):
            return {}
        device = packed.input_ids.device
        types = [
            one.token_types(tokens, *self.placeholders) if one is not None else torch.zeros_like(tokens)
            for tokens, one in zip(packed.split(packed.input_ids), visual, strict=True)
        ]
        types.append(packed.input_ids.new_zeros(packed.padding))
        found: dict[str, Any] = {"mm_token_type_ids": torch.cat(types)}
        given = [one for one in visual if one is not None]
        for name in (*PIXELS.values(), "second_per_grid_ts"):
            if parts := [one.tensors[name] for one in given if name in one.tensors]:
                found[name] = torch.cat(parts).to(device)
        for name in PIXELS if pixels else ():
            unique: dict[str, Tensor] = {}
            digests = list[str]()
            for one in (one for one in given if name in one.tensors):
                for digest, (_, patches) in zip(one.digests_of_each[name], one.each(name), strict=True):
                    digests.append(digest)
                    unique.setdefault(digest, patches)
            if unique:
                found[name] = torch.cat(list(unique.values())).to(device)
            if len(unique) < len(digests):
                places = {digest: number for number, digest in enumerate(unique)}
                found[NUMBERS[name]] = [places[digest] for digest in digests]
        return found
