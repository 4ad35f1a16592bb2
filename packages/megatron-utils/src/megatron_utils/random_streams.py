"""Megatron-Core's random streams of a GPU, under names that say no type of device."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import random


def tracker() -> Any:
    """Return Megatron-Core's tracker of the streams."""
    return random.get_cuda_rng_tracker()


def seed_streams(seed: int) -> None:
    """Make the streams of this rank anew."""
    random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
