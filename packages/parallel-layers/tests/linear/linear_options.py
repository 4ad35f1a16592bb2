"""The keyword options of a parallel linear, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.linear.transports import Overlap


def placed(
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    overlap: Overlap = "auto",
    reduce_dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a layer's keyword options: its placement, its execution and further ones."""
    execution = Execution(overlap=overlap, reduce_dtype=reduce_dtype)
    return {"placement": Placement(group, sequence_parallel), "execution": execution, **options}
