"""`BatchPlan`: the facts about a packed batch that every attention layer needs.

The plan travels as a keyword argument of the text backbone (`PLAN_KEYWORD`). So gradient checkpointing keeps the
plan for the recompute, and a layer without a plan raises.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.utils import TransformersKwargs

from hf_patches.report import KeyValues
from parallel_layers import PackedSequence
from parallel_layers.attention import SharedKeys
from parallel_layers.distributed import gather_from_sequence_parallel
from parallel_layers.inference import SequenceCache
from parallel_layers.moe import RouterReplay

PLAN_KEYWORD = "hf_patches_plan"
_TF32_EPSILON = 2.0**-10

# Keywords of a call without effect on a token mixer that is given its operands.
_IGNORED = {PLAN_KEYWORD, *TransformersKwargs.__annotations__, "position_ids", "position_embeddings", "use_cache"}


@dataclass(frozen=True)
class BatchPlan:
    """The boundaries of a packed batch of T tokens, and the group that shares the tokens.

    `num_tokens` includes the padding up to a multiple of the group's size; `num_given` excludes it.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    num_given: int
    group: ProcessGroup | None = None
    backend: str = "auto"
    # Prefix sharing: the tokens to which each segment attends. None: its own.
    shared_keys: SharedKeys | None = None
    # Decoding: the keys and values of earlier tokens.
    cache: SequenceCache | None = None
    # Records the experts of every token, or prescribes them.
    replay: RouterReplay | None = None
    # Every attention call, kept only for the probe.
    trace: "Trace | None" = field(default=None, compare=False)

    @property
    def world_size(self) -> int:
        """Return the number of ranks that share the tokens."""
        return 1 if self.group is None else self.group.size()

    @property
    def local_tokens(self) -> slice:
        """Return this rank's part of the T tokens; the parts are equal, contiguous, and in the order of the ranks."""
        if self.group is None:
            return slice(0, self.num_tokens)
        share = self.num_tokens // self.group.size()
        return slice(self.group.rank() * share, (self.group.rank() + 1) * share)

    @cached_property
    def segment_ends(self) -> tuple[list[int], list[int]]:
        """Return the ends of the segments of queries and of keys, copied to the host once per batch."""
        keys = self.cu_seqlens if self.shared_keys is None else self.shared_keys.cu_seqlens
        return self.cu_seqlens[1:].tolist(), keys[1:].tolist()

    def pad(self, value: Tensor, fill: float) -> Tensor:
        """Pad the caller's `[T, ...]` to the length of the plan."""
        padding = self.num_tokens - self.num_given
        return torch.cat([value, value.new_full((padding, *value.shape[1:]), fill)]) if padding else value

    def pad_positions(self, rows: Tensor) -> Tensor:
        """Pad the caller's positions `[..., T]` to the length of the plan; positions of the padding count from 0."""
        padding = torch.arange(self.num_tokens - self.num_given, device=rows.device)
        return torch.cat([rows, padding.expand(*rows.shape[:-1], -1)], dim=-1)

    def gather(self, local: Tensor) -> Tensor:
        """Gather the parts `[T / sp, n]` of all ranks into `[T, n]` on every rank, without the padding.

        Forward: one all-gather. Backward: this rank's part of the gradient, without communication. So a loss that every
        rank computes from the whole batch counts once when gradients are summed over the group.
        """
        gathered = gather_from_sequence_parallel(local, self.group, reduce_gradient=False)
        return gathered[: self.num_given]


def required_plan(caller: str, kwargs: dict[str, Any], num_rows: int, num_tokens: int) -> BatchPlan:
    """Return the plan among the keywords of a call with `num_rows` x `num_tokens` tokens.

    Raises:
        ValueError: The plan is missing, the tokens are not this rank's part of the batch, or an unknown keyword is set.
    """
    plan = kwargs.get(PLAN_KEYWORD)
    if not isinstance(plan, BatchPlan):
        raise ValueError(
            f"{caller} was called without the plan of a packed batch ({PLAN_KEYWORD}=None): call the patched model "
            "itself with packed=PackedSequence(...), or remove the patch with Patch.remove()"
        )
    if unknown := [x for x, entry in kwargs.items() if x not in _IGNORED and entry is not None and entry is not False]:
        raise ValueError(f"{caller} got {', '.join(unknown)}, which a packed batch ignores")
    local_tokens = plan.num_tokens // plan.world_size
    if num_rows != 1 or num_tokens != local_tokens:
        raise ValueError(
            f"{caller} got {num_rows} x {num_tokens} tokens, this rank's part of the packed batch has 1 x "
            f"{local_tokens}; call only the patched model itself, with packed=PackedSequence(...)"
        )
    return plan


class Trace:
    """The record of a probe.

    `calls`: the token mixers (attention, recurrences) in the order of their calls. The record is an object with a list,
    because FSDP2's casts copy lists in arguments.
    `leaks`: the influence of each mixer's sequences on each other (`hf_patches.isolation`).
    `key_values`: the keys and values of each attention layer.
    `hidden`: the output of the text backbone in each forward pass, this rank's `[T / sp, H]`.
    `kernel_errors`: the largest difference of each kernel from the code that it replaces, in units of the dtype's
    epsilon (for fp32 TF32's epsilon, because GEMMs may use TF32) times the largest element.
    """

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []
        self.leaks: dict[nn.Module, float] = {}
        self.key_values: dict[nn.Module, KeyValues] = {}
        self.hidden: list[Tensor] = []
        self.kernel_errors: dict[object, float] = {}

    def record(self, mixer: nn.Module, measure: Callable[[], float]) -> None:
        """Record a call of a token mixer, and measure the leak in its first call."""
        self.calls.append(mixer)
        if mixer not in self.leaks:
            self.leaks[mixer] = measure()

    def compare(self, kernel: object, actual: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> None:
        """Compare the results of a kernel with the results of the code that it replaces."""
        actual, expected = ([x] if isinstance(x, Tensor) else x for x in (actual, expected))
        for result, reference in zip(actual, expected, strict=True):
            unit = max(torch.finfo(reference.dtype).eps, _TF32_EPSILON) * reference.abs().max().item()
            comparable = result.dtype == reference.dtype and result.shape == reference.shape
            error = math.inf
            if comparable:
                # max() below would pass over NaN.
                error = (result - reference).abs().nan_to_num(nan=math.inf).max().item() / max(unit, 1e-30)
            self.kernel_errors[kernel] = max(self.kernel_errors.get(kernel, 0.0), error)


def plan_batch(
    packed: PackedSequence, group: ProcessGroup | None, backend: str, trace: "Trace | None" = None
) -> BatchPlan:
    """Return the plan of a batch, padded so that every rank of the group holds the same number of tokens, at least one.

    The padding is a separate last segment, so no real token attends to it.
    """
    cu_seqlens, max_seqlen, num_given = packed.cu_seqlens, packed.max_seqlen, packed.num_tokens
    shared_keys = packed.shared_keys
    size = 1 if group is None else group.size()
    padding = -num_given % size if num_given else size
    if padding:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
        max_seqlen = max(max_seqlen, padding)
    if padding and shared_keys is not None:
        added = torch.arange(num_given, num_given + padding, device=cu_seqlens.device)
        shared_keys = shared_keys.with_padding(added, replaced=0)
    return BatchPlan(cu_seqlens, max_seqlen, num_given + padding, num_given, group, backend, shared_keys, trace=trace)
