"""broadcast_data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.data import broadcast_data
from parallel_layers.testing import RankPool

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


def send(group: ProcessGroup, source: int, data: dict[str, Tensor] | None) -> dict[str, Tensor]:
    mine = data if group.rank() == source else None
    result = broadcast_data(mine, group, source=source)
    if mine is not None:
        pointers = {t.untyped_storage().data_ptr() for t in mine.values() if t.numel()}
        assert not pointers & {t.untyped_storage().data_ptr() for t in result.values()}
    return result


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


tensors = st.builds(
    lambda dtype, shape: (torch.randn(shape) * 50).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=4),
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=5), tensors, max_size=5), st.integers(0, 2))
def test_any_dict_from_any_rank(ranks: RankPool, data: dict[str, Tensor], source: int) -> None:
    assert all(same(result, data) for result in ranks.run(send, source, data, world=3))
    assert same(broadcast_data(data, None), data)


def test_views_are_sent_as_they_look(ranks: RankPool) -> None:
    data = {"t": torch.arange(6).reshape(2, 3).t(), "e": torch.ones(1).expand(4)}
    assert all(same(result, data) for result in ranks.run(send, 0, data, world=2))


def send_wrong(group: ProcessGroup, data: object) -> str:
    with pytest.raises(ValueError, match="broadcast_data") as caught:
        broadcast_data(data, group)  # type: ignore[arg-type]
    return str(caught.value)


def test_every_rank_learns_of_a_mistake(ranks: RankPool) -> None:
    assert ranks.run(send_wrong, None, world=2) == ["broadcast_data: the source was given data=None"] * 2
    for message in ranks.run(send_wrong, {"a": 1}, world=2):
        assert message == "broadcast_data: data must hold tensors only, the source's holds {'a': 'int'}"


@pytest.mark.gpu(2)
def test_to_cuda(nccl_ranks: RankPool) -> None:
    data = {"a": torch.randn(3), "b": torch.tensor(True)}
    assert nccl_ranks.run(devices, data) == [["cuda:0"] * 2, ["cuda:1"] * 2]
    assert all(same(result, data) for result in nccl_ranks.run(send, 1, data))


def devices(group: ProcessGroup, data: dict[str, Tensor]) -> list[str]:
    return [str(t.device) for t in send(group, 0, data).values()]
