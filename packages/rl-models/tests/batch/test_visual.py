"""`VisualInputs`: images stay with their sequence, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_layers import PackedSequence
from rl_models import Batch
from rl_models.backends.images import Images
from rl_models.batch.visual import VisualInputs, described
from rl_models.calls.dispatch import per_prompt, per_token

IMAGE, VIDEO = 1, 2
hooks: Any = None  # positions and pixels of a model
IMAGES = Images(SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO), hooks)


def images(*grids: tuple[int, int, int], seed: int = 0, **more: Any) -> VisualInputs:
    """Random images of these sizes, with patches of three numbers."""
    patches = sum(frames * rows * columns for frames, rows, columns in grids)
    pixels = torch.randn(patches, 3, generator=torch.Generator().manual_seed(seed))
    return VisualInputs(pixel_values=pixels, image_grid_thw=torch.tensor(grids), **more)


CAT = images((1, 2, 2), mm_token_type_ids=torch.tensor([0, 1, 0]))
DOG = images((1, 2, 4), (1, 4, 2), seed=1, mm_token_type_ids=torch.tensor([1, 1, 0, 1, 1, 0]))
ROWS = [[5, IMAGE, 6], [7, 8], [IMAGE, IMAGE, 3, IMAGE, IMAGE, 4]]


def batch() -> Batch:
    return Batch.from_sequences(ROWS, visual=(CAT, None, DOG), score=[[0.0] * len(row) for row in ROWS])


def test_images_stay_with_their_sequence() -> None:
    whole = batch()
    assert whole.select([2, 0, 2]).visual == (DOG, CAT, DOG)
    assert whole.select([1]).visual == ()
    assert whole.to("cpu").with_ends().with_fields(more=torch.zeros(14)).visual[:3:2] == (CAT, DOG)
    text = Batch.from_sequences([[3], [4]])
    assert Batch.concatenate([text, whole, text]).visual == (None, None, CAT, None, DOG, None, None)
    assert Batch.concatenate([text, text]).visual == ()
    parts, join = per_token(whole, 2, 64)
    assert {one for part in parts for one in part.visual} == {CAT, DOG} | ({None} if len(parts[0]) > 1 else set())
    assert torch.equal(join([part.tokens for part in parts]), whole.tokens)


def test_prompts_with_images_are_divided_with_them() -> None:
    parts, join = per_prompt(batch(), 3, 64)
    assert sorted(map(len, parts)) == [1, 1, 1]
    drawn = join([part.select([0, 0]) for part in parts])
    assert drawn.visual == (CAT, CAT, None, None, DOG, DOG)
    unclear = Batch.from_sequences(ROWS[:1], visual=(images((1, 2, 2)),))
    with pytest.raises(ValueError, match=r"prompts \[0\] have images without mm_token_type_ids"):
        per_prompt(unclear, 1, 64)


def test_a_packed_batch_has_the_images_in_order_and_a_kind_for_each_token() -> None:
    # The last token is a placeholder that a policy has drawn.
    given = images((1, 2, 2), mm_token_type_ids=torch.tensor([0, 1, 0], dtype=torch.int32))
    packed = PackedSequence.from_sequences(
        [torch.tensor(row) for row in ([5, 1, 6, 1], [1, 8], ROWS[2])], multiple_of=8
    )
    found = IMAGES.inputs(packed, (given, None, DOG))
    assert found["mm_token_type_ids"].tolist() == [0, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0]
    assert found["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 4, 2]]
    assert torch.equal(found["pixel_values"], torch.cat([given.pixel_values, DOG.pixel_values]))
    assert IMAGES.inputs(packed, (None, None, None)) == IMAGES.inputs(packed, ()) == {}


def test_equal_images_are_given_once() -> None:
    """Equal by content: a copy of an image, also beside another image, and not one of another size."""
    cat, other = replace(CAT), images((1, 1, 4))
    other = replace(other, pixel_values=CAT.pixel_values)
    both = VisualInputs(
        pixel_values=torch.cat([DOG.pixel_values[:8], CAT.pixel_values]),
        image_grid_thw=torch.tensor([[1, 2, 4], [1, 2, 2]]),
    )
    given = (CAT, DOG, None, cat, both, other)
    packed = PackedSequence.from_sequences([torch.tensor([5])] * len(given))
    found = IMAGES.inputs(packed, given)
    assert found["image_numbers"] == [0, 1, 2, 0, 1, 0, 3]
    assert len(found["image_grid_thw"]) == 7
    assert torch.equal(found["pixel_values"], torch.cat([CAT.pixel_values, DOG.pixel_values, CAT.pixel_values]))
    assert "image_numbers" not in IMAGES.inputs(packed, given, pixels=False)


def test_ranks_compare_images_by_their_bits() -> None:
    assert described((CAT, None)) == described((replace(CAT), None)) != described((None, CAT))
    assert described((images((1, 2, 2), seed=3),)) != described((CAT,))
    assert described(()) == "none"


def test_what_a_processor_returns_is_taken_apart() -> None:
    text = {"input_ids": [[5, 1, 6]], "attention_mask": [[1, 1, 1]], "mm_token_type_ids": [[0, 1, 0]]}
    pixels = {"pixel_values": torch.zeros(4, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    found = VisualInputs.from_processor(text | pixels)
    assert found is not None
    assert found.mm_token_type_ids.tolist() == [0, 1, 0]
    assert VisualInputs.from_processor(text) is None
    with pytest.raises(ValueError, match="returns pixel_attention_mask, which no model here reads"):
        VisualInputs.from_processor(text | pixels | {"pixel_attention_mask": torch.ones(1)})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "need pixel_values or pixel_values_videos"),
        ({"pixel_values": torch.zeros(4, 3)}, "pixel_values and image_grid_thw belong together"),
        ({"video_grid_thw": torch.tensor([[1, 2, 2]]), "pixel_values_videos": torch.zeros(3, 3)}, "has 3 patches and"),
        ({"pixel_values": torch.zeros(4, 3), "image_grid_thw": torch.ones(1, 3)}, r"must be \[n, 3\] integers, got"),
        (
            {"pixel_values": [0.0], "image_grid_thw": torch.tensor([[1, 1, 1]])},
            "pixel_values must be a tensor, got list",
        ),
        (
            {"pixel_values": torch.zeros(1, 3), "image_grid_thw": torch.tensor([[1, 1, 1]])}
            | {"mm_token_type_ids": torch.zeros(1, 3, dtype=torch.int64)},
            r"mm_token_type_ids must be \[L\] integers",
        ),
    ],
)
def test_inputs_that_do_not_fit_each_other_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisualInputs(**inputs)


def test_a_batch_needs_an_entry_for_each_sequence() -> None:
    with pytest.raises(ValueError, match=r"visual must be one VisualInputs or None for each of the 2 sequences"):
        Batch.from_sequences([[1], [2]], visual=(CAT,))
    with pytest.raises(ValueError, match=r"got .*'str'"):
        Batch.from_sequences([[1]], visual=("cat.png",))  # type: ignore[arg-type]


def test_tokens_and_images_that_do_not_fit_are_named() -> None:
    types = DOG.token_types(torch.tensor(ROWS[2]), IMAGE, VIDEO)
    DOG.require_tokens(types, merged=4)
    with pytest.raises(ValueError, match="3 tokens stand for pixel_values, and image_grid_thw asks for 4"):
        DOG.require_tokens(types[:4], merged=4)
