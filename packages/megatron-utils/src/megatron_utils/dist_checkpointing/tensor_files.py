"""Write and read the tensors of a checkpoint in Megatron-Core's format, the same files with every version.

The steps are the steps of Megatron-Core's `save` and `load`. Versions keep values that are no tensors in different
places; here such values are always in `common.pt`, which every version reads. `load_tensors` never opens it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_utils.core_version import INSTALLED

_FORMAT = CheckpointingConfig("torch_dist", 1)


def save_tensors(
    state: dict[str, Any], folder: Path, *, replicas: ProcessGroup, asynchronous: bool, content: dict[str, Any]
) -> Any:
    """Write sharded tensors to a folder; the members of `replicas` share the writing.

    Args:
        state: Megatron-Core's descriptions of this rank's tensors.
        folder: An empty folder.
        replicas: The group of ranks that hold copies of the same tensors.
        asynchronous: Return a request for Megatron-Core's `AsyncCallsQueue` instead of writing.
        content: Megatron-Core's content metadata, which its own readers need.
    """
    sharded, common = save_preprocess({**state, "content_metadata": content})
    if dist.get_rank() == 0:
        torch.save(common, folder / "common.pt")
    strategy = torch_strategy.TorchDistSaveShardedStrategy(_FORMAT.sharded_backend, _FORMAT.sharded_backend_version)
    if replicas.size() > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, replicas)

    def write_format() -> None:
        if dist.get_rank() == 0:
            save_config(_FORMAT, str(folder))
        dist.barrier()

    if asynchronous:
        request = strategy.async_save(sharded, folder, **INSTALLED.async_save)
        request.finalize_fns.append(write_format)
        return request
    strategy.save(sharded, folder)
    write_format()
    return None


def load_tensors(template: dict[str, Any], folder: Path, index: Metadata, *, replicas: ProcessGroup) -> dict[str, Any]:
    """Read the tensors that `template` describes, by an index of `read_index`; `replicas` share the reading.

    Raises:
        CheckpointingException: The descriptions of the ranks do not cover each tensor exactly once.
    """
    strategy = _IndexedStrategy(index)
    if replicas.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)
    force_all_tensors_to_non_fp8(template)
    sharded, state, factories = load_preprocess(template)
    sharded, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(state, strategy.load(sharded, folder))
    return dict(apply_factory_merges(state, factories))


class _IndexedStrategy(torch_strategy.TorchDistLoadShardedStrategy):
    """Megatron-Core's loading of tensors, by an index that is at hand."""

    def __init__(self, index: Metadata) -> None:
        super().__init__()
        self._index = index

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *options: str) -> Any:
        """Load the tensors; the reader that Megatron-Core would make unpickles the index instead."""
        original = torch_strategy._get_filesystem_reader
        torch_strategy._get_filesystem_reader = lambda folder, **_: _IndexedReader(folder, self._index)
        try:
            return super().load(sharded_state_dict, checkpoint_dir, *options)
        finally:
            torch_strategy._get_filesystem_reader = original


class _IndexedReader(FileSystemReader):
    def __init__(self, folder: str | Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index that was read and checked before."""
        return self._index
