"""Attention with one order of sums: against the reference, and decoding against a pass, on a GPU to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.attention.kernel_interface import Scoring, Segments
from parallel_layers.attention.reference import REFERENCE
from parallel_layers.kernels.block_attention import block_attention, supports_block_attention

LENGTHS = [5, 70, 1, 131]
# Query heads, key-value heads, size of a key and of a value, window and soft-cap.
CASES: list[tuple[int, int, int, int, int | None, float | None]] = [
    (4, 2, 32, 32, None, None),
    (6, 2, 24, 24, 40, None),
    (2, 2, 192, 128, None, None),
    (8, 1, 64, 64, None, 3.0),
]


def inputs(device: torch.device, heads: int, kv_heads: int, size: int, value_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter cannot multiply bf16
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    return [torch.randn(sum(LENGTHS), *shape, device=device).to(dtype) for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """One pass over packed sequences."""
    bounds = torch.tensor([0, *LENGTHS], device=q.device).cumsum(0).int()
    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": 0.3}
    return block_attention(q, k, v, bounds, bounds.diff().int(), max(LENGTHS), begins_S=bounds, **options)


def in_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """A pool of blocks in another order than the sequences', and their table."""
    counts = [-(-length // block) for length in LENGTHS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    pool = torch.full((sum(counts), x.shape[1], block, x.shape[2]), float("nan"), dtype=x.dtype, device=x.device)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, (tokens, count) in enumerate(zip(x.split(LENGTHS), counts, strict=True)):
        for column in range(count):
            table[row, column] = number = order.pop()
            part = tokens[column * block : (column + 1) * block]
            pool[number, :, : len(part)] = part.transpose(0, 1)
    return pool, table.to(x.device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(device: torch.device, case: Any) -> None:
    *sizes, window, softcap = case
    q, k, v = inputs(device, *sizes)
    found, lse = attend(q, k, v, window, softcap)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    segments, scoring = Segments.of(bounds, max(LENGTHS)), Scoring(True, window, 0.3, softcap)
    truth, truth_lse = REFERENCE.forward(q.double(), k.double(), v.double(), segments, scoring)
    torch.testing.assert_close(found.double(), truth, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_over_blocks_is_a_part_of_a_pass(device: torch.device, case: Any) -> None:
    """The last tokens of each sequence, over a pool whose free places are NaN; on a GPU to the bit."""
    *sizes, window, softcap = case
    q, k, v = inputs(device, *sizes)
    whole, whole_lse = attend(q, k, v, window, softcap)
    (keys, table), (values, _) = (in_blocks(x, 64) for x in (k, v))
    used, ends = torch.tensor(LENGTHS, device=device).int(), torch.tensor(LENGTHS, device=device).cumsum(0)
    bounds = torch.arange(len(LENGTHS) + 1, device=device).int()
    out, lse = block_attention(
        q[ends - 1], keys, values, bounds, used, 1, table_SB=table, window=window, softcap=softcap, scale=0.3
    )
    if device.type == "cuda":
        assert torch.equal(out, whole[ends - 1])
        assert torch.equal(lse, whole_lse[:, ends - 1])
    torch.testing.assert_close(out, whole[ends - 1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, whole_lse[:, ends - 1], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_what_it_takes() -> None:
    q, k, _ = inputs(torch.device("cuda"), 4, 2, 32, 32)
    assert supports_block_attention(q, k)
    assert not supports_block_attention(q.float(), k.float())
    assert not supports_block_attention(q, k, page=16)
