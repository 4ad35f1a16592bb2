"""DTensors, as FSDP2 makes of a place's tensors: each rank moves the part that it has, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt import Place, layout_for, load_hf, save_hf, save_training, stream_hf
from ckpt.layout.dtensors import on_this_rank

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]

# name -> sizes of dp and tp, and how a tensor lies on dp.
DIVISIONS: dict[str, tuple[tuple[int, int], list[Placement]]] = {
    "dp 2 x tp 2": ((2, 2), [Shard(0)]),
    "dp 3": ((3, 1), [Shard(0)]),
    "dp 4, replicated": ((4, 1), [Replicate()]),
}


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("a tensor was gathered")


def refuse_to_gather(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DTensor, "full_tensor", never)
    patch.setattr(DTensor, "redistribute", never)


def mesh_of(group: Any, sizes: Sequence[int]) -> DeviceMesh:
    """A mesh over a group; one of several axes makes groups, and so needs all ranks of the pool."""
    return DeviceMesh.from_group(group, "cpu") if len(sizes) == 1 else init_device_mesh("cpu", tuple(sizes))


def divided(group: Any, source: str, division: str) -> tuple[Any, Place, dict[str, Tensor], dict[str, Tensor]]:
    """The layout, this rank's place, its tensors, and the same as DTensors."""
    (dp, tp), placements = DIVISIONS[division]
    mesh = mesh_of(group, [dp, tp] if tp > 1 else [dp])
    layout, place = layout_for(source), Place(tp=(group.rank() % tp, tp))
    whole = load_hf(source, layout, place)
    along_dp = DeviceMesh.from_group(mesh.get_group(0), "cpu")
    tensors = {name: distribute_tensor(tensor, along_dp, placements) for name, tensor in whole.items()}
    return layout, place, whole, tensors


def save_divided(group: Any, source: str, target: str, division: str) -> int:
    layout, place, _, tensors = divided(group, source, division)
    with pytest.MonkeyPatch.context() as patch, counted("pwritev") as written:
        refuse_to_gather(patch)
        save_hf(target, tensors, layout, place, group=group, max_shard_size="20KB")
    return sum(written)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", [pytest.param("llama-bias", marks=pytest.mark.slow), "qwen3-moe"])
def test_every_rank_writes_the_part_it_has(
    name: str,
    division: str,
    checkpoint: Checkpoints,
    read_all: ReadAll,
    assert_same: AssertSame,
    tmp_path: Path,
    ranks: Any,
) -> None:
    source = checkpoint(name)
    dp, tp = DIVISIONS[division][0]
    written = ranks.run(save_divided, str(source), str(tmp_path / "saved"), division, world=dp * tp)
    expected = read_all(source)
    assert_same(read_all(tmp_path / "saved"), expected)
    total = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    assert sum(written) == total
    # Rows do not divide evenly over three ranks: the last have fewer, and of a vector of one element none.
    assert max(written) < 1.3 * total / (dp * tp)


def stream_divided(group: Any, source: str, division: str) -> dict[str, Tensor]:
    layout, place, whole, tensors = divided(group, source, division)
    with pytest.MonkeyPatch.context() as patch:
        refuse_to_gather(patch)
        full = dict(stream_hf(tensors, layout, group, place, bucket_bytes=4096))
        filled = {name: tensor * 0 for name, tensor in tensors.items()}
        with counted("preadv") as reads:
            held = load_hf(source, layout, place, into=filled, group=group)
        # Only the part's own bytes are read; replicated vectors of a dp 3 mesh have parts as well.
        assert sum(reads) == sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    for name, tensor in filled.items():
        assert torch.equal(tensor.full_tensor(), whole[name]), name
        assert held[name].data_ptr() == tensor.to_local().data_ptr()
    return full


@pytest.mark.parametrize("division", ["dp 2 x tp 2", "dp 3"])
def test_parts_are_streamed_and_filled(
    division: str, checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, ranks: Any
) -> None:
    source = checkpoint("llama")
    dp, tp = DIVISIONS[division][0]
    for full in ranks.run(stream_divided, str(source), division, world=dp * tp):
        assert_same(full, read_all(source))


class Holder(nn.Module):
    """A module with a checkpoint's tensors as its parameters, dots and all."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.keys = list(tensors)
        self.values = nn.ParameterList([nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors.values()])

    def named(self) -> dict[str, Tensor]:
        return dict(zip(self.keys, self.values.parameters(), strict=True))


def train_and_save(group: Any, source: str, target: str) -> bool:
    layout = layout_for(source)
    model = Holder(load_hf(source, layout))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    load_hf(source, layout, into=model.named(), group=group)
    save_hf(target, model.named(), layout, group=group)
    return all(isinstance(tensor, DTensor) for tensor in model.named().values())


def test_a_module_under_fsdp2_is_loaded_and_saved(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path, ranks: Any
) -> None:
    source = checkpoint("qwen2-tied")
    assert all(ranks.run(train_and_save, str(source), str(tmp_path / "saved"), world=2))
    assert_same(read_all(tmp_path / "saved"), read_all(source))


def parts_of(group: Any, shape: list[int], sizes: list[int], dims: list[int | None]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    mesh = mesh_of(group, sizes)
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    local, box = on_this_rank("x", distribute_tensor(tensor, mesh, placements), tuple(shape))
    assert torch.equal(local, tensor[tuple(slice(start, stop) for start, stop in box)])


@pytest.mark.parametrize("shape", [[5, 3], [1, 7], [4, 4], [2, 9]])
@pytest.mark.parametrize(
    ("sizes", "dims"),
    [([4], [0]), ([3], [1]), ([2, 2], [0, 0]), ([2, 2], [1, 0]), ([2, 2], [None, 1]), ([2, 2], [0, None])],
)
def test_a_part_is_the_box_that_torch_leaves(shape: list[int], sizes: list[int], dims: Any, ranks: Any) -> None:
    ranks.run(parts_of, shape, sizes, dims, world=torch.Size(sizes).numel())


def parts_under_fsdp2(group: Any, shape: list[int], dim: int | None) -> None:
    """FSDP2 cuts the rows of a tensor that tensor parallelism has cut along `dim`."""
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placement = Replicate() if dim is None else Shard(dim)
    module = nn.ParameterDict({"x": nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement]))})
    fully_shard(module, mesh=mesh["dp"])
    local, box = on_this_rank("x", module["x"], tuple(shape))
    assert torch.equal(local, whole[tuple(slice(start, stop) for start, stop in box)])
    assert len(module["x"].placements) == 2


@pytest.mark.parametrize(
    ("shape", "dim"), [([8, 3], 0), ([10, 2], 0), ([2, 4], 0), ([5, 4], 1), ([4, 2, 6], 2), ([6], 0), ([3, 2], None)]
)
def test_a_part_of_a_tensor_parallel_shard_is_a_box(shape: list[int], dim: int | None, ranks: Any) -> None:
    ranks.run(parts_under_fsdp2, shape, dim, world=4)


def refused(group: Any, source: str, target: str) -> None:
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    mesh = DeviceMesh.from_group(group, "cpu")
    odd: Sequence[Placement] = (_StridedShard(0, split_factor=2), Partial())
    for placement in odd:
        local = tensors["model.norm.weight"][:16] if isinstance(placement, _StridedShard) else torch.zeros(32)
        spoilt = {
            **tensors,
            "model.norm.weight": DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=torch.Size([32]), stride=(1,)
            ),
        }
        for save in (
            lambda spoilt=spoilt: save_hf(target, spoilt, layout, group=group),
            lambda spoilt=spoilt: save_training(target, 1, spoilt, layout, group=group),
            lambda spoilt=spoilt: load_hf(source, layout, into=spoilt, group=group),
        ):
            with pytest.raises(ValueError, match=r"model.norm.weight.*is placed as.*redistribute it to Shard and"):
                save()
    whole = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    # Copies of one tensor that are divided differently cannot be told apart by their boxes.
    mixed = whole if group.rank() else tensors
    with pytest.raises(ValueError, match=r"all of model.embed_tokens.weight once.*divide all copies of a tensor alike"):
        save_hf(target, mixed, layout, group=group)


def test_what_is_no_box_is_refused_by_name(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    ranks.run(refused, str(checkpoint("llama")), str(tmp_path / "saved"), world=2, timeout=30)
    assert list(tmp_path.iterdir()) == []
