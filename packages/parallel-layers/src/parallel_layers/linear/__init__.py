"""Linear layers divided over a tensor-parallel group.

`layers` has the modules, and `operators` their forward and backward. `products` says how operands are multiplied, and
`transports` how tokens are sent. `execution` has the two objects that configure a layer.
"""

from parallel_layers.linear.execution import Execution, Placement, with_execution
from parallel_layers.linear.layers import (
    ColumnParallelLinear,
    LinearOptions,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from parallel_layers.linear.operators import column_parallel_linear, row_parallel_linear
from parallel_layers.linear.transports import Overlap, available_overlaps

__all__ = [
    "ColumnParallelLinear",
    "Execution",
    "LinearOptions",
    "MergedColumnParallelLinear",
    "Overlap",
    "Placement",
    "QKVParallelLinear",
    "RowParallelLinear",
    "available_overlaps",
    "column_parallel_linear",
    "row_parallel_linear",
    "with_execution",
]
