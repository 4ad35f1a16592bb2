"""Mixture of experts: router, grouped experts over an expert-parallel group, auxiliary losses, router replay.

config = MoEConfig(num_experts=64, top_k=8, intermediate_size=768, balance_loss=1e-3)
moe = MoE(2048, config, layer_number=5, group=tp_group, sequence_parallel=True, expert_group=ep_group)
context = RoutingContext.of(packed, replay=RouterReplay.from_tensor(experts_TLk, layers, num_experts=64))
hidden = moe(hidden, context)     # padding counts for no loss; the experts are those that the engine used
context.loads[5], context.losses[5]["balance_loss"]
"""

from parallel_layers.mlp.activations import ClampedSwiGLU
from parallel_layers.moe.config import MoEConfig
from parallel_layers.moe.context import BatchTotals, RoutingContext
from parallel_layers.moe.experts import GroupedExperts
from parallel_layers.moe.grouped import grouped_linear
from parallel_layers.moe.layer import MoE
from parallel_layers.moe.losses import (
    attach_loss,
    expert_load,
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
    update_correction_bias_,
)
from parallel_layers.moe.replay import RouterReplay
from parallel_layers.moe.router import Routing, TopKRouter, choose_experts, route

__all__ = [
    "BatchTotals",
    "ClampedSwiGLU",
    "GroupedExperts",
    "MoE",
    "MoEConfig",
    "RouterReplay",
    "Routing",
    "RoutingContext",
    "TopKRouter",
    "attach_loss",
    "choose_experts",
    "expert_load",
    "grouped_linear",
    "load_balancing_loss",
    "route",
    "router_z_loss",
    "sequence_balance_loss",
    "update_correction_bias_",
]
