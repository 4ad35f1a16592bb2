"""`MoEConfig`: the sizes and rules of a mixture of experts."""

from dataclasses import dataclass
from typing import Literal

from parallel_layers.mlp.layer import GatedActivation

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2", "max"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts, their router, and shared experts. The defaults describe Mixtral and Qwen3-MoE.

    Attributes:
        num_experts: E, the number of routed experts.
        top_k: k, the experts per token.
        intermediate_size: I, the intermediate size of a routed expert.
        scoring: Function of the logits: "softmax" over the experts, or "sigmoid" of each logit (DeepSeek-V3).
        normalize_top_k: Divide a token's k scores by their sum (`norm_topk_prob`).
        routed_scaling_factor: Factor of the weights after normalisation.
        correction_bias: Choose experts by score + `e_score_correction_bias`, and take weights from the score
            (https://arxiv.org/abs/2408.15664).
        router_bias: The logits have a learned bias (gpt-oss).
        fp32_router: The router's weight is fp32 beside weights of any dtype (ERNIE 4.5).
        scaled_router: The router reads x / rms(x) · scale / sqrt(H), and the weights of expert e are multiplied by
            per_expert_scale[e]; both scales are learned (Gemma 4).
        num_groups: Equal groups of consecutive experts (`n_group`); 1: no groups.
        group_score: A group's score: "top2", the sum of its two best scores (DeepSeek-V3), or "max", its best score
            (DeepSeek-V2).
        top_k_groups: Groups per token (`topk_group`).
        shared_intermediate_size: Intermediate size of all shared experts together; 0: no shared experts.
        latent_size: Size of the routed experts' inputs and outputs, between two projections of the hidden states
            (Nemotron-3); 0: experts read and write hidden states.
        shared_expert_gate: Multiply the shared experts' output by the sigmoid of a projection (Qwen2-MoE).
        branch_norms: Only the shared experts read the block's normed input. Router and routed experts read the residual
            stream, the experts through a separate norm, and both outputs are normed before their sum (Gemma 4).
        norm_eps: Epsilon of these norms and of the router's.
        gated: Experts are act(gate) · up; False: act(up), the shared experts too (Nemotron-H).
        activation: A name of `parallel_layers.mlp.layer.ACTIVATIONS`, or with a gate a `ClampedSwiGLU` (gpt-oss).
        expert_bias: Both projections of the routed experts have biases (gpt-oss).
        input_major_experts: The routed experts' weights are stored `[inputs, outputs]` (gpt-oss, Qwen3-VL-MoE).
        alternating_gate_up: The columns of gate and up alternate (gpt-oss); only with `input_major_experts`.
        balance_loss: Weight of `load_balancing_loss` (Switch; `router_aux_loss_coef`).
        sequence_balance_loss: Weight of `sequence_balance_loss` (DeepSeek-V3).
        z_loss: Weight of `router_z_loss` (ST-MoE).

    Raises:
        ValueError: Sizes are inconsistent, or `scoring` is unknown.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Scoring = "softmax"
    normalize_top_k: bool = True
    routed_scaling_factor: float = 1.0
    correction_bias: bool = False
    router_bias: bool = False
    fp32_router: bool = False
    scaled_router: bool = False
    num_groups: int = 1
    group_score: GroupScore = "top2"
    top_k_groups: int = 1
    shared_intermediate_size: int = 0
    latent_size: int = 0
    shared_expert_gate: bool = False
    branch_norms: bool = False
    norm_eps: float = 1e-6
    gated: bool = True
    activation: GatedActivation = "silu"
    expert_bias: bool = False
    input_major_experts: bool = False
    alternating_gate_up: bool = False
    balance_loss: float = 0.0
    sequence_balance_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring={self.scoring!r} is unknown; use 'softmax' or 'sigmoid'")
        if self.group_score not in ("top2", "max"):
            raise ValueError(f"group_score={self.group_score!r} is unknown; use 'top2' or 'max'")
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
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise ValueError(
                f"num_groups={self.num_groups} makes groups of one of num_experts={self.num_experts}; a group needs two"
            )
        if not self.gated and (self.expert_bias or self.input_major_experts):
            raise ValueError("gated=False does not go with expert_bias or input_major_experts; leave one out")
        for name in ("shared_expert_gate", "branch_norms"):
            if getattr(self, name) and not self.shared_intermediate_size:
                raise ValueError(f"{name}=True needs shared experts; set shared_intermediate_size")
