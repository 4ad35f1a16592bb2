from megatron_utils.grid import (
    MegatronGrid as MegatronGrid,
    megatron_device as megatron_device,
    megatron_grid as megatron_grid,
)
from megatron_utils.router_replay import (
    collect_routing as collect_routing,
    complete_recordings as complete_recordings,
    make_replay as make_replay,
    moe_layers as moe_layers,
)
