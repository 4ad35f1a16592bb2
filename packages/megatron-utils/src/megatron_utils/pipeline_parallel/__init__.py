"""Pipeline parallelism: micro-batches of ragged batches, and the schedules that run them."""

from typing import TYPE_CHECKING, Any

from megatron_utils.pipeline_parallel.micro_batches import SequenceCost, restore_order, split_micro_batches
from megatron_utils.pipeline_parallel.packing import (
    ZigzagBatch,
    pack_micro_batches,
    pack_zigzag,
    pad_to,
    unpack_zigzag,
)

if TYPE_CHECKING:
    from megatron_utils.pipeline_parallel.schedule import run_schedule

__all__ = [
    "SequenceCost",
    "ZigzagBatch",
    "pack_micro_batches",
    "pack_zigzag",
    "pad_to",
    "restore_order",
    "run_schedule",
    "split_micro_batches",
    "unpack_zigzag",
]


def __getattr__(name: str) -> Any:
    # megatron.core takes seconds to import, and those who only split micro-batches do not need it.
    if name == "run_schedule":
        from megatron_utils.pipeline_parallel.schedule import run_schedule

        return run_schedule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
