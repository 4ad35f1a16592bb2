"""`MoE`: a router, routed experts and shared experts in place of an MLP.

Shape legend: T tokens of the pack, T' this rank's tokens under sequence parallelism (else T), H hidden, k experts per
token, I intermediate size of an expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
)
from parallel_layers.kernels.exact import in_double
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.few_tokens import exchange_few
from parallel_layers.linear.layers import ReplicatedLinear
from parallel_layers.mlp.layer import ParallelMLP
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.moe.config import MoEConfig
from parallel_layers.moe.context import RoutingContext
from parallel_layers.moe.experts import GroupedExperts, check_expert_group
from parallel_layers.moe.router import Routing, TopKRouter
from parallel_layers.norm.rms import RMSNorm


class MoE(ParallelModule):
    """Return Σ over a token's experts of weight · expert(x), plus the shared experts; called like `ParallelMLP`.

    Submodules have Hugging Face's names: `gate` (the router), `experts`, `shared_experts`, `shared_expert_gate`. With
    `latent_size` there are `latent_in_proj` before and `latent_out_proj` behind the routed experts, and with
    `branch_norms` the norms `routed_norm` of the routed experts' input, and `routed_output_norm` and
    `shared_output_norm` of both outputs.

    Experts can be divided in two ways, alone or together. Over the placement's group every rank has I/tp of each
    expert, and the ranks work on the same tokens. Over `expert_group`, usually of data-parallel ranks, every rank has
    some experts and its own tokens, which are exchanged. With `expert_tensor_parallel=False` experts are whole, and the
    tensor-parallel ranks exchange tokens, too: the expert group contains the tensor-parallel group or is a part of it.

    Communication, forward / backward, over the tensor-parallel group: all-reduce `[T, H]` / all-reduce. With sequence
    parallelism: all-gather of hidden states and routing, reduce-scatter `[T, H]` / the same in reverse, and an
    all-reduce of the router's gradient. Over the expert group: as `GroupedExperts`.

    After the backward, gradients are complete for the tokens of the tensor-parallel group, and experts' gradients for
    the tokens of `expert_group`. An engine that averages over d data-parallel ranks divides experts' gradients by d,
    too, and sums them only over the ranks with the same experts.

    Args:
        hidden_size: H.
        config: See `MoEConfig`.
        layer_number: The layer's number in the model, the key in a `RoutingContext`.
        placement, execution: See `LinearOptions`.
        expert_group: Ranks that divide the experts; None: this rank has all experts.
        expert_tensor_parallel: Divide every expert over the placement's group.
        dtype, device: Dtype and device of the parameters.

    Raises:
        ValueError: A size does not divide, the activation is unknown, or experts are neither divided over the
            placement's group nor exchanged within it.
    """

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        *,
        layer_number: int = 0,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        expert_group: ProcessGroup | None = None,
        expert_tensor_parallel: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        group, self.execution = placement.sharded, execution
        self.config, self.layer_number = config, layer_number
        self.group, self.sequence_parallel = group, placement.sequence_parallel
        self.expert_tensor_parallel = expert_tensor_parallel
        if group is not None and not expert_tensor_parallel:
            check_expert_group(group, expert_group, divided=False)
        split_tokens = self.sequence_parallel or not expert_tensor_parallel
        self.gate = TopKRouter(hidden_size, config, group=group if split_tokens else None, dtype=dtype, device=device)
        linear: dict[str, Any] = {"placement": placement, "execution": execution, "dtype": dtype, "device": device}
        self.latent_in_proj = self.latent_out_proj = None
        if config.latent_size:
            self.latent_in_proj = ReplicatedLinear(hidden_size, config.latent_size, **linear)
            self.latent_out_proj = ReplicatedLinear(config.latent_size, hidden_size, **linear)
        self.experts = GroupedExperts(
            config.latent_size or hidden_size, config.intermediate_size, config.num_experts,
            activation=config.activation, gated=config.gated, bias=config.expert_bias,
            input_major=config.input_major_experts, alternating=config.alternating_gate_up,
            group=group if expert_tensor_parallel else None, expert_group=expert_group, dtype=dtype, device=device,
        )  # fmt: skip
        self.shared_experts: ParallelMLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if config.shared_intermediate_size:
            self.shared_experts = ParallelMLP(
                hidden_size, config.shared_intermediate_size, activation=config.activation, gated=config.gated, **linear
            )
        self.routed_norm = self.routed_output_norm = self.shared_output_norm = None
        if config.branch_norms:
            norm: dict[str, Any] = {"eps": config.norm_eps, "group": placement.group, "dtype": dtype, "device": device}
            norm["sequence_parallel"] = placement.sequence_parallel
            self.routed_norm, self.routed_output_norm, self.shared_output_norm = (
                RMSNorm(hidden_size, **norm) for _ in range(3)
            )
        if config.shared_expert_gate:
            self.shared_expert_gate = ReplicatedLinear(hidden_size, 1, **linear)

    def forward(self, hidden: Tensor, context: RoutingContext | None = None, residual: Tensor | None = None) -> Tensor:
        """`[T', H]` -> `[T', H]`; raise ValueError for other shapes, or if the context does not match.

        `context` has padding and replay, and receives loads and losses; None: all tokens are one sequence.
        Recomputation must get the same object. With `branch_norms`, router and routed experts read `residual`, the
        residual stream, and `hidden` is the stream's norm.
        """
        if hidden.dim() != 2:
            raise ValueError(f"hidden states of shape {list(hidden.shape)} must be [T, H]; flatten the dims of tokens")
        if (residual is None) == self.config.branch_norms:
            raise ValueError(f"branch_norms={self.config.branch_norms}: pass residual exactly where it is True")
        routed_input = hidden if residual is None else residual
        x = routed_input if self.routed_norm is None else self.routed_norm(routed_input)
        x = x if self.latent_in_proj is None else self.latent_in_proj(x)
        if self.sequence_parallel or self.expert_tensor_parallel:
            out = self._routed(x, self.gate(routed_input, self.layer_number, context))
        else:
            # Every rank of the group holds all tokens: each dispatches its part, then the results are gathered.
            local_read, x = (scatter_to_sequence_parallel(of_all, self.group) for of_all in (routed_input, x))
            out = self._routed(x, self.gate(local_read, self.layer_number, context))
            out = gather_from_sequence_parallel(out, self.group, reduce_gradient=False)
        out = out if self.latent_out_proj is None else self.latent_out_proj(out)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(hidden)
        if self.routed_output_norm is not None and self.shared_output_norm is not None:
            return self.routed_output_norm(out) + self.shared_output_norm(shared)
        return out + (
            shared
            if self.shared_expert_gate is None
            else in_double(torch.sigmoid, self.shared_expert_gate(hidden)) * shared
        )

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        experts, weights = routing.experts, routing.weights
        if self.group is None or not self.expert_tensor_parallel:
            return self.experts(x, experts, weights)
        # Each rank has parts of the experts, so the gradients of tokens and weights are partial sums.
        dtype = self.execution.reduce_dtype
        if self.sequence_parallel:
            x = gather_from_sequence_parallel(x, self.group, reduce_dtype=dtype)
            weights = gather_from_sequence_parallel(weights, self.group)
            out = self.experts(x, async_collectives.all_gather(experts, self.group), weights)
            return self._sum(out)
        x = copy_to_tensor_parallel(x, self.group, reduce_dtype=dtype)
        weights = copy_to_tensor_parallel(weights, self.group)
        out = self.experts(x, experts, weights)
        return self._sum(out)

    def _sum(self, out: Tensor) -> Tensor:
        """Sum the ranks' parts of the experts' outputs: `[T, H]` -> `[T', H]`."""
        assert self.group is not None
        dtype = self.execution.reduce_dtype
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel(out, self.group, reduce_dtype=dtype)
        if self.execution.few_tokens:
            return exchange_few(out, self.group, "all-reduce")
        return reduce_from_tensor_parallel(out, self.group, reduce_dtype=dtype)
