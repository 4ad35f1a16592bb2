"""Vision-language models: positions of several sections, rows of images, and a vision tower that always runs.

The vision tower runs unchanged before the text backbone. The ranks of a sequence-parallel group divide the images and
gather their rows; the tokens are cut into parts behind it. Shapes: T tokens of the packed batch, N sequences, n images
or videos, V tokens that stand for them.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from hf_patches.batch import BatchPlan
from hf_patches.call import CallState
from hf_patches.families.table import Vision
from parallel_layers import PackedSequence
from parallel_layers.attention import repeated_rows
from parallel_layers.distributed import gather_from_sequence_parallel

_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_PIXELS = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
# For each modality the keyword that says which of the pixels' images each image of a batch is.
_NUMBERS = {"image": "image_numbers", "video": "video_numbers"}
VISUAL_INPUTS = (*_GRIDS, *_PIXELS, *_NUMBERS.values())


class VisionHooks:
    """The hooks that a patch adds to one vision-language model."""

    def __init__(self, state: CallState, inner: Any, vision: Vision) -> None:
        self.state, self.inner, self.vision = state, inner, vision
        # The form of the tower's results, which differs between models and versions of transformers: their class, and
        # whether they split further levels by image.
        self.output: Callable[..., Any] = SimpleNamespace
        self.splits_levels = True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vision tower's weights; not every tower casts its pixels."""
        parameters = self.inner.named_parameters()
        return next(x.dtype for name, x in parameters if not name.startswith("language_model."))

    def take(self, packed: PackedSequence, text: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the positions of a call, and the kind of each token `[T]` if the caller gave `mm_token_type_ids`.

        Positions are `text` `[T]` where these suffice, else `[4, T]` (text, time, height, width). The caller may give
        them as `position_ids` [4, T]; otherwise the model's own `get_rope_index` computes them, sequence by sequence,
        from the first of `text`. Arguments that only positions and kinds need are removed from `kwargs`.
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
        stated = kwargs.pop("position_ids", None)
        grids = {name: kwargs[name] for name in _GRIDS if kwargs.get(name) is not None}
        if stated is not None:
            if not self.vision.multi_section or stated.shape != (4, packed.num_tokens):
                raise ValueError(
                    f"position_ids of shape {tuple(stated.shape)} for {packed.num_tokens} packed tokens: give 4 rows, "
                    "text positions that restart with each sequence above time, height and width, or leave them out"
                )
            return stated
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
        starts = [start.expand(len(row)) for row in packed.split(text) for start in row[:1]]
        rows[1:, : packed.num_tokens - packed.padding] = sections[:, mask] + torch.cat(starts)
        return rows

    def features(self, name: str) -> Callable[..., Any]:
        """Return the function in place of the model's `get_image_features` (`name` "image") or `get_video_features`.

        Where a call numbers its images, the tower computes equal images once. The ranks of a sequence-parallel group
        divide the images, except with a cache, where each rank decodes alone.
        """
        original = getattr(type(self.inner), f"get_{name}_features")

        def features(pixels: Tensor, grid: Tensor, **kwargs: Any) -> Any:
            call = self.state.current
            numbers = None if call is None else call.numbers.get(name)
            group = None if call is None or call.decoding else self.state.group
            if numbers is None and group is None:
                return original(self.inner, pixels.to(self.dtype), grid, **kwargs)
            numbers = [*range(len(grid))] if numbers is None else numbers
            rows = self.shared_rows(name, pixels, grid, numbers, [(group, True)])
            sizes = [count // self.merged for count in grid.prod(1).tolist()]
            embeddings, *deepstack = rows.unbind(1)
            levels = [level.split(sizes) for level in deepstack] if self.splits_levels else deepstack
            further = {"deepstack_features": levels} if levels else {}
            return self.output(pooler_output=embeddings.split(sizes), **further)

        return features

    @property
    def merged(self) -> int:
        """The patches that make a token."""
        return math.prod(self.vision.merge(self.inner.config.vision_config))

    def shared_rows(
        self,
        name: str,
        pixels: Tensor,
        grid: Tensor,
        numbers: Sequence[int],
        groups: Sequence[tuple[ProcessGroup | None, bool]],
    ) -> Tensor:
        """Return the rows of images or videos; each rank of the groups computes its share of them.

        Args:
            name: "image" or "video".
            pixels: The patches of the different images.
            grid: `[n, 3]`, the size of each image of the batch.
            numbers: Which of the images of `pixels` each image of the batch is.
            groups: Groups of ranks that call this with the same images, and whether the gradient is summed over each.

        Returns:
            `[V, 1 + D, H]`: the embeddings of all tokens, and the rows that the tower adds to the outputs of D layers.
            The gradients of repeated rows are summed in fp32 at least.

        Communication: an all-gather of the rows over each group; its backward is a reduce-scatter where gradients are
        summed, else each rank takes its own part.
        """
        unique_grid = grid[first_of_each(numbers)]
        patches = unique_grid.prod(1).tolist()
        sizes = [count // self.merged for count in patches]
        rank, ranks = 0, 1
        for group, _ in groups:
            if group is not None:
                rank, ranks = rank + ranks * group.rank(), ranks * group.size()
        shares = divided(patches, ranks)
        if local_numbers := shares[rank]:
            pixels_of = pixels.split(patches)
            rows = self._rows(
                name, torch.cat([pixels_of[number] for number in local_numbers]), unique_grid[local_numbers]
            )
        else:
            rows = self.no_rows(pixels.device)
        max_rows = max(sum(sizes[number] for number in share) for share in shares)
        rows = pad(rows, (0, 0, 0, 0, 0, max_rows - len(rows)))
        for group, reduce_gradient in groups:
            rows = gather_from_sequence_parallel(rows, group, reduce_gradient=reduce_gradient)
        row_ranges: dict[int, Tensor] = {}
        for begin, share in zip(range(0, ranks * max_rows, max_rows), shares, strict=True):
            for number in share:
                row_ranges[number] = torch.arange(begin, begin + sizes[number])
                begin += sizes[number]
        return repeated_rows(rows, torch.cat([row_ranges[number] for number in numbers]).to(rows.device))

    def no_rows(self, device: torch.device) -> Tensor:
        """Return `[0, 1 + D, H]` of a smallest image, by which the tower gets zero gradients."""
        config = self.inner.config.vision_config
        height, width = self.vision.merge(config)
        blank = torch.zeros(height * width, *self.vision.patch_shape(config), device=device)
        return self._rows("image", blank, torch.tensor([[1, height, width]], device=device))[:0]

    def _rows(self, name: str, pixels: Tensor, grid: Tensor) -> Tensor:
        """Return `[V, 1 + D, H]` of all given images or videos."""
        original = getattr(type(self.inner), f"get_{name}_features")
        output = original(self.inner, pixels.to(self.dtype), grid, return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        self.output, self.splits_levels = type(output), not isinstance(levels[-1], Tensor)
        return torch.stack([level if isinstance(level, Tensor) else torch.cat(tuple(level)) for level in levels], dim=1)

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
            original = type(self.inner).get_placeholder_mask
            return original(
                self.inner, input_ids, inputs_embeds, image_features=image_features, video_features=video_features
            )
        masks = tuple((types == kind)[None, :, None] for kind in (1, 2))
        for mask, features, modality in zip(masks, (image_features, video_features), ("image", "video"), strict=True):
            if features is not None and int(mask.sum()) * inputs_embeds.shape[-1] != features.numel():
                raise ValueError(
                    f"mm_token_type_ids has {int(mask.sum())} {modality} tokens, and the tower returns "
                    f"{features.numel() // inputs_embeds.shape[-1]} features; give the ids and the {modality}s of one "
                    "call of the processor"
                )
        return masks

    def touch_tower(self, embedding: nn.Module, args: object, output: Tensor) -> Tensor | None:
        """Hook of the input embedding: in a batch without images, add an empty sum of the tower's rows.

        So the tower's parameters get (zero) gradients from a text-only batch, and FSDP2 gathers them on this rank when
        another rank has images. The embedding is where transformers itself would next run the tower.
        """
        call = self.state.current
        if call is None or call.has_images or call.decoding:
            return None
        return output + self.no_rows(output.device).sum().to(output.dtype)


def divided(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide images by their patches: the numbers of each rank's images, the largest first to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(patches)), key=lambda number: -patches[number]):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += patches[number]
    return [sorted(share) for share in shares]


def first_of_each(numbers: Sequence[int]) -> list[int]:
    """Return the first position of each of the numbers 0, 1, ..."""
    return [numbers.index(number) for number in range(max(numbers) + 1)]


def take_numbers(kwargs: dict[str, Any]) -> dict[str, list[int]]:
    """Take out of a call which of the pixels' images each image of the batch is, by modality.

    Raises:
        ValueError: The numbers do not count the images of the grid, or skip a number.
    """
    numbers_of = {}
    for name, keyword in _NUMBERS.items():
        value = kwargs.pop(keyword, None)
        if value is None:
            continue
        numbers, grid = [int(number) for number in value], kwargs.get(f"{name}_grid_thw")
        if grid is None or len(numbers) != len(grid) or set(numbers) != set(range(max(numbers, default=-1) + 1)):
            raise ValueError(
                f"{keyword}={numbers}: give one number for each row of {name}_grid_thw "
                f"({0 if grid is None else len(grid)}), which of the {name}s of the pixels it is: 0, 1, ..."
            )
        numbers_of[name] = numbers
    return numbers_of


def has_images(kwargs: dict[str, Any]) -> bool:
    """Return whether a call brings images or videos."""
    return any(kwargs.get(name) is not None for name in _PIXELS)


def cut_visual_rows(kwargs: dict[str, Any], plan: BatchPlan) -> None:
    """DeepStack: cut the mask `[1, T]` of visual tokens and their rows to this rank's part."""
    mask, rows = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if plan.group is None or not isinstance(mask, Tensor):
        return
    begin = int(mask[:, : plan.local_tokens.start].sum())
    local = mask[:, plan.local_tokens]
    kwargs["visual_pos_masks"] = local
    if rows is not None:
        kwargs["deepstack_visual_embeds"] = [x[begin : begin + int(local.sum())] for x in rows]
