"""`check_boundaries` refuses exactly what describes no segments of the tokens."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from parallel_layers.data.boundaries import check_boundaries

BOUNDS = st.lists(st.integers(0, 6), max_size=4).map(lambda bounds: [0, *sorted(bounds)])


ARBITRARY = st.lists(st.integers(-1, 7), min_size=1, max_size=5)


@given(BOUNDS | ARBITRARY, st.integers(0, 7), st.integers(0, 7), st.booleans())
def test_what_is_refused(bounds: list[int], num_tokens: int, longest: int, covers: bool) -> None:
    tensor = torch.tensor(bounds, dtype=torch.int32)
    lengths = [end - begin for begin, end in pairwise(bounds)]
    # The tokens of the segments are tokens of the pack, each once and in order.
    tokens = [token for begin, length in zip(bounds, lengths, strict=False) for token in range(begin, begin + length)]
    fits = bounds[0] == 0 and len(tokens) == sum(map(abs, lengths)) and tokens == list(range(num_tokens))[: len(tokens)]
    fits = fits and (not covers or len(tokens) == num_tokens)
    if fits and max(lengths, default=0) <= longest:
        check_boundaries(tensor, num_tokens, longest, covers=covers)
        return
    message = rf"max_seqlen_k={longest} is less than" if fits else r"cu_seqlens_k \[.* must start at 0, never decrease"
    with pytest.raises(ValueError, match=message):
        check_boundaries(tensor, num_tokens, longest, name="cu_seqlens_k", covers=covers)
