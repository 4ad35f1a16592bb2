from parallel_layers.rotary.rope_types import (
    ROPE_TYPES as ROPE_TYPES,
    RopeParameters as RopeParameters,
    RopeType as RopeType,
    require_length as require_length,
    stated_parameters as stated_parameters,
    yarn_softmax_scale as yarn_softmax_scale,
)
from parallel_layers.rotary.rotation import (
    apply_rotary as apply_rotary,
    rotate_queries_and_keys as rotate_queries_and_keys,
    split_and_rotate as split_and_rotate,
)
