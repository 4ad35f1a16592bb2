from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed.equal_parts import flat_chunk, gather_flat, split_last_dim
from parallel_layers.testing import RankPool


def test_split_last_dim() -> None:
    x = torch.arange(12).reshape(2, 6)
    views = split_last_dim(x, 3)
    assert [v.tolist() for v in views] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views)
    assert all(v.is_contiguous() for v in split_last_dim(x, 3, contiguous=True))
    assert [tuple(v.shape) for v in split_last_dim(torch.empty(2, 0), 2)] == [(2, 0), (2, 0)]
    with pytest.raises(ValueError, match=r"\(2, 6\) cannot be cut into 4 equal parts"):
        split_last_dim(x, 4)


def round_trip(group: ProcessGroup, x: Tensor) -> tuple[Tensor, Tensor]:
    chunk = flat_chunk(x, group)
    with pytest.raises(ValueError, match="not divisible"):
        flat_chunk(torch.zeros(group.size() + 1), group)
    return chunk, gather_flat(chunk, group)


def test_equal_chunks_and_their_gather(ranks: RankPool) -> None:
    x = torch.arange(24).reshape(4, 6).t()
    for rank, (chunk, whole) in enumerate(ranks.run(round_trip, x)):
        assert torch.equal(chunk, x.reshape(-1).chunk(4)[rank])
        assert torch.equal(whole.view(6, 4), x)
    assert torch.equal(gather_flat(flat_chunk(x, None), None).view(6, 4), x)
