"""`Vision`: transformers' vision tower in front of the native layers.

The tower lies whole on each rank of the first pipeline stage. Tensor- and context-parallel ranks divide the images of a
pack and gather the rows. The text part gets them as `VisualStates`. Every stage rotates by the positions of images,
which need the config alone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from hf_patches import FAMILIES, CallState, VisionHooks
from parallel_layers import PackedSequence
from parallel_models import Grid
from parallel_models.model import VisualStates
from rl_models.backends.images import Images
from rl_models.backends.parallel.tower import Tower
from rl_models.batch.visual import Visual

# The pixels and the grids of images and of videos, which have the token types 1 and 2.
_MODALITIES = (("pixel_values", "image_grid_thw", "image"), ("pixel_values_videos", "video_grid_thw", "video"))


class Vision(Images):
    """The vision part of a model of transformers, which turns images into embeddings.

    Each rank computes the tower's gradient from the rank's images. FSDP2 sums over context parallelism, and the engine
    over tensor parallelism.

    Attributes:
        tower: The vision tower, with new weights; None where this rank has no first stage.
        depth: The number of layers to whose outputs the tower adds (DeepStack).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        grid: Grid,
        prefix: str | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            self.inner: Any = AutoModelForImageTextToText.from_config(config, trust_remote_code=False).model
        del self.inner.language_model
        self.tower = None if prefix is None else Tower(self.inner, config, prefix, dtype=dtype, device=device)
        self.depth = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        vision = FAMILIES[config.model_type]
        assert vision is not None
        super().__init__(config, VisionHooks(CallState(None, "auto"), self.inner, vision))
        self._tp, self._cp = grid.group("tp"), grid.group("cp")

    def positioned(self, packed: PackedSequence, visual: Visual) -> PackedSequence:
        """Return the pack with the positions of its images in time, height and width."""
        inputs = self.inputs(packed, visual, pixels=False)
        if not inputs or not self.hooks.vision.multi_section:
            return packed
        positions, _ = self.hooks.take(packed, packed.position_ids, inputs)
        return replace(packed, rotary_positions=positions[-3:].contiguous())

    def states(self, packed: PackedSequence, visual: Visual, *, separate_packs: bool = False) -> VisualStates | None:
        """Return the tower's output for a pack's images; `separate_packs`: each context-parallel rank has another pack.

        Communication: an all-gather of the rows over the tensor-parallel group, and one over the context-parallel
        group, whose backward is a reduce-scatter.

        With gradients the tower also runs for a pack without images, on a smallest image without a token: its gradients
        are then zero, and FSDP2 gathers its parameters on every data-parallel rank alike.
        """
        inputs = self.inputs(packed, visual)
        assert self.tower is not None
        if not inputs and not (torch.is_grad_enabled() and any(x.requires_grad for x in self.tower.parameters())):
            return None
        groups = [(self._tp, False)] if separate_packs else [(self._tp, False), (self._cp, True)]
        places, rows = list[Tensor](), list[Tensor]()
        for kind, (pixels, grid, name) in enumerate(_MODALITIES, start=1):
            if pixels in inputs:
                numbers = inputs.get(f"{name}_numbers") or list(range(len(inputs[grid])))
                rows.append(self.hooks.shared_rows(name, inputs[pixels], inputs[grid], numbers, groups))
                places.append((inputs["mm_token_type_ids"] == kind).nonzero()[:, 0])
        if not rows:
            rows.append(self.hooks.no_rows(packed.input_ids.device))
            places.append(packed.input_ids[:0])
        return VisualStates(torch.cat(places), torch.cat(rows))
