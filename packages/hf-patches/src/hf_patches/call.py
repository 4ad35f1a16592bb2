"""One forward pass of a patched model: what it was called with, and what it returns."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from hf_patches.batch import BatchPlan, Trace


class PackedOutput(NamedTuple):
    """What a patched model returns, one entry per token of the packed batch (T, in its order).

    `log_probs` [T] fp32: of each token's label, 0 where the label is -100. `entropy` [T] fp32: of the distribution at
    the call's temperature, None when not asked for. `values` [T] fp32: only with a value head. `logits` [T, V]: only
    without the fused head; with a cache only `logits` [N, V], after the last token of each of the N sequences. For a
    padded batch (`packed=False`) [B, S] stands where [T] does.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    logits: Tensor | None = None


@dataclass
class Call:
    """One forward pass in progress: its plan, this rank's labels and temperatures, and what the head computed.

    `plan` is None for a padded batch. `rows` are the hidden states that
    the head takes (None: all), and `collect` turns its [m, n] into what the caller gets, [..., n]. `decoding`: the head
    computes logits.
    """

    plan: BatchPlan | None
    labels: Tensor
    temperature: float | Tensor
    entropy: bool
    collect: Callable[[Tensor], Tensor]
    rows: Tensor | None = None
    has_images: bool = False
    decoding: bool = False
    columns: tuple[str, ...] = ()
    head_output: Tensor | None = None


@dataclass
class CallState:
    """The forward pass that a patched model is in, shared by its hooks and its head."""

    group: ProcessGroup | None
    backend: str
    current: Call | None = None
    # Calls of attention, while the probe runs; and whether it has passed.
    trace: Trace | None = None
    proven: bool = False
    # Whether the head computes columns of our own instead of logits.
    fused: bool = False
    # Whether a call may bring a cache.
    can_decode: bool = False
    # The numbers of the layers whose routing may be recorded and replayed.
    routed_layers: tuple[int, ...] = ()

    def require(self) -> Call:
        """The call in progress; raises when a part of the model is called around the model itself."""
        if self.current is None:
            raise ValueError(
                "this model is patched for packed batches: call it as model(packed=PackedSequence(...)), "
                "or take the patch away with Patch.remove()"
            )
        return self.current

    def __deepcopy__(self, memo: dict[int, object]) -> "CallState":
        # A process group is not copied: a deep copy of a patched model lives in the same group.
        memo[id(self)] = copied = dataclasses.replace(self, current=None, trace=None)
        return copied
