"""`MoEConfig`: what tells one mixture of experts from another."""

from dataclasses import dataclass
from typing import Literal

from parallel_layers.mlp.layer import GatedActivation

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2_sum", "max"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts, their router, and shared experts. The defaults are Mixtral's and Qwen3-MoE's.

    Attributes:
        num_experts: E, routed experts.
        top_k: k, experts a token goes to.
        intermediate_size: I, of one routed expert.
        scoring: How logits become scores: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3).
        normalize_top_k: Divide a token's k scores by their sum (`norm_topk_prob`).
        routed_scaling_factor: What the weights are multiplied by afterwards.
        correction_bias: Choose by score + bias, weigh by score alone: the router then has `e_score_correction_bias`
            (https://arxiv.org/abs/2408.15664).
        router_bias: A learned bias of the logits (gpt-oss).
        num_groups: Equal groups of neighbouring experts (`n_group`); 1: no groups.
        top_k_groups: Groups whose experts a token may go to (`topk_group`).
        group_score: What a group is chosen by: the sum of its two best scores (DeepSeek-V3) or its best (V2).
        shared_intermediate_size: Of the shared experts together, an MLP that every token goes through; 0: none.
        shared_expert_gate: Multiply the shared experts' output by a sigmoid of one more projection (Qwen2-MoE).
        activation: A name of `parallel_layers.mlp.layer.ACTIVATIONS`, experts are gated, act(gate) · up;
            or a `ClampedSwiGLU` (gpt-oss).
        expert_bias: Biases of both projections of every routed expert (gpt-oss).
        balance_loss: Weight of `load_balancing_loss` (Switch; `router_aux_loss_coef`).
        sequence_balance_loss: Weight of `sequence_balance_loss` (DeepSeek-V3).
        z_loss: Weight of `router_z_loss` (ST-MoE).

    Raises:
        ValueError: Sizes that do not fit, or an unknown scoring or group score.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Scoring = "softmax"
    normalize_top_k: bool = True
    routed_scaling_factor: float = 1.0
    correction_bias: bool = False
    router_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "top2_sum"
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False
    activation: GatedActivation = "silu"
    expert_bias: bool = False
    balance_loss: float = 0.0
    sequence_balance_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring={self.scoring!r} is unknown; use 'softmax' or 'sigmoid'")
        if self.group_score not in ("top2_sum", "max"):
            raise ValueError(f"group_score={self.group_score!r} is unknown; use 'top2_sum' or 'max'")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts={self.num_experts} is not divisible by num_groups={self.num_groups}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(f"top_k_groups={self.top_k_groups} must lie in 1..num_groups={self.num_groups}")
        reachable = self.num_experts // self.num_groups * self.top_k_groups
        if not 1 <= self.top_k <= reachable:
            raise ValueError(
                f"top_k={self.top_k} must lie in 1..{reachable}, the experts that {self.top_k_groups} of "
                f"{self.num_groups} groups of num_experts={self.num_experts} hold"
            )
        if self.num_groups > 1 and self.group_score == "top2_sum" and self.num_experts // self.num_groups < 2:
            raise ValueError(
                f"group_score='top2_sum' needs groups of two experts or more, but num_experts={self.num_experts} in "
                f"num_groups={self.num_groups} makes groups of one; use group_score='max'"
            )
        if self.shared_expert_gate and not self.shared_intermediate_size:
            raise ValueError("shared_expert_gate=True needs shared experts; set shared_intermediate_size")
