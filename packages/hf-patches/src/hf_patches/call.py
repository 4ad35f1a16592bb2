"""One forward pass of a patched model: what it was called with, and what it returns."""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_patches.batch import BatchPlan, Trace

# Held for the instant in which a call begins.
_BEGINNING = threading.Lock()


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
    thread: threading.Thread | None = None


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

    @torch.compiler.disable
    def begin(self, call: Call) -> None:
        """Make a call the one in progress.

        Raises:
            ValueError: another thread is inside the model: its numbers would be mixed with this call's.
        """
        mine = threading.current_thread()
        with _BEGINNING:
            other = None if self.current is None else self.current.thread
            if other is not None and other is not mine and other.is_alive():
                raise ValueError(
                    f"{mine.name} called this model while {other.name} was inside it; a patched model serves one "
                    "thread at a time: take a lock around its forward passes, or patch a copy for each thread"
                )
            call.thread = mine
            self.current = call

    @torch.compiler.disable
    def end(self) -> Call | None:
        """Leave the call in progress; None where there is none of this thread."""
        call = self.current
        if call is None or call.thread is not threading.current_thread():
            return None
        self.current = None
        return call

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
