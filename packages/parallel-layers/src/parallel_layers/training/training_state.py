"""`TrainingState`: a model of this package and its optimizers in `torch.distributed.checkpoint`, FSDP2 or not.

A rank holds rectangles of full tensors (`parallel_layers.module.sharding`), under FSDP2 some rows of them. Each
rectangle is written as a chunk of the full tensor, and chunks that several ranks hold are written once. So a
checkpoint is independent of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from parallel_layers.distributed.checkpoint_guard import unguarded
from parallel_layers.module.sharding import blocks_of, first_row, full_shape, get_sharding, is_dtensor

# Parts of module names that torch.compile and activation checkpointing add; torch's own state dicts omit them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")

Owners = dict[str, tuple[nn.Module, str]]


class TrainingState:
    """The state of a model and its optimizers, for `torch.distributed.checkpoint`.

        dcp.save({"app": TrainingState(model, optimizer)}, checkpoint_id=folder)
        dcp.load({"app": TrainingState(model, optimizer)}, checkpoint_id=folder)  # on any other tp and dp

    Names come from `torch.distributed.checkpoint.state_dict.get_state_dict`, shapes from the undivided model.
    `load` writes into the tensors that the model and the optimizers have. Every rank of the default group takes part.
    torch 2.14 and older cannot read what 2.15 saves. `dcp.async_save` is refused. `dcp.save` of an optimizer's state
    dict alone loses shards and raises no error.

    Args:
        model: A module with layers of this package; after `fully_shard`, if FSDP2 is used.
        optimizers: The optimizer or optimizers of its parameters; none saves the model alone.

    Raises:
        ValueError: When saving or loading: an optimizer has a state of a divided parameter that has neither the
            parameter's shape nor a single element, so that nothing says how the state is divided.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = ()) -> None:
        self.model = model
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of `model` and `optimizers`, with sharded tensors as chunks of full tensors."""
        # A second's import that training may not need.
        from torch.distributed.checkpoint.state_dict import get_state_dict

        states: Any = get_state_dict(self.model, self.optimizers)
        model, optimizer = states
        owners = _owners(self.model)
        wrapped: dict[str, Any] = {"model": {name: _chunks(owners, name, unguarded(x)) for name, x in model.items()}}
        if self.optimizers:
            slots = optimizer["state"].items()
            moments = {fqn: {slot: _slot(owners, fqn, slot, x) for slot, x in state.items()} for fqn, state in slots}
            wrapped["optimizer"] = {**optimizer, "state": moments}
        return wrapped

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the values that were read into the tensors of `state_dict()`."""
        from torch.distributed.checkpoint.state_dict import set_state_dict  # as above

        plain = _unwrapped(state_dict)
        model, optimizer = plain["model"], plain.get("optimizer", {})
        set_state_dict(self.model, self.optimizers, model_state_dict=model, optim_state_dict=optimizer)


class ShardedTensorView(Tensor):
    """This rank's rectangles of a full tensor, with the full shape, for `torch.distributed.checkpoint` alone.

    `held` is the tensor that holds the rectangles; `pieces` has a view of each rectangle by its first index.
    """

    local: Tensor
    pieces: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], local: Tensor, pieces: dict[tuple[int, ...], Tensor]) -> ShardedTensorView:
        """Wrap the rectangles without allocating memory."""
        view: ShardedTensorView = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        view.local, view.pieces = local, pieces
        return view

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Return a write item for each rectangle of this rank."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk in self.__create_chunk_list__():
            properties = TensorProperties.create_from_tensor(self.pieces[tuple(chunk.offsets)])
            data = TensorWriteData(chunk, properties, self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        """Return the place of each rectangle in the full tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(place), piece.shape) for place, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return a writable view of the rectangle at a place."""
        return self.pieces[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Refuse all operations, among them the copies of an asynchronous save."""
        raise ValueError(
            f"{func} was called on a tensor of TrainingState.state_dict(), which only torch.distributed.checkpoint's "
            "save and load take (not async_save); use model.state_dict() for anything else"
        )


def _owners(model: nn.Module) -> Owners:
    """Return the module and the local name of each sharded parameter and buffer, by torch's full name."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    owners = {}
    for path, owner in model.named_modules(remove_duplicate=False):
        clean = [component for component in path.split(".") if component and component not in _WRAPPERS]
        for name in (*owner._parameters, *owner._buffers):
            if get_sharding(owner, name):
                owners[".".join((*clean, name))] = (owner, name)
    return owners


def _chunks(owners: Owners, fqn: str, x: Any) -> Any:
    return ShardedTensorView(full_shape(*owners[fqn]), x, dict(_pieces(*owners[fqn], x))) if fqn in owners else x


def _slot(owners: Owners, fqn: str, slot: str, x: Any) -> Any:
    """Return an optimizer's state of a parameter: sharded as the parameter is, or one number."""
    if fqn not in owners or not isinstance(x, Tensor):
        return x
    parameter = getattr(*owners[fqn])
    if x.shape == parameter.shape:
        return _chunks(owners, fqn, x)
    if x.numel() == 1:
        return x
    raise ValueError(
        f"the optimizer's state {slot!r} of {fqn} has shape {list(x.shape)}, the parameter {list(parameter.shape)}; "
        "TrainingState takes states of the parameter's shape and single numbers, so use another optimizer (AdamW)"
    )


def _pieces(owner: nn.Module, name: str, x: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the rectangles of the full tensor in `x`; under FSDP2 `x` holds some rows."""
    begin = first_row(x)
    local = x.to_local() if is_dtensor(x) else x
    for local_slices, full in blocks_of(owner, name):
        start, stop = max(local_slices[0].start, begin), min(local_slices[0].stop, begin + len(local))
        piece = local[(slice(start - begin, max(stop, start) - begin), *local_slices[1:])]
        if piece.numel():
            yield (full[0].start + start - local_slices[0].start, *(side.start for side in full[1:])), piece


def _unwrapped(value: Any) -> Any:
    """Return a nested state dict with views replaced by the tensors that hold them."""
    if isinstance(value, ShardedTensorView):
        return value.local
    return {key: _unwrapped(entry) for key, entry in value.items()} if isinstance(value, dict) else value
