"""`Vision`: transformers' vision tower in front of the native layers.

The tower lies whole on the first pipeline stage. The text part gets its rows as `VisualStates`. Every stage rotates by
the positions of images, which need the config alone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from hf_patches.call import CallState
from hf_patches.families import FAMILIES
from hf_patches.vision import VisionHooks
from parallel_layers import PackedSequence
from rl_models.engines.images import Images
from rl_models.models.decoder import VisualStates
from rl_models.visual import Visual

# The pixels and the grids of images and of videos, which have the token types 1 and 2.
_MODALITIES = (("pixel_values", "image_grid_thw", "image"), ("pixel_values_videos", "video_grid_thw", "video"))


class Vision(Images):
    """The vision part of a model of transformers, which turns images into embeddings.

    Attributes:
        tower: The vision tower, with new weights; None where this rank has no first stage.
        depth: The number of layers to whose outputs the tower adds (DeepStack).
    """

    def __init__(
        self, path: str | os.PathLike[str], *, tower: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            self.inner: Any = AutoModelForImageTextToText.from_config(config).model
        del self.inner.language_model
        kind: type[PreTrainedModel] = type(self.inner.visual)
        self.tower: PreTrainedModel | None = None
        if tower:
            with torch.device(device):
                self.tower = kind._from_config(config.vision_config, dtype=dtype).eval()
            self.inner.visual = self.tower
        self.depth = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        vision = FAMILIES[config.model_type]
        assert vision is not None
        super().__init__(config, VisionHooks(CallState(None, "auto"), self.inner, vision))

    def positioned(self, packed: PackedSequence, visual: Visual) -> PackedSequence:
        """Return the pack with the positions of its images in time, height and width."""
        inputs = self.inputs(packed, visual, pixels=False)
        if not inputs:
            return packed
        positions, _ = self.hooks.take(packed, packed.position_ids, inputs)
        return replace(packed, rotary_positions=positions[-3:].contiguous())

    def states(self, packed: PackedSequence, visual: Visual) -> VisualStates | None:
        """Return what the tower makes of the images of a pack.

        With gradients the tower also runs where there are none, on a smallest image without a token: so its gradients
        are zero, and its parameters are gathered on every data-parallel rank alike.
        """
        inputs = self.inputs(packed, visual)
        if not inputs and not (
            torch.is_grad_enabled() and any(x.requires_grad for x in self.inner.visual.parameters())
        ):
            return None
        places, rows = list[Tensor](), list[Tensor]()
        for kind, (pixels, grid, name) in enumerate(_MODALITIES, start=1):
            if pixels in inputs:
                rows.append(self._rows(name, inputs[pixels], inputs[grid]))
                places.append((inputs["mm_token_type_ids"] == kind).nonzero()[:, 0])
        if not rows:
            vision, config, device = self.hooks.vision, self.config.vision_config, packed.input_ids.device
            height, width = vision.merge(config)
            blank = torch.zeros(height * width, *vision.patch_shape(config), device=device)
            rows.append(self._rows("image", blank, torch.tensor([[1, height, width]], device=device))[:0])
            places.append(packed.input_ids[:0])
        return VisualStates(torch.cat(places), torch.cat(rows))

    def _rows(self, name: str, pixels: Tensor, grid: Tensor) -> Tensor:
        """Return `[V, 1 + D, H]` of the images or the videos."""
        found = getattr(self.inner, f"get_{name}_features")(pixels, grid, return_dict=True)
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return torch.stack([level if isinstance(level, Tensor) else torch.cat(tuple(level)) for level in levels], dim=1)
