from parallel_layers.module.autocast import as_operand as as_operand, without_autocast as without_autocast
from parallel_layers.module.initialization import as_linear as as_linear, draw as draw
from parallel_layers.module.sharding import (
    first_row as first_row,
    is_dtensor as is_dtensor,
    load_full_ as load_full_,
    set_sharding as set_sharding,
    shard_evenly as shard_evenly,
)
from parallel_layers.module.shared_weights import view_of as view_of
