"""Megatron-Core without its global state: models, optimizer, schedules, checkpoints, router replay."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_utils.grid import MegatronGrid, megatron_device, megatron_grid

__all__ = ["MegatronGrid", "megatron_device", "megatron_grid"]


def __getattr__(name: str) -> Any:
    # Imported on use: importing megatron.core takes seconds.
    if name in __all__:
        from megatron_utils import grid

        return getattr(grid, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
