from parallel_layers.linear.block_scaled import SCALES as SCALES, dense_weight as dense_weight
from parallel_layers.linear.execution import with_execution as with_execution
from parallel_layers.linear.few_tokens import exchange_few as exchange_few, sum_and_norm as sum_and_norm
from parallel_layers.linear.float8 import (
    RECIPES as RECIPES,
    require_float8 as require_float8,
    round_again_ as round_again_,
    why_not_float8 as why_not_float8,
    with_float8 as with_float8,
)
from parallel_layers.linear.invariant import InvariantProduct as InvariantProduct
from parallel_layers.linear.layers import LinearLayer as LinearLayer, ReplicatedLinear as ReplicatedLinear
from parallel_layers.linear.low_rank import LowRank as LowRank, enabled as enabled
from parallel_layers.linear.operators import (
    column_parallel_linear as column_parallel_linear,
    row_parallel_linear as row_parallel_linear,
)
from parallel_layers.linear.products import PLAIN as PLAIN, Product as Product
from parallel_layers.linear.transports import available_overlaps as available_overlaps
