"""`TopKRouter`: the choice and the weights of each token's experts.

Shape suffixes: T' tokens that this rank routes, E experts, k experts per token, H hidden, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.device.names import GPU
from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.kernels.runtime import device_type, use_triton
from parallel_layers.kernels.top_k import top_k
from parallel_layers.kernels.top_weights import top_weights
from parallel_layers.linear.invariant import InvariantProduct, linear as invariant_linear
from parallel_layers.module.autocast import autocast_off
from parallel_layers.module.initialization import as_linear, fill_parameter_
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.seeds import shared_seed
from parallel_layers.moe.config import MoEConfig
from parallel_layers.moe.context import RouterReplay, RoutingContext
from parallel_layers.moe.losses import (
    attach_loss,
    expert_load,
    load_balancing_loss,
    router_z_loss,
    sequence_balance_loss,
)
from parallel_layers.norm.rms import rms_norm


class Routing(NamedTuple):
    """Logits `[T', E]` fp32 of each token, its experts `[T', k]` int64 and their weights `[T', k]` fp32."""

    logits: Tensor
    experts: Tensor
    weights: Tensor


class _WideLinear(torch.autograd.Function):
    """`x Wᵀ` of bf16 operands in fp32, on tensor cores: products of bf16 numbers are exact there, and sums fp32.

    In the backward the gradient is a sum of two bf16 numbers, so it keeps 16 bits of its 24; the results are bf16.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, invariant: bool) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        if invariant:
            return InvariantProduct()(x_TH, weight_EH, None, torch.float32)
        return torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        high = gradient_TE.to(x.dtype)
        halves = torch.cat([high, (gradient_TE - high).to(x.dtype)], dim=1)
        d_weight = torch.mm(halves.t(), x, out_dtype=torch.float32).unflatten(0, (2, -1)).sum(0)
        return halves @ torch.cat([weight, weight]), d_weight.to(weight.dtype), None


def wide_linear(x_TH: Tensor, weight_EH: Tensor, *, invariant: bool = False) -> Tensor:
    """Return `x Wᵀ` in at least fp32, without rounding the operands: `[T, H]`, `[E, H]` -> `[T, E]`.

    `invariant`: the bits of a row do not depend on the other rows (`linear.invariant`).
    """
    if device_type(x_TH.device) == GPU and x_TH.dtype == weight_EH.dtype == torch.bfloat16:
        result: Tensor = _WideLinear.apply(x_TH, weight_EH, invariant)
        return result
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    linear = invariant_linear if invariant else F.linear
    return linear(x_TH.to(wide), weight_EH.to(wide))


def _scores(logits_TE: Tensor, config: MoEConfig) -> Tensor:
    return logits_TE.softmax(-1) if config.scoring == "softmax" else logits_TE.sigmoid()


def choose_experts(scores_TE: Tensor, config: MoEConfig, bias_E: Tensor | None = None) -> Tensor:
    """Return the k best experts within each token's best groups by score + bias: `[T', k]`, without a gradient."""
    scores = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if config.num_groups > 1:
        scores_TGe = scores.unflatten(-1, (config.num_groups, -1))
        best = scores_TGe.topk(2 if config.group_score == "top2" else 1, dim=-1).values.sum(-1)
        chosen = best.topk(config.top_k_groups, dim=-1).indices
        excluded = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        scores = scores_TGe.masked_fill(excluded[..., None], float("-inf")).flatten(-2)
    return top_k(scores, config.top_k) if use_triton(scores) else scores.topk(config.top_k, dim=-1).indices


def route(
    logits_TE: Tensor,
    config: MoEConfig,
    *,
    bias_E: Tensor | None = None,
    select: Callable[[Tensor], Tensor] | None = None,
    invariant: bool = False,
) -> Routing:
    """Route tokens by their logits.

        s = softmax(logits) or sigmoid(logits),   experts = top k of s + bias (within the best groups)
        w = s[experts],   w / Σ w with `normalize_top_k`,   times `routed_scaling_factor`

    Gradients flow only through the weights. All but the experts are at least fp32. `select` is a function of the chosen
    experts `[T', k]` that returns the experts to use (a replay). `invariant`: scores and weights are computed in fp64
    and rounded once, so a token's bits do not depend on the other tokens.
    """
    logits = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    in_a_kernel = logits.dtype == torch.float32 and use_triton(logits) and not invariant
    # Scores grow with logits, so without a bias and groups the largest of both are the same.
    by_logits = (in_a_kernel or invariant) and bias_E is None and config.num_groups == 1
    scored = logits.double() if invariant else logits
    experts = choose_experts(logits if by_logits else _scores(scored, config).to(logits.dtype), config, bias_E)
    if select is not None:
        experts = select(experts)
    if in_a_kernel:
        weights = top_weights(
            logits, experts, config.scoring == "softmax", config.normalize_top_k, config.routed_scaling_factor
        )
        return Routing(logits, experts, weights)
    weights = _scores(scored, config).gather(-1, experts)
    if config.normalize_top_k:
        # All sigmoids can underflow to 0, as can the softmax scores of experts that a bias chose.
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if config.scoring == "sigmoid" else total.clamp(min=1e-12))
    return Routing(logits, experts, (weights * config.routed_scaling_factor).to(logits.dtype))


class TopKRouter(ParallelModule):
    """Compute logits = x Wᵀ (+ b) in fp32, then `route`; the backward adds the auxiliary losses of the config.

    Replicated parameters: `weight [E, H]`, with `router_bias` also `bias [E]`, with `scaled_router` also `scale [H]`
    and `per_expert_scale [E]`. With `correction_bias` there is the buffer `e_score_correction_bias [E]`. It stays fp32
    when the model is cast, and with `fp32_router` so does `weight`.

    `group` are the ranks that route the pack's other tokens; None: this rank routes all tokens. Communication with a
    group: forward all-reduces of `[E]` sums for the loads and the losses; backward one all-reduce of each parameter's
    gradient.
    """

    bias: nn.Parameter | None
    scale: nn.Parameter | None
    per_expert_scale: nn.Parameter | None
    e_score_correction_bias: Tensor | None
    invariant = False
    """The bits of a token do not depend on the other tokens; set by `tp_invariant`."""

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        *,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = group if async_collectives.is_sharded(group) else None
        weight_dtype = dtype
        if config.fp32_router:
            weight_dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=weight_dtype, device=device))
        self.bias = None
        if config.router_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts, dtype=dtype, device=device))
        self.scale = self.per_expert_scale = None
        if config.scaled_router:
            self.scale = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
            self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts, dtype=dtype, device=device))
        correction = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("e_score_correction_bias", correction if config.correction_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as a linear layer does, the same on ranks with equal seeds; set biases to 0, scales to 1."""
        fill_parameter_(self, "weight", shared_seed(), as_linear(self.weight.shape[1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for scale in (self.scale, self.per_expert_scale):
            if scale is not None:
                nn.init.ones_(scale)
        if self.e_score_correction_bias is not None and not self.e_score_correction_bias.is_meta:
            self.e_score_correction_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Move and cast all tensors except fp32 tensors: bf16 would round small updates of the correction bias away."""
        bias, weight = self.e_score_correction_bias, self.weight.data
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(moved.device)
        if self.config.fp32_router and self.weight.dtype.itemsize < torch.float32.itemsize:
            self.weight.data = weight.to(self.weight.device)
        return self

    def forward(self, hidden: Tensor, layer_number: int = 0, context: RoutingContext | None = None) -> Routing:
        """Route `hidden [T', H]`; `context` as in `MoE.forward`."""
        if context is not None:
            context.enter(layer_number, self)
        weight = copy_to_tensor_parallel(self.weight, self.group)
        with autocast_off(hidden):  # rounding could change the choice near a tie
            x = hidden
            if self.scale is not None:
                scale = copy_to_tensor_parallel(self.scale, self.group)
                x = x.to(torch.promote_types(x.dtype, torch.float32))
                x = rms_norm(x, None, eps=self.config.norm_eps) * scale * len(scale) ** -0.5
            logits = wide_linear(x, weight, invariant=self.invariant)
            if self.bias is not None:
                logits = logits + copy_to_tensor_parallel(self.bias, self.group)
        select = None
        if context is not None and context.replay is not None:
            select = partial(self._select, context.replay, layer_number)
        routing = route(
            logits, self.config, bias_E=self.e_score_correction_bias, select=select, invariant=self.invariant
        )
        if self.per_expert_scale is not None:
            of_experts = copy_to_tensor_parallel(self.per_expert_scale, self.group)
            routing = routing._replace(weights=routing.weights * of_experts[routing.experts])
        if context is None and not self._wants_losses():
            return routing
        return self._observe(routing, layer_number, RoutingContext() if context is None else context)

    def _select(self, replay: RouterReplay, layer_number: int, experts: Tensor) -> Tensor:
        """Record or replay; entries hold the tokens of all ranks."""
        if self.group is None:
            return replay.select(layer_number, experts)
        if replay.recording:
            replay.select(layer_number, async_collectives.all_gather(experts, self.group))
            return experts
        first_token, num_tokens = self.group.rank() * len(experts), self.group.size() * len(experts)
        return replay.select(layer_number, experts, first_token=first_token, num_tokens=num_tokens)

    def _segments(self, context: RoutingContext, experts: Tensor) -> Tensor:
        """Return the sequence of each token that this rank routes: `[T']`."""
        tokens = len(experts)
        if context.segments is None:
            return torch.zeros(tokens, dtype=torch.int64, device=experts.device)
        ranks, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        if len(context.segments) != tokens * ranks:
            raise ValueError(
                f"the context's segments have {len(context.segments)} tokens, but {ranks} ranks route {tokens} each"
            )
        return context.segments[rank * tokens : (rank + 1) * tokens].to(experts.device)

    def _wants_losses(self) -> bool:
        weights = (self.config.balance_loss, self.config.sequence_balance_loss, self.config.z_loss)
        return any(weights) and torch.is_grad_enabled()

    def _observe(self, routing: Routing, layer_number: int, context: RoutingContext) -> Routing:
        """Report loads and losses, and attach the losses to the weights."""
        config, totals = self.config, context.totals
        logits, experts, weights = routing
        segments = self._segments(context, experts)
        mask = segments >= 0
        load = expert_load(experts, config.num_experts, mask)
        context.loads[layer_number] = load if self.group is None else async_collectives.all_reduce(load, self.group)
        if not self._wants_losses():
            return routing
        scores = _scores(logits, config)
        probs = scores if config.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        num_tokens, num_sequences, context_group = None, None, None
        if totals is not None:
            num_tokens, num_sequences, context_group = totals.num_tokens, totals.num_sequences, totals.context_group
        losses: dict[str, Tensor] = {}
        if config.balance_loss:
            load_E = None if totals is None else totals.load(layer_number)
            losses["balance_loss"] = load_balancing_loss(
                probs, experts, mask, group=self.group, load_E=load_E, num_tokens=num_tokens
            )
        if config.sequence_balance_loss:
            losses["sequence_balance_loss"] = sequence_balance_loss(
                probs, experts, segments, context.num_segments,
                group=self.group, context_group=context_group, num_sequences=num_sequences,
            )  # fmt: skip
        if config.z_loss:
            losses["z_loss"] = router_z_loss(logits, mask, group=self.group, num_tokens=num_tokens)
        for name, loss in losses.items():
            weights = attach_loss(weights, loss, getattr(config, name))
        context.losses[layer_number] = {name: loss.detach() for name, loss in losses.items()}
        return routing._replace(weights=weights)
