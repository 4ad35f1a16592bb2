from parallel_layers.kernels.embedding import zeros as zeros
from parallel_layers.kernels.quack import (
    Tile as Tile,
    has_quack as has_quack,
    is_hopper as is_hopper,
    multiply as multiply,
)
from parallel_layers.kernels.rms_norm import fused_rms_norm as fused_rms_norm
from parallel_layers.kernels.runtime import (
    HAS_TRITON as HAS_TRITON,
    cdiv as cdiv,
    next_power_of_2 as next_power_of_2,
    on_its_device as on_its_device,
    planned_for as planned_for,
    tl as tl,
    triton as triton,
    use_triton as use_triton,
)
from parallel_layers.kernels.swiglu import fused_swiglu as fused_swiglu
