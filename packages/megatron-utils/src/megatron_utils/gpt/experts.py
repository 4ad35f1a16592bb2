"""Modules of gpt-oss' mixture of experts, for places of Megatron-Core's layer spec that have no such module."""

from __future__ import annotations

from copy import copy
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
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
    ) -> dict[str, ShardedTensor]:
        """Describe the parameters for Megatron's distributed checkpoints."""
        num_offsets, groups = len(sharded_offsets), self.groups
        result = {}
        for name, parameter in self.named_parameters():
            divided = [(0, groups.ep)] + ([(_DIVIDED[name], groups.expt_tp)] if name in _DIVIDED else [])
            copies = 0 if name in _DIVIDED else groups.expt_tp.rank()
            result[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                parameter,
                *sharded_offsets,
                *((num_offsets + dim, group.rank(), group.size()) for dim, group in divided),
                replica_id=(0, copies, groups.expt_dp.rank()),
                prepend_axis_num=num_offsets,
            )
        return result
