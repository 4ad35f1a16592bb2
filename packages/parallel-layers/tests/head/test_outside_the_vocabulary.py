"""Token ids and labels on the device are checked there, in the embedding and in the losses alike.

On the CPU all of them raise ValueError: see the other files of this folder.
"""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from parallel_layers.head.vocabulary import check_token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a token id is outside the vocabulary 0..8"),
        ({"ignore_index": -100}, "a label is outside the vocabulary 0..8"),
    ],
)
def test_cuda_numbers_are_asserted_and_never_read(options: dict[str, int], message: str) -> None:
    """A fake tensor has no values: reading one on the host raises."""
    with FakeTensorMode(), mock.patch.object(torch, "_assert_async") as asserted:
        numbers = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(DataDependentOutputException):
            check_token_ids(numbers, 9, **options)
        with mock.patch.object(Tensor, "is_cuda", True):
            check_token_ids(numbers, 9, **options)
    ((condition, text),) = (call.args for call in asserted.call_args_list)
    assert isinstance(condition, Tensor)
    assert condition.shape == ()
    assert text == message


SCRIPT = """
import torch
from parallel_layers import VocabParallelEmbedding, linear_log_probs
from parallel_layers.head import vocab_parallel_log_probs

numbers = torch.tensor([0, -100, {bad}], device="cuda")
{call}
torch.cuda.synchronize()
print("went on")
"""
CALLS = {
    "embedding": "VocabParallelEmbedding(9, 8, device='cuda')(numbers.clamp(min=0))",
    "head": "linear_log_probs(torch.ones(3, 8, device='cuda'), torch.ones(9, 8, device='cuda'), numbers)",
    "losses": "vocab_parallel_log_probs(torch.ones(3, 9, device='cuda'), numbers)",
}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_a_program_with_a_wrong_number_on_the_device_stops(call: str) -> None:
    """In a process of its own: CUDA is of no use after a failed assertion."""
    for bad, goes_on in ((8, True), (9, False)):
        script = SCRIPT.format(bad=bad, call=CALLS[call])
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        assert ("went on" in done.stdout) == goes_on, done.stderr
