"""`Images`: the places and positions of a batch's images in a vision-language model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from parallel_layers import PackedSequence
from rl_models.batch.visual import Visual, VisualInputs, packed_inputs

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
        """Return the images of a pack by their names in transformers, see `packed_inputs`; empty without any."""
        return packed_inputs(packed, visual, *self.placeholders, pixels=pixels) if visual else {}
