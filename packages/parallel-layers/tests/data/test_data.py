"""broadcast_data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.data.broadcast import broadcast_data
from parallel_layers.testing import RankPool

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def send(group: ProcessGroup, source: int, data: dict[str, Tensor] | None) -> dict[str, Tensor]:
    mine = data if group.rank() == source else None
    result = broadcast_data(mine, group, source=source)
    if mine is not None:
        pointers = {t.untyped_storage().data_ptr() for t in mine.values() if t.numel()}
        assert not pointers & {t.untyped_storage().data_ptr() for t in result.values()}
    return result


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    if list(a) != list(b) or any(a[n].dtype != b[n].dtype or a[n].shape != b[n].shape for n in a):
        return False
    # Bit by bit, which also compares NaN and the dtypes that torch.equal does not take.
    flat = [[t.flatten().contiguous().view(torch.uint8) for t in (a[n], b[n])] for n in a]
    return all(torch.equal(*pair) for pair in flat)


tensors = st.builds(
    lambda dtype, shape: (torch.randn(shape) * 50).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=4),
)


@settings(max_examples=12, deadline=None)
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


HOLDS = "data must hold dense tensors by name, the source's holds "


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "the source was given data=None"),
        ([torch.ones(1)], "data must be a mapping of names to tensors, the source's is a list"),
        ({"a": 1}, HOLDS + "{'a': 'int'}"),
        ({1: torch.ones(1)}, HOLDS + "{'1': 'int as a name'}"),
        ({"a": torch.ones(2, device="meta")}, HOLDS + "{'a': 'on meta'}"),
        (
            {"a": torch.ones(2, dtype=torch.uint8).view(torch.uint4)},
            HOLDS + "{'a': 'torch.uint4, which torch cannot copy; its bytes are value.view(torch.uint8)'}",
        ),
        ({"a": torch.eye(2).to_sparse()}, HOLDS + "{'a': 'sparse_coo'}"),
    ],
    ids=["None", "list", "int", "name", "meta", "part of a byte", "sparse"],
)
def test_every_rank_learns_of_a_mistake(ranks: RankPool, data: object, message: str) -> None:
    assert ranks.run(send_wrong, data, world=2) == [f"broadcast_data: {message}"] * 2


def send_from_nowhere(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"source=2 is no rank of the group, which has 0\.\.1"):
        broadcast_data({}, group, source=2)


def test_a_source_that_is_no_rank(ranks: RankPool) -> None:
    ranks.run(send_from_nowhere, world=2)
    with pytest.raises(ValueError, match="source=1 is no rank"):
        broadcast_data({}, None, source=1)


def needs_gradient(group: ProcessGroup | None) -> bool:
    return broadcast_data({"a": torch.ones(2, requires_grad=True) * 2}, group)["a"].requires_grad


def test_no_result_needs_a_gradient(ranks: RankPool) -> None:
    """Else the source's would, and no other rank's."""
    assert ranks.run(needs_gradient, world=2) == [False, False]
    assert not needs_gradient(None)


@pytest.mark.gpu(2)
def test_to_cuda(nccl_ranks: RankPool) -> None:
    data = {"a": torch.randn(3), "b": torch.tensor(True)}
    assert nccl_ranks.run(devices, data) == [["cuda:0"] * 2, ["cuda:1"] * 2]
    assert all(same(result, data) for result in nccl_ranks.run(send, 1, data))


def devices(group: ProcessGroup, data: dict[str, Tensor]) -> list[str]:
    return [str(t.device) for t in send(group, 0, data).values()]
