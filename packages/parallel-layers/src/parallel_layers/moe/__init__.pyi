from parallel_layers.mlp.activations import ClampedSwiGLU as ClampedSwiGLU
from parallel_layers.moe.config import MoEConfig as MoEConfig
from parallel_layers.moe.context import (
    BatchTotals as BatchTotals,
    RouterReplay as RouterReplay,
    RoutingContext as RoutingContext,
)
from parallel_layers.moe.decoding import waits_for_counts as waits_for_counts
from parallel_layers.moe.experts import GroupedExperts as GroupedExperts, grouped_linear as grouped_linear
from parallel_layers.moe.float8 import float8_grouped_linear as float8_grouped_linear
from parallel_layers.moe.gathering import (
    bytes_to_gather as bytes_to_gather,
    divided_mixtures as divided_mixtures,
    gathered_attributes as gathered_attributes,
    saves_time as saves_time,
    why_not_gather as why_not_gather,
)
from parallel_layers.moe.layer import MoE as MoE
from parallel_layers.moe.losses import (
    attach_loss as attach_loss,
    expert_load as expert_load,
    load_balancing_loss as load_balancing_loss,
    router_z_loss as router_z_loss,
    sequence_balance_loss as sequence_balance_loss,
)
from parallel_layers.moe.router import (
    Routing as Routing,
    TopKRouter as TopKRouter,
    choose_experts as choose_experts,
    route as route,
)
