"""Mixture of experts: router, grouped experts over an expert-parallel group, auxiliary losses, router replay."""

from parallel_layers.mlp.activations import ClampedSwiGLU
from parallel_layers.moe.config import MoEConfig
from parallel_layers.moe.context import BatchTotals, RouterReplay, RoutingContext
from parallel_layers.moe.experts import GroupedExperts, grouped_linear
from parallel_layers.moe.layer import MoE
from parallel_layers.moe.losses import (
    attach_loss,
    expert_load,
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
)
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
]
