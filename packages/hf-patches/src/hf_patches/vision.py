"""Vision-language models: positions of several sections, rows of images, and a vision tower that always runs.

The vision tower runs unchanged and whole on every rank, before the text backbone; the tokens are cut into parts behind
it. Shapes: T tokens of the packed batch, N sequences, n images or videos, V tokens that stand for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves

from hf_patches.batch import BatchPlan
from hf_patches.call import CallState
from hf_patches.families import Vision
from parallel_layers import PackedSequence
from parallel_layers.attention import repeated_rows

_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_PIXELS = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
# For each modality the keyword that says which of the pixels' images each image of a batch is.
_NUMBERS = {"image": "image_numbers", "video": "video_numbers"}
VISUAL_INPUTS = (*_GRIDS, *_PIXELS, *_NUMBERS.values())


class VisionHooks:
    """The hooks that a patch adds to one vision-language model."""

    def __init__(self, state: CallState, inner: Any, vision: Vision) -> None:
        self.state, self.inner, self.vision = state, inner, vision

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vision tower's weights; not every tower casts its pixels."""
        parameters = self.inner.named_parameters()
        return next(x.dtype for name, x in parameters if not name.startswith("language_model."))

    def take(self, packed: PackedSequence, text: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the positions of a call, and the kind of each token `[T]` if the caller gave `mm_token_type_ids`.

        Positions are `text` `[T]` where these suffice, else `[4, T]` (text, time, height, width). The caller may give
        them as `position_ids` [4, T]; otherwise the model's own `get_rope_index` computes them, sequence by sequence,
        from the first of `text`. Takes what only positions and kinds need out of `kwargs`.
        """
        types = kwargs.pop("mm_token_type_ids", None)
        if types is not None and types.shape != packed.input_ids.shape:
            raise ValueError(
                f"mm_token_type_ids has shape {tuple(types.shape)}, the packed batch {packed.num_tokens} tokens; give "
                f"one entry per token: [{packed.num_tokens}]"
            )
        positions = self._positions(packed, text, types, kwargs)
        return text if positions is None else positions, types

    def _positions(
        self, packed: PackedSequence, text: Tensor, types: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        given = kwargs.pop("position_ids", None)
        grids = {name: kwargs[name] for name in _GRIDS if kwargs.get(name) is not None}
        if given is not None:
            if not self.vision.multi_section or given.shape != (4, packed.num_tokens):
                raise ValueError(
                    f"position_ids of shape {tuple(given.shape)} for {packed.num_tokens} packed tokens: give 4 rows, "
                    "text positions that restart with each sequence above time, height and width, or leave them out"
                )
            return given
        if not self.vision.multi_section or not grids:
            return None
        config = self.inner.config
        if types is None:
            ids = packed.input_ids
            types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        if "video_grid_thw" in grids and not (types == 2).any():
            raise ValueError(
                "video_grid_thw is given but no token is known to belong to a video; give mm_token_type_ids [T] "
                "(0 text, 1 image, 2 video), as the processor returns them"
            )
        rows = text.expand(4, -1).clone()
        sequences = [x for x in packed.split(torch.stack([packed.input_ids, types.long()], dim=-1)) if len(x)]
        padded = pad_sequence(sequences, batch_first=True)
        mask = pad_sequence([torch.ones(len(x), device=x.device) for x in sequences], batch_first=True).bool()
        try:
            sections, _ = self.inner.get_rope_index(
                padded[..., 0], mm_token_type_ids=padded[..., 1], attention_mask=mask.long(), **grids
            )
        except (StopIteration, RuntimeError):
            raise ValueError(
                f"the kinds of the tokens do not fit {' and '.join(grids)}: each run of tokens of one kind must be an "
                "image or a video of its size; give what one call of the processor returned for each sequence"
            ) from None
        starts = [first.expand(len(part)) for part in packed.split(text) for first in part[:1]]
        rows[1:, : packed.num_tokens - packed.padding] = sections[:, mask] + torch.cat(starts)
        return rows

    def features(self, name: str) -> Callable[..., Any]:
        """Return the function in place of the model's `get_image_features` (`name` "image") or `get_video_features`.

        Where a call says which of its pixels' images each image is, the tower computes each of them once. Their rows
        are repeated in what the model's own function returns; the gradients of the copies are summed in fp32 at least.
        """
        own = getattr(type(self.inner), f"get_{name}_features")

        def features(pixels: Tensor, grid: Tensor, **kwargs: Any) -> Any:
            call, pixels = self.state.current, pixels.to(self.dtype)
            numbers = None if call is None else call.numbers.get(name)
            if numbers is None:
                return own(self.inner, pixels, grid, **kwargs)
            found = own(self.inner, pixels, grid[first_of_each(numbers)], **kwargs)
            sizes = [len(one) for one in found.pooler_output]
            rows = torch.arange(sum(sizes)).split(sizes)
            index = torch.cat([rows[number] for number in numbers]).to(pixels.device)
            copies = [sizes[number] for number in numbers]

            def repeated(level: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
                whole = repeated_rows(level if isinstance(level, Tensor) else torch.cat(tuple(level)), index)
                return whole if isinstance(level, Tensor) else whole.split(copies)

            found.pooler_output = repeated(found.pooler_output)
            if getattr(found, "deepstack_features", None):
                found.deepstack_features = [repeated(level) for level in found.deepstack_features]
            return found

        return features

    def placeholder_mask(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor,
        image_features: Tensor | None = None,
        video_features: Tensor | None = None,
    ) -> Any:
        """Return the places `[1, T, 1]` of images and of videos, in place of the model's `get_placeholder_mask`.

        They follow from the kinds of the tokens where the caller gave these. So a placeholder token that a policy has
        drawn stays a token, and images and videos of GLM-4V, which share one placeholder token, stay apart.

        Raises:
            ValueError: The tokens of a kind are more or fewer than the tower's features.
        """
        call = self.state.current
        types = None if call is None else call.token_types
        if types is None:
            own = type(self.inner).get_placeholder_mask
            return own(
                self.inner, input_ids, inputs_embeds, image_features=image_features, video_features=video_features
            )
        masks = tuple((types == kind)[None, :, None] for kind in (1, 2))
        for mask, features, what in zip(masks, (image_features, video_features), ("image", "video"), strict=True):
            if features is not None and int(mask.sum()) * inputs_embeds.shape[-1] != features.numel():
                raise ValueError(
                    f"mm_token_type_ids has {int(mask.sum())} {what} tokens, and the tower returns "
                    f"{features.numel() // inputs_embeds.shape[-1]} features; give the ids and the {what}s of one call "
                    "of the processor"
                )
        return masks

    def touch_tower(self, embedding: nn.Module, args: object, output: Tensor) -> Tensor | None:
        """Hook of the input embedding: in a batch without images, add zero times the features of a smallest image.

        So the tower's parameters get (zero) gradients from a text-only batch, and FSDP2 gathers them on this rank when
        another rank has images. The embedding is where transformers itself would next run the tower.
        """
        call = self.state.current
        if call is None or call.has_images or call.decoding:
            return None
        config = self.inner.config.vision_config
        height, width = self.vision.merge(config)
        pixels = output.new_zeros(height * width, *self.vision.patch_shape(config))
        grid = torch.tensor([[1, height, width]], device=output.device)
        features = self.inner.get_image_features(pixels, grid, return_dict=True)
        total = output.new_zeros(())
        for leaf in tree_leaves(features):
            if isinstance(leaf, Tensor):
                total = total + leaf.sum()
        return output + 0 * total.to(output.dtype)


def first_of_each(numbers: Sequence[int]) -> list[int]:
    """Return where each of the numbers 0, 1, ... stands first."""
    return [numbers.index(number) for number in range(max(numbers) + 1)]


def take_numbers(kwargs: dict[str, Any]) -> dict[str, list[int]]:
    """Take out of a call which of the pixels' images each image of the batch is, by modality.

    Raises:
        ValueError: The numbers do not count the images of the grid, or skip a number.
    """
    found = {}
    for name, keyword in _NUMBERS.items():
        given = kwargs.pop(keyword, None)
        if given is None:
            continue
        numbers, grid = [int(number) for number in given], kwargs.get(f"{name}_grid_thw")
        if grid is None or len(numbers) != len(grid) or set(numbers) != set(range(max(numbers, default=-1) + 1)):
            raise ValueError(
                f"{keyword}={numbers}: give one number for each row of {name}_grid_thw "
                f"({0 if grid is None else len(grid)}), which of the {name}s of the pixels it is: 0, 1, ..."
            )
        found[name] = numbers
    return found


def has_images(kwargs: dict[str, Any]) -> bool:
    """Return whether a call brings images or videos."""
    return any(kwargs.get(name) is not None for name in _PIXELS)


def cut_visual_rows(kwargs: dict[str, Any], plan: BatchPlan) -> None:
    """DeepStack: cut the mask `[1, T]` of visual tokens and their rows to this rank's part."""
    mask, rows = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if plan.group is None or not isinstance(mask, Tensor):
        return
    before = int(mask[:, : plan.local_tokens.start].sum())
    local = mask[:, plan.local_tokens]
    kwargs["visual_pos_masks"] = local
    if rows is not None:
        kwargs["deepstack_visual_embeds"] = [x[before : before + int(local.sum())] for x in rows]
