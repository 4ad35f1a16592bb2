"""Read a checkpoint without running code that its folder may hold.

Megatron-Core's format has three places for pickles: the index `.metadata`, the file `common.pt`, and entries of the
`.distcp` files that are objects instead of tensors. A pickle can call any function when it is loaded. So the index is
read with a list of allowed classes, `common.pt` is never read, and an index that lists objects is refused. torch itself
reads tensors with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

INDEX = ".metadata"
# Plain records of torch's: none of them opens a file, starts a process or imports a module.
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


def read_index(folder: Path) -> Metadata:
    """Return the index of a checkpoint: shapes, dtypes and places of its tensors.

    Raises:
        ValueError: The index is damaged, names a class that is not allowed, or lists objects besides tensors.
        OSError: The index cannot be read.
    """
    path = folder / INDEX
    with path.open("rb") as file:
        try:
            index = _IndexUnpickler(file).load()
        except Exception as error:  # a damaged pickle raises errors of nearly any type
            raise ValueError(f"{path} is no index of a checkpoint: {error}") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{path} is no index of a checkpoint: it holds a {type(index).__name__}")
    objects = [key for key, entry in index.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)]
    if objects:
        raise ValueError(
            f"{path} lists {len(objects)} pickled objects ({', '.join(map(str, objects[:3]))}), which could run code "
            "when loaded; a checkpoint holds tensors only: save it again with save_checkpoint"
        )
    if index.storage_meta is None:
        index.storage_meta = StorageMeta()
    return index


class _Properties(TensorProperties):
    """The properties that this version of torch knows: later versions store more behind them."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[: len(TensorProperties().__getstate__())])


class _IndexUnpickler(pickle.Unpickler):
    """Load an index; refuse every class and function that an index does not need."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or a dtype."""
        if name == "TensorProperties":
            return _Properties
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")
