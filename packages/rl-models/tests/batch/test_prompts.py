"""Other prompts in front of the same responses: tokens, masks, and numbers brought back to the first batch."""

from __future__ import annotations

import pytest
import torch

from parallel_layers.head import SamplingMask
from rl_models import Batch, VisualInputs
from rl_models.batch import OtherPrompts


def test_responses_stand_behind_other_prompts_and_numbers_come_back() -> None:
    kept = SamplingMask.from_rows([[], [], [3], [], [5, 6], [], [], [], [9], [10]])
    batch = Batch(
        torch.arange(1, 11),
        (5, 2, 3),
        # A turn of an environment between two of the policy, no response, and a response at once.
        torch.tensor([0, 0, 1, 0, 1, 0, 0, 0, 1, 1]).bool(),
        sampling_mask=kept,
    )
    other = OtherPrompts.of(batch, [[20], torch.tensor([21, 22]), [23, 24, 25]])
    assert [row.tolist() for row in other.batch.split()] == [[20, 3, 4, 5], [21, 22], [23, 24, 25, 9, 10]]
    assert other.batch.mask.tolist() == [bool(x) for x in (0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1)]
    assert other.batch.sampling_mask is not None
    assert other.batch.sampling_mask.tolist() == [[], [3], [], [5, 6], [], [], [], [], [], [9], [10]]
    tokens = other.batch.tokens
    assert other.aligned(tokens).tolist() == [0, 0, 3, 4, 5, 0, 0, 0, 9, 10]
    assert other.aligned(tokens, -1).tolist() == [-1, -1, 3, 4, 5, -1, -1, -1, 9, 10]
    wide = other.aligned(torch.stack((tokens, -tokens), 1).float())
    assert wide.tolist() == [[x, -x] for x in (0, 0, 3, 4, 5, 0, 0, 0, 9, 10)]


@pytest.mark.parametrize(
    ("prompts", "visual", "message"),
    [
        ([[1]], (), r"got prompts of \[1\] tokens for 2 sequences; give a prompt for each"),
        ([[1], []], (), r"got prompts of \[1, 0\] tokens for 2 sequences"),
        ([[1], "a"], (), "prompt 1 must be"),
        (
            [[1], [2]],
            (None, VisualInputs(pixel_values=torch.zeros(4, 3), image_grid_thw=torch.tensor([[1, 2, 2]]))),
            "other prompts are for text alone",
        ),
    ],
)
def test_a_wrong_prompt_is_refused(prompts: list[list[int]], visual: tuple[None, VisualInputs], message: str) -> None:
    batch = Batch.from_sequences([[1, 2], [3, 4]], visual=visual)
    with pytest.raises(ValueError, match=message):
        OtherPrompts.of(batch, prompts)
