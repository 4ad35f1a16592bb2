"""The leak between the sequences of a packed batch, measured on one function."""

import pytest
import torch

from hf_patches.batch import plan_batch
from hf_patches.isolation import measure_leak
from parallel_layers import PackedSequence

LENGTHS = (3, 1, 0, 6)


def running_sum(x_TH, lengths):
    return torch.cat([x.cumsum(0) for x in x_TH.split(lengths)])


def neighbours_in_gradients(x_TH):
    """The values are those of each token alone; the gradients are the previous token's, too."""
    previous = x_TH.roll(1, dims=0).square()
    return x_TH + previous - previous.detach()


@pytest.mark.parametrize(
    ("mix", "gradients", "leaks"),
    [
        (lambda x: running_sum(x, LENGTHS), True, False),
        (lambda x: running_sum(x, (sum(LENGTHS),)), True, True),
        (lambda x: running_sum(x, (3, 7)), False, True),  # one border is forgotten
        (lambda x: running_sum(x.flip(0), LENGTHS[::-1]).flip(0), True, True),  # looks ahead
        (neighbours_in_gradients, False, False),
        (neighbours_in_gradients, True, True),
        (lambda x: x * torch.where(x.min() < 0, torch.nan, 1.0), False, True),
    ],
)
def test_a_leak_is_measured(mix, gradients, leaks):
    plan = plan_batch(PackedSequence.from_sequences([torch.zeros(n, dtype=torch.int64) for n in LENGTHS]), None, "auto")
    x_TH = torch.randn(sum(LENGTHS), 4).abs()
    assert (measure_leak(mix, [x_TH], plan, gradients=gradients) != 0) == leaks
