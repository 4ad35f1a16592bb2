"""The forward passes of prompts: their lengths, and prompts with images in one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, strategies as st

from parallel_models.generation.continuous_batching import ContinuousBatching

PROMPTS = st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=8)


@given(prompts=PROMPTS, most=st.integers(1, 12))
def test_passes_have_all_tokens_in_order_and_images_whole(prompts: list[tuple[int, bool]], most: int) -> None:
    """A pass has at most `max_tokens` tokens, but for a longer prompt with images, which is alone in its pass."""
    images = [has_images or None for _, has_images in prompts]
    batching: Any = SimpleNamespace(
        _groups=1, max_tokens=most, slots=[*range(len(prompts))], _images=images.__getitem__
    )
    leaders = [(slot, torch.arange(length)) for slot, (length, _) in enumerate(prompts)]
    passes = ContinuousBatching._passes(batching, leaders)
    for slot, (length, has_images) in enumerate(prompts):
        pieces = [one[slot][:-1].tolist() for one in passes if slot in one]
        assert [token for piece in pieces for token in piece] == [*range(length - 1)]
        assert len(pieces) <= 1 or not has_images
    for one in passes:
        assert one
        (slot, *others), computed = one, sum(len(tokens) - 1 for tokens in one.values())
        assert computed <= most or (not others and images[slot])
