"""The index of a checkpoint, as other versions of torch write it."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megatron_utils.dist_checkpointing.index import INDEX, read_index


def test_an_index_of_a_later_torch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 stores a property more than 2.11."""
    state = TensorProperties.__getstate__
    with monkeypatch.context() as later:
        later.setattr(TensorProperties, "__getstate__", lambda self: (*state(self), "new"))
        written = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2]), [])
        (tmp_path / INDEX).write_bytes(pickle.dumps(Metadata({"x": written})))
    entry = read_index(tmp_path).state_dict_metadata["x"]
    assert entry.properties.dtype == torch.bfloat16
    assert entry.size == (2,)
