"""`Placement` and `Execution`: where the parts of a layer are, and how the layer computes and communicates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.linear.products import PLAIN, Product
from parallel_layers.linear.transports import Overlap
from parallel_layers.module.shared_weights import Model, view_of


@dataclass(frozen=True)
class Placement:
    """The placement of a layer: the ranks that hold its parts, and whether they divide the tokens.

    Attributes:
        group: The tensor-parallel group; None: the layer is whole.
        sequence_parallel: The tokens (dim 0) are divided over the group outside the layer.
    """

    group: ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def tp(self) -> int:
        """The number of ranks in the group."""
        return 1 if self.group is None else self.group.size()

    @property
    def sharded(self) -> ProcessGroup | None:
        """The group, or None where it has one rank."""
        return self.group if async_collectives.is_sharded(self.group) else None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The execution of a layer: its GEMMs and its communication. Results agree within rounding.

    Attributes:
        overlap: How sequence parallelism sends tokens: "serial", "collectives", "symmetric-memory", or "auto", by size;
            see `transports`. The backward always overlaps: by whole collectives, or over symmetric memory where dx is
            summed in its own dtype.
        reduce_dtype: dtype of the sums over the ranks, forward and backward; None: at least fp32, with the error of a
            layer that is not divided. `torch.bfloat16` sends half the bytes, and rounds the ranks' parts and every
            step of the sum.
        product: The GEMM of the layer; set by `with_float8` and `tp_invariant`.
        few_tokens: The layer computes decoding steps, without gradients; set by `inference.decoding_attributes`.

    Raises:
        ValueError: An unknown `overlap`.
    """

    overlap: Overlap = "auto"
    reduce_dtype: torch.dtype | None = None
    product: Product = PLAIN
    few_tokens: bool = False

    def __post_init__(self) -> None:
        if self.overlap not in (overlaps := get_args(Overlap)):
            raise ValueError(f"overlap={self.overlap!r} is unknown; use one of {', '.join(map(repr, overlaps))}")


UNDIVIDED = Placement()
DEFAULT = Execution()


def with_execution(model: Model, **changes: Any) -> Model:
    """Return a view of a model (`shared_weights.view_of`) in which fields of every layer's `Execution` are replaced.

    For example, inference that overlaps at any number of tokens, with sums in bf16:

        fast = with_execution(model, overlap="symmetric-memory", reduce_dtype=torch.bfloat16).eval()
    """

    def change(module: nn.Module, view: nn.Module) -> None:
        if isinstance(execution := getattr(module, "execution", None), Execution):
            view.__dict__["execution"] = replace(execution, **changes)

    return view_of(model, change)
