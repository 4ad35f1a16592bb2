"""A forward pass of a patched model: its arguments and its output."""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_patches.batch import BatchPlan, Trace
from parallel_layers.head import SamplingMask

# Guards the begin of a call.
_BEGINNING = threading.Lock()


class PackedOutput(NamedTuple):
    """The output of a patched model: one entry per token of the packed batch, in its order.

    `log_probs` `[T]` fp32: log-prob of each token's label, 0 where the label is -100.
    `entropy` `[T]` fp32: entropy of the distribution at the call's temperature; None with `entropy=False`.
    `values` `[T]` fp32, of n labels `[T, n]`: with a value head only.
    `logits` `[T, V]`: without the fused head only. With a cache, the only output is `logits` `[N, V]`, after the last
    token of each of the N sequences. Padded batches (`packed=False`) have `[B, S]` in place of `[T]`.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    logits: Tensor | None = None


@dataclass
class Call:
    """A forward pass in progress: its plan, this rank's arguments of the head, and the output of the head.

    `plan` is None for a padded batch. `rows` are the hidden states that the head takes (None: all). `collect` turns the
    head's `[m, n]` into the caller's `[..., n]`; `columns` has the width of each output in it. With `decoding` the head
    computes logits.
    """

    plan: BatchPlan | None
    labels: Tensor
    temperature: float | Tensor
    entropy: bool
    collect: Callable[[Tensor], Tensor]
    sampling_mask: SamplingMask | None = None
    rows: Tensor | None = None
    has_images: bool = False
    # Which of the images of the pixels each image of the batch is, and the same for videos, by "image" and "video".
    numbers: dict[str, list[int]] = field(default_factory=dict)
    # The kind of each token [T] with the padding of the plan (0 text, 1 image, 2 video); None: by the token ids.
    token_types: Tensor | None = None
    decoding: bool = False
    columns: dict[str, int] = field(default_factory=dict)
    head_output: Tensor | None = None
    thread: threading.Thread | None = None


@dataclass
class CallState:
    """The current forward pass of a patched model, shared by its hooks and its head."""

    group: ProcessGroup | None
    backend: str
    current: Call | None = None
    # The record of the probe while it runs, and whether the probe has passed.
    trace: Trace | None = None
    proven: bool = False
    # Whether the head computes columns of our own instead of logits.
    fused: bool = False
    # Whether a call may bring a cache.
    can_decode: bool = False
    # Whether layers have a recurrent state, which neither a cache nor shared prefixes hand on.
    is_recurrent: bool = False
    # The numbers of the layers whose routing may be recorded and replayed.
    routed_layers: tuple[int, ...] = ()

    @torch.compiler.disable
    def begin(self, call: Call) -> None:
        """Begin a call.

        Raises:
            ValueError: Another thread is inside the model; the numbers of the two calls would mix.
        """
        calling = threading.current_thread()
        with _BEGINNING:
            running = None if self.current is None else self.current.thread
            if running is not None and running is not calling and running.is_alive():
                raise ValueError(
                    f"{calling.name} called this model while {running.name} was inside it; a patched model serves one "
                    "thread at a time: take a lock around its forward passes, or patch a copy for each thread"
                )
            call.thread = calling
            self.current = call

    @torch.compiler.disable
    def end(self) -> Call | None:
        """End and return the current call of this thread, or return None."""
        call = self.current
        if call is None or call.thread is not threading.current_thread():
            return None
        self.current = None
        return call

    def require(self) -> Call:
        """Return the current call; raise if a part of the model is called without the model itself."""
        if self.current is None:
            raise ValueError(
                "this model is patched for packed batches: call it as model(packed=PackedSequence(...)), "
                "or remove the patch with Patch.remove()"
            )
        return self.current

    def __deepcopy__(self, memo: dict[int, object]) -> "CallState":
        # Process groups cannot be copied: the deep copy of a patched model uses the same group.
        memo[id(self)] = copied = dataclasses.replace(self, current=None, trace=None)
        return copied
