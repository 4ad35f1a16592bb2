"""`MicroBatch`: what one pass of an engine takes."""

from __future__ import annotations

from dataclasses import dataclass

from parallel_layers import PackedSequence
from parallel_layers.moe import RouterReplay
from rl_models.batch import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences, and everything beside the weights that a pass over them depends on.

    Attributes:
        packed: The tokens, padding included.
        temperature: The logits are divided by this number.
        replay: Records where routers send the tokens of `packed`, or says where they go. None: the routers choose.
        batch: The sequences with their fields, which a loss reads; engines do not.
        masked: The number of tokens in the mask of `batch`.
    """

    packed: PackedSequence
    temperature: float = 1.0
    replay: RouterReplay | None = None
    batch: Batch | None = None
    masked: int = 0
