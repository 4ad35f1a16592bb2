"""Modules of gpt-oss' mixture of experts, for places of Megatron-Core's layer spec that have no such module."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_utils.gpt.config import parameter_device
from parallel_layers.moe import GroupedExperts, MoEConfig


class BiasedRouter(TopKRouter):
    """Megatron's router with a learned bias; Megatron has one switch for the biases of all its linears."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        biased = copy(config)
        biased.add_bias_linear = True
        super().__init__(biased, **options)


# The dimension that expert tensor parallelism divides.
_DIVIDED = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}


class StackedExperts(GroupedExperts):
    """Experts of parallel-layers, which replace Megatron's own between its dispatch and its combination.

    They have biases, a clamped SwiGLU, inputs before outputs, and alternating gate and up, as in files of gpt-oss. The
    expert tensor-parallel group divides each expert; the output is a partial sum, which the dispatcher completes.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        moe: MoEConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,  # Megatron-Core 0.19 names its modules
    ) -> None:
        group = pg_collection.expt_tp
        super().__init__(
            config.hidden_size,
            moe.intermediate_size,
            num_local_experts,
            activation=moe.activation,
            bias=moe.expert_bias,
            input_major=moe.input_major_experts,
            alternating=moe.alternating_gate_up,
            group=group if group.size() > 1 else None,
            dtype=config.params_dtype,
            device=parameter_device(config),
        )
        self.groups = pg_collection
        for name, parameter in self.named_parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            # Gradient norms count a parameter without the mark on the first tensor-parallel rank only.
            dim = _DIVIDED.get(name, -1)
            set_tensor_model_parallel_attributes(parameter, dim > 0 or group.rank() == 0, dim, 1)

    def forward(  # type: ignore[override]
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the weighted outputs of rows in order of expert, `[M, H]` -> `[M, H]`, and no bias to add."""
        counts = tokens_per_expert.to(permuted_local_hidden_states.device)
        return self.compute(permuted_local_hidden_states, permuted_probs, counts), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Describe the parameters for Megatron's distributed checkpoints.

        The stored tensor holds the gate of all ranks, then the up projection of all ranks, unless they alternate.
        """
        num_offsets, groups = len(sharded_offsets), self.groups
        tp = groups.expt_tp

        def described(
            key: str, tensor: Tensor, replica_id: Any, dim: int | None, part: int, parts: int
        ) -> ShardedTensor:
            divided = [] if dim is None else [(num_offsets + dim, part * tp.size() + tp.rank(), parts * tp.size())]
            experts = (num_offsets, groups.ep.rank(), groups.ep.size())
            offsets = (*sharded_offsets, experts, *divided)
            return ShardedTensor.from_rank_offsets(
                key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=num_offsets
            )

        result: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        for name, parameter in self.named_parameters():
            dim = _DIVIDED.get(name)
            replica_id = (0, 0 if dim is not None else tp.rank(), groups.expt_dp.rank())
            if not name.startswith("gate_up") or self.alternating:
                result[prefix + name] = described(prefix + name, parameter, replica_id, dim, 0, 1)
                continue

            def halves(key: str, tensor: Tensor, replica_id: Any, _range: Any) -> list[ShardedTensor]:
                parts = enumerate(tensor.chunk(2, dim=-1))
                return [described(key, half, replica_id, tensor.dim() - 1, part, 2) for part, half in parts]

            result[prefix + name] = ShardedTensorFactory(prefix + name, parameter, halves, joined, replica_id)
        return result


def joined(halves: list[Tensor]) -> Tensor:
    """Join the gate and the up projection of a rank."""
    return torch.cat(halves, dim=-1)
