"""Ranks exchange small messages while they load and save, and no tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt import Place, layout_for, load_hf, load_training, save_hf, save_training, stream_hf

Checkpoints = Callable[..., Path]
# A collective's operator, and the type and the bytes of the largest tensor that it is given.
Message = tuple[str, torch.dtype, int]


class Traffic(TorchDispatchMode):
    """Notes every collective and every point-to-point message of this rank, by whichever function it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            largest = max(tensors, key=lambda tensor: tensor.nbytes)
            self.messages.append((func.overloadpacket.__name__, largest.dtype, largest.nbytes))
        return func(*args, **(kwargs or {}))


def traffic_of(group: Any, source: str, target: str, tp: int) -> dict[str, tuple[list[Message], int]]:
    """The messages of a load, a save, a stream and a training checkpoint, and the number of this rank's tensors."""
    layout = layout_for(source)
    place = Place(tp=(group.rank() % tp, tp), pp=(group.rank() // tp, group.size() // tp))
    with Traffic() as loading:
        tensors = load_hf(source, layout, place, group=group)
    with Traffic() as saving:
        save_hf(f"{target}/hf", tensors, layout, place, group=group, max_shard_size="100KB")
    with Traffic() as streaming:
        for _ in stream_hf(tensors, layout, group, place):
            pass
    with Traffic() as training:
        save_training(f"{target}/run", 1, tensors, layout, place, group=group)
        load_training(f"{target}/run", layout, place, group=group)
    kinds = {"load": loading, "save": saving, "stream": streaming, "training": training}
    return {name: (traffic.messages, len(tensors)) for name, traffic in kinds.items()}


def test_loading_and_saving_send_no_tensor(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    """Allowed are all-gathers of a length and of that many bytes of JSON: the arguments, `null` where a step went well,
    and for a save each tensor's name, type, box and checksum. They do not grow with the tensors.

    The stages of tp 2 x pp 2 have copies of a tied embedding, which a save compares by their checksums.
    """
    sent: dict[tuple[str, int, int], int] = {}
    for width in (32, 256):
        source = str(checkpoint("llama-tied", hidden_size=width))
        for number, rank in enumerate(ranks.run(traffic_of, source, str(tmp_path / f"{width}"), 2, world=4)):
            loading, _ = rank["load"]
            arguments, went_well = loading[:2], loading[2:]
            assert went_well == [("allgather_", torch.int64, 8), ("allgather_", torch.uint8, len("null"))] * 2
            assert [kind for *kind, _ in arguments] == [list(message[:2]) for message in went_well[:2]]
            assert arguments[1][2] < 200
            saving, tensors = rank["save"]
            assert {name for name, _, _ in saving} == {"allgather_"}
            assert {(dtype, nbytes) for _, dtype, nbytes in saving[::2]} == {(torch.int64, 8)}
            assert {dtype for _, dtype, _ in saving[1::2]} == {torch.uint8}
            training, _ = rank["training"]
            assert {name for name, _, _ in training} == {"allgather_"}
            for kind, messages in (("save", saving), ("stream", rank["stream"][0]), ("training", training)):
                sent[kind, width, number] = sum(nbytes for _, _, nbytes in messages)
            assert sent["save", width, number] < 1000 + 100 * tensors
    for number in range(4):
        # Eight times as wide, a layer has some forty times as many elements; numbers have a digit more.
        for kind in ("save", "training"):
            assert sent[kind, 256, number] < 1.05 * sent[kind, 32, number]
        # Streaming sends tensors, and is seen to.
        assert sent["stream", 256, number] > 20 * sent["stream", 32, number] > 20 * 4096
