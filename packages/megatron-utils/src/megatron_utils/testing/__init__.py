"""`cpu_stand_in` runs Megatron-Core on a CPU, for tests and demonstrations; `tiny_config` describes small models."""

from typing import TYPE_CHECKING, Any

from megatron_utils.testing.models import MIXTURES, tiny_config, tiny_models

if TYPE_CHECKING:
    from megatron_utils.testing.cpu import cpu_stand_in, device_of, stand_in_is_active

__all__ = ["MIXTURES", "cpu_stand_in", "device_of", "stand_in_is_active", "tiny_config", "tiny_models"]


def __getattr__(name: str) -> Any:
    # Imported on use: importing megatron.core takes seconds, and the configs do not need it.
    if name in __all__:
        from megatron_utils.testing import cpu

        return getattr(cpu, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
