"""The values of a box that have changed since it was sent last."""

import pytest
import torch

from rl_train.weight_sync import changes_since


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_bits_are_compared(dtype: torch.dtype) -> None:
    """A zero of another sign is a change, a NaN that stays is none; afterwards nothing has changed."""
    last = torch.tensor([1.0, 0.0, torch.nan, 4.0, *range(60)]).to(dtype)
    values = last.clone()
    values[1], values[3], values[63] = -0.0, 8.0, torch.nan
    places, changed = changes_since(last, values)
    assert places is not None
    assert places.tolist() == [1, 3, 63]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(changed.view(bits), values[[1, 3, 63]].view(bits))
    assert torch.equal(last.view(bits), values.view(bits))
    places, changed = changes_since(last, values)
    assert places is not None
    assert places.numel() == changed.numel() == 0


def test_a_whole_box_is_sent_where_it_is_smaller() -> None:
    last, values = torch.zeros(12, dtype=torch.bfloat16), torch.zeros(12, dtype=torch.bfloat16)
    values[:3] = 1
    assert changes_since(last, values)[0] is not None  # 18 of 24 bytes
    values[:4] = 2
    places, changed = changes_since(last, values)
    assert places is None
    assert changed is values
    assert torch.equal(last, values)
