from parallel_layers.module.autocast import as_operand as as_operand, without_autocast as without_autocast
from parallel_layers.module.initialization import as_linear as as_linear, draw as draw
from parallel_layers.module.seeds import (
    crc_seed as crc_seed,
    hashed_seed as hashed_seed,
    mixed as mixed,
    mixed_pairs as mixed_pairs,
    python_random as python_random,
    rank_seed as rank_seed,
)
from parallel_layers.module.sharding import (
    first_row as first_row,
    is_dtensor as is_dtensor,
    load_full_ as load_full_,
    set_sharding as set_sharding,
    shard_evenly as shard_evenly,
)
from parallel_layers.module.shared_weights import view_of as view_of
