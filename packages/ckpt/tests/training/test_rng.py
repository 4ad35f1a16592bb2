"""A resumed run draws on where the saved one stopped: named streams and torch's own generators, on every device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt import Place, layout_for, load_hf, load_training, restore_rng, save_training
from parallel_layers.memory import RngStates

Checkpoints = Callable[..., Path]
ON_ONE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_TWO = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))]


def masks(streams: RngStates, device: str) -> dict[str, Tensor]:
    """The next dropout masks of each stream, and of torch's own generators, on the device and on the CPU."""
    drawn = {}

    def draw(name: str) -> None:
        for where in dict.fromkeys(("cpu", device)):
            drawn[f"{name} on {where}"] = torch.dropout(torch.ones(1001, device=where), 0.5, train=True).cpu()

    draw("torch's own")
    for name in streams.names:
        with streams.fork(name):
            draw(name)
    draw("torch's own again")
    return drawn


def placed(group: Any) -> Place:
    return Place() if group is None else Place(tp=(group.rank(), group.size()))


def go_on(
    group: Any, source: str, device: str, root: str | None, asynchronous: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A run that has drawn a while, saves (or does not) and draws on: the weights that it has, and the masks."""
    layout, place = layout_for(source), placed(group)
    tensors = load_hf(source, layout, place, device=device, group=group)
    torch.manual_seed(50 if group is None else 50 + group.rank())
    streams = RngStates.tensor_parallel(7, group, device)
    for _ in range(3):
        masks(streams, device)
    if root is not None:
        state = streams.state_dict()
        pending = save_training(root, 1, tensors, layout, place, streams=state, group=group, asynchronous=asynchronous)
        for stream in state.values():
            stream.zero_()
        drawn = masks(streams, device)
        pending.wait(timeout=60)
        return tensors, drawn
    return tensors, masks(streams, device)


def resume(group: Any, source: str, device: str, root: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Another process's run that has drawn other numbers, and takes the saved one's place."""
    torch.manual_seed(1234)
    streams = RngStates.tensor_parallel(99, group, device)
    masks(streams, device)
    state = load_training(root, layout_for(source), placed(group), device=device, group=group)
    streams.load_state_dict(state.streams)
    # The streams bring torch's own state along; it must also come back without them.
    torch.manual_seed(4321)
    restore_rng(state.rng)
    return state.tensors, masks(streams, device)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("device", ON_ONE)
def test_the_next_dropout_masks_of_a_resumed_run_are_the_saved_ones(
    device: str, asynchronous: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = str(checkpoint("llama"))
    _, undisturbed = go_on(None, source, device, None)
    assert len(undisturbed) == (8 if device == "cuda" else 4)
    weights, saved = go_on(None, source, device, str(tmp_path), asynchronous)
    assert_equal(saved, undisturbed)
    tensors, resumed = resume(None, source, device, str(tmp_path))
    assert_equal(resumed, undisturbed)
    assert_equal(tensors, weights)
    distinct = {bytes(mask.bool().tolist()) for mask in resumed.values()}
    assert len(distinct) == len(resumed)


@pytest.mark.parametrize("device", ON_TWO)
def test_every_rank_gets_its_own_streams_back(device: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    from parallel_layers.testing import RankPool

    source = str(checkpoint("llama"))
    pool = RankPool(2, backend="nccl") if device == "cuda" else ranks
    try:
        saved = pool.run(go_on, source, device, str(tmp_path), world=2, timeout=120)
        resumed = pool.run(resume, source, device, str(tmp_path), world=2, timeout=120)
    finally:
        if pool is not ranks:
            pool.close()
    for (weights, masks_before), (tensors, masks_after) in zip(saved, resumed, strict=True):
        assert_equal(masks_after, masks_before)
        assert_equal(tensors, weights)
    first, second = (drawn for _, drawn in resumed)
    for name, mask in first.items():
        # What is replicated draws alike on both ranks, and nothing else does.
        assert torch.equal(mask, second[name]) == name.startswith("replicated"), name


def test_what_is_no_state_of_a_generator_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("llama"))
    tensors = load_hf(checkpoint("llama"), layout)
    for odd in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"streams\['a'\] is of type .*; pass generator states"):
            save_training(tmp_path, 1, tensors, layout, streams={"a": odd})
    assert list(tmp_path.iterdir()) == []


def test_a_run_saved_without_streams_has_none(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("llama"))
    save_training(tmp_path, 1, load_hf(checkpoint("llama"), layout), layout)
    assert load_training(tmp_path, layout).streams == {}
